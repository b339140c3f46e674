"""The rows of `run.py`: which check runs with which engine and how many ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import checks
import whole_jobs

from allranks.testing import run_ranks

FOLDER = str(Path(__file__).parent)
ONE_GPU = {"LOCAL_RANK": "0"}
"""All ranks use the first GPU."""
SEVERAL_PER_GPU = {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""The same on nccl. NVLS (sums in the NVLink switch) does not support several ranks of one GPU."""


class Row(NamedTuple):
    """One check on one engine.

    Attributes:
        check: Name of the check.
        backend: Name of the engine.
        ranks: Number of ranks.
        run: Runs it within a limit in seconds, and returns its measurements. Raises an error if it fails.
        alone: It measures a time, so no other row runs concurrently.
    """

    check: str
    backend: str
    ranks: int
    run: Callable[[float], str]
    alone: bool

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.check} on {self.backend}, ranks: {self.ranks}"


class Table:
    """Collects rows for one type of device: ``cuda``, or ``cpu`` for a run without a GPU."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: list[Row] = []

    def on_ranks(
        self,
        several: Iterable[checks.Check],
        backend: str | None,
        ranks: int,
        env: Mapping[str, str] = {},
        loses: bool = False,
    ) -> None:
        """Add a row for each check. ``loses``: the last rank is killed in the check."""
        backend = self._here(backend)
        for check in several:
            if self.kind == "cuda" or check not in checks.NOT_ON_THE_CPU:
                run = functools.partial(_on_ranks, check, backend, ranks, env, loses, self.kind)
                name = backend or "the default"
                self.rows.append(Row(check.__name__, name, ranks, run, check is checks.large))

    def job(
        self, job: Callable[..., str], ranks: int, backend: str, *args: str, env: Mapping[str, str] = ONE_GPU
    ) -> None:
        """Add a row for a whole job under a launcher."""
        here = self._here(backend) or backend
        run = functools.partial(_job, job, (here, *args), env, self.kind)
        self.rows.append(Row(" ".join((job.__name__, *args)), here, ranks, run, False))

    def _here(self, backend: str | None) -> str | None:
        if self.kind == "cpu" and backend is not None and "nccl" in backend:
            return "gloo"
        return backend


def rows(kind: str, gpus: int) -> list[Row]:
    """Return the rows with one rank per GPU on nccl. The longest ones come first."""
    table = Table(kind)
    table.job(whole_jobs.recovery, 3, "native")
    table.job(whole_jobs.hang, 2, "allranks", "late")
    table.job(whole_jobs.hang, 2, "cpu:gloo,cuda:nccl", "busy")
    table.job(whole_jobs.workers, 2, "native")
    if gpus > 1:
        table.job(whole_jobs.hang, 2, "nccl", "late", env={})
    if gpus > 2:
        table.job(whole_jobs.recovery, 3, "default", env={})
    on_nccl = (*checks.ON_NCCL, *checks.ON_STREAMS)
    native = (*checks.CHECKS, *checks.ON_STREAMS)
    table.on_ranks(on_nccl, "nccl", gpus)
    table.on_ranks(native, "native", 2, ONE_GPU)
    table.on_ranks([checks.plugin_beside_nccl], "native", gpus)
    table.on_ranks([checks.plugin_alone], "native", 2, ONE_GPU)
    table.on_ranks((*on_nccl, checks.cpu_beside_it), None, gpus)
    table.on_ranks((checks.every_verb, checks.cpu_beside_it), "cpu:gloo,cuda:nccl", gpus)
    table.on_ranks([checks.two_ranks_on_one_gpu], "nccl", 2, ONE_GPU | {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    table.on_ranks([checks.a_loss], "native", 3, ONE_GPU, loses=True)
    table.on_ranks((*checks.CHECKS, checks.plugin_alone), "native", 4, ONE_GPU)
    if gpus > 1:
        table.on_ranks(native, "native", gpus)
        for backend in ("nccl", None):
            table.on_ranks([checks.a_loss], backend, gpus, loses=True)
    return table.rows


def several_per_gpu(kind: str) -> list[Row]:
    """Return the rows with several ranks of nccl on one GPU."""
    table = Table(kind)
    table.job(whole_jobs.hang, 2, "nccl", "late", env=SEVERAL_PER_GPU)
    for ranks in (2, 4):
        table.on_ranks((*checks.ON_NCCL, *checks.ON_STREAMS), "nccl", ranks, SEVERAL_PER_GPU)
        table.on_ranks([checks.plugin_beside_nccl], "native", ranks, SEVERAL_PER_GPU)
    table.on_ranks([checks.cpu_beside_it], None, 2, SEVERAL_PER_GPU)
    table.on_ranks([checks.a_loss], "nccl", 3, SEVERAL_PER_GPU, loses=True)
    table.job(whole_jobs.recovery, 3, "default", env=SEVERAL_PER_GPU)
    return table.rows


def _on_ranks(
    check: checks.Check,
    backend: str | None,
    ranks: int,
    env: Mapping[str, str],
    loses: bool,
    kind: str,
    limit_s: float,
) -> str:
    may_die = [ranks - 1] if loses else []
    arguments = [check], backend, kind, FOLDER
    found = run_ranks(ranks, checks.on, *arguments, init=False, env=env, may_die=may_die, timeout_s=limit_s)
    return found[0] or ""


def _job(job: Callable[..., str], args: tuple[str, ...], env: Mapping[str, str], kind: str, limit_s: float) -> str:
    return job(kind, env, limit_s, *args)
