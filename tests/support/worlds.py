"""Run one program in two worlds, torch.distributed on gloo and on allranks, and require the same final state.

A program is a function without arguments, written as users write for torch.distributed, without reference to a
backend. It returns its results. The files in ``programs/`` contain such functions. ``Job`` starts the ranks once for a
file, runs every program of it in a fresh world of each kind, and keeps the results, so that each program is a separate
test.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.utils._pytree import keystr, tree_leaves_with_path

from allranks import AllranksError
from allranks._plugin import NAME
from allranks.testing import run_ranks

__all__ = ["Job", "programs", "refusal", "world"]

CALL_TIMEOUT_S = 30
JOB_TIMEOUT_S = 900  # the programs of compiled.py take 110 s on two idle cores, and over 500 s beside other tests
# Vectorized kernels compute the same values, and take g++ twice as long to compile.
PLAIN_KERNELS = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}


def programs(file: Path) -> list[str]:
    """Return the names of the programs in a file.

    The file is not imported, because importing torch's training modules takes seconds.
    """
    tree = ast.parse(file.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


class Job:
    """The programs of a file on ``ranks`` ranks, which run when the first result is requested."""

    def __init__(self, file: Path, ranks: int) -> None:
        self._file = file
        self._ranks = ranks
        self._results: dict[str, list[str]] = {}  # by program: the differences that each rank found
        self._ended = ""

    def assert_same(self, program: str) -> None:
        """Assert that both worlds have the same final state on every rank.

        Raises:
            AssertionError: the states differ; names the rank and the position.
        """
        if not self._results:
            self._run()
        found = self._results[program]
        assert len(found) == self._ranks, f"the ranks exited before or during this program:\n{self._ended}"
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
        assert not wrong, "\n".join(wrong)

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="allranks-test-") as folder:
            try:
                run_ranks(
                    self._ranks, _on_rank, self._file, folder, timeout_s=JOB_TIMEOUT_S, init=False, env=PLAIN_KERNELS
                )
            except AllranksError as error:
                self._ended = str(error)
            for program in programs(self._file):
                files = [Path(folder) / f"{program}-{rank}" for rank in range(self._ranks)]
                self._results[program] = [file.read_text() for file in files if file.exists()]


# Keep the group alive: if a gloo thread that ran callbacks drops the last reference to its group, it aborts.
_last: list[Any] = []


@contextlib.contextmanager
def world(backend: str, file: str | Path) -> Iterator[None]:
    """Initialize torch.distributed on a backend, with the rank and size from the environment."""
    td.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=CALL_TIMEOUT_S),
    )
    _last[:] = [td.group.WORLD]
    try:
        yield
    finally:
        if td.is_initialized():
            td.destroy_process_group()


def refusal(call: Callable[[], Any]) -> str:
    """Return the error of a call that torch does not allow."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any error is accepted, but it must be the same in both worlds
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected an error")


def _on_rank(file: Path, folder: str) -> None:
    """Run the programs, and write the differences of each.

    An exception terminates the rank, because it leaves a broken world.
    """
    warnings.simplefilter("ignore")  # torch's warnings about its own names
    logging.disable(logging.WARNING)
    module = importlib.import_module(f"programs.{file.stem}")
    for name in programs(file):
        found = _compare(getattr(module, name), Path(folder) / f"{name}-world")
        Path(folder, f"{name}-{os.environ['RANK']}").write_text(found)


def _compare(program: Callable[[], Any], file: Path) -> str:
    states = []
    for backend in ("gloo", NAME):
        with world(backend, file.with_suffix(f".{backend}")):
            torch.manual_seed(1)
            states.append(program())
    try:
        _assert_same(*states)
    except AssertionError as error:
        return f"another result than on gloo: {error}"
    return ""


def _assert_same(gloo: Any, ours: Any) -> None:
    """Compare the states. With two ranks there is only one summation order, so every bit must be equal."""
    limits = {"rtol": 0, "atol": 0} if os.environ["WORLD_SIZE"] == "2" else {}
    a, b = tree_leaves_with_path(gloo), tree_leaves_with_path(ours)
    assert [path for path, _ in a] == [path for path, _ in b], (
        f"{[keystr(p) for p, _ in b]}, not {[keystr(p) for p, _ in a]}"
    )
    for (path, want), (_, got) in zip(a, b, strict=True):
        where = f"at {keystr(path)}, {got!r} against gloo's {want!r}"
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, equal_nan=True, msg=where, **limits)
        else:
            assert got == want, where
