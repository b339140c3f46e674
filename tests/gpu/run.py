"""Run every check of `checks` on CUDA tensors, for each engine that supports them.

    python tests/gpu/run.py                # all
    python tests/gpu/run.py nccl stream    # those with one of these words in their names

Prints a row for each check: ok or FAIL, the time in ms (including the start of the ranks and of CUDA), and its
measurements. The errors follow. Exits with 1 if a check failed. Exits with 77 and a message if there is no NVIDIA GPU
or torch has no CUDA.

With several GPUs, nccl has one rank on each GPU. The native engine runs with two ranks on one GPU and, in a second row,
with one rank on each GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import checks
import torch

from allranks._base.errors import AllranksError
from allranks.testing import run_ranks

NO_GPU = 77  # test runners interpret this exit code as "skipped"
FOLDER = str(Path(__file__).parent)


class Row(NamedTuple):
    """One check with a number of ranks on a backend."""

    check: checks.Check
    backend: str | None
    ranks: int
    env: dict[str, str] = {}  # noqa: RUF012 - not changed
    loses: bool = False
    """The last rank exits during the check."""

    @property
    def name(self) -> str:
        """Name of the check in the table."""
        return f"{self.check.__name__} on {self.backend or 'the default'}, ranks: {self.ranks}"


def rows(gpus: int) -> list[Row]:
    """Return all rows for this number of GPUs."""
    native = (*checks.CHECKS, checks.streams)
    shared = {"LOCAL_RANK": "0"}
    every = [Row(check, "native", 2, shared) for check in native]
    every.append(Row(checks.every_verb, "native", 4, shared))
    if gpus > 1:
        every += [Row(check, "native", gpus) for check in native]
    every += [Row(check, "nccl", gpus) for check in checks.ON_NCCL]
    every += [Row(check, None, gpus) for check in (*checks.ON_NCCL, checks.cpu_beside_it)]
    every += [Row(check, "cpu:gloo,cuda:nccl", gpus) for check in (checks.every_verb, checks.cpu_beside_it)]
    every.append(Row(checks.a_loss, "native", 3, shared, loses=True))
    if gpus > 1:
        every += [Row(checks.a_loss, backend, gpus, loses=True) for backend in ("nccl", None)]
    every.append(Row(checks.two_ranks_on_one_gpu, "nccl", 2, shared))
    every.append(Row(checks.plugin_beside_nccl, "native", gpus))
    return every


def main(words: list[str]) -> int:
    """Run the rows that have one of the words in their names, or all; return the exit code."""
    gpus = torch.cuda.device_count()
    if not gpus:
        print(f"No NVIDIA GPU that this torch ({torch.__version__}) can use: no check was run.")
        return NO_GPU
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPUs: {gpus}\n")
    print(f"{'check':<56} {'':<4} {'ms':>7}  measured")
    failures = []
    for row in rows(gpus):
        if words and not any(word in row.name for word in words):
            continue
        began = time.perf_counter()
        said, ended = "", "ok"
        try:
            said = run_ranks(
                row.ranks, checks.on, [row.check], row.backend, "cuda", FOLDER,
                init=False, env=row.env, may_die=[row.ranks - 1] if row.loses else [], timeout_s=120,
            )[0]  # fmt: skip
        except AllranksError as error:
            ended = "FAIL"
            failures.append(f"--- {row.name}\n{error}")
        print(f"{row.name:<56} {ended:<4} {(time.perf_counter() - began) * 1e3:>7.0f}  {said}", flush=True)
    print("\n" + "\n".join(failures) if failures else "\nall ok")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
