"""Saves in the background: the stall is a copy of what this rank writes, and a thread does the rest.

Its large calls run without the GIL, and it votes on a group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from allranks._base.forks import guard
from allranks._call.bytes import view_of
from allranks.checkpoint import folders
from allranks.checkpoint.company import Company
from allranks.checkpoint.layout import LINE, SaveJob
from allranks.checkpoint.offers import local_part, words_of
from allranks.checkpoint.saving import SaveCall, gather
from allranks.checkpoint.values import Flat

__all__ = ["Saving", "company_apart", "raise_failure", "save_async", "settle", "telling"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Saving:
    """A save that goes on in the background.

    Attributes:
        folder: where to.
        step: of the training.
        stall_s: how long the call of ``save_async`` took.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.stall_s = folder, step, 0.0
        self._ended = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is complete.

        Args:
            timeout: in seconds; None: for ever.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it was not saved, and why.
            TimeoutError: it has not ended in time. It goes on.
        """
        from allranks._base.errors import TimeoutError

        if not self._ended.wait(timeout):
            raise TimeoutError(f"checkpoint: step {self.step} was not saved into {self.folder} within {timeout:g} s")
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def __repr__(self) -> str:
        how = "goes on" if not self.done() else "failed" if self._error is not None else "is complete"
        return f"<Saving of step {self.step} into {self.folder}: {how}>"


class _Background:
    """What saves in the background share: at most one of them at a time, and its memory."""

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.memory: Tensor | None = None
        self.apart: tuple[object, Company] | None = None  # whose ranks, and they

    def settle(self) -> None:
        """Waits for the save that goes on; raises its error, if nobody has been told."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving._ended.wait()
            if saving._error is not None and not saving._told:
                saving._told = True
                raise saving._error

    def finish(self) -> None:
        """Waits for the save that goes on."""
        if self.saving is not None:
            self.saving._ended.wait()

    def raise_failure(self) -> None:
        """Raises the error of a save that has ended, if nobody has been told. Waits for none."""
        if self.saving is not None and self.saving.done():
            self.settle()

    def tell(self) -> None:
        """At the end of the process: says what nobody was told, and makes the exit code 1."""
        saving = self.saving
        if saving is not None and saving._error is not None and not saving._told:
            print(f"allranks: {saving._error}", file=sys.stderr, flush=True)
            _exit_with_an_error()

    def take(self, nbytes: int) -> Tensor:
        """So much memory, which has been touched."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None
            self.memory = _touched(nbytes)
        return self.memory[:nbytes]


_background = _Background()
atexit.register(_background.tell)  # the thread has ended then


def settle() -> None:
    """See ``_Background.settle``."""
    _background.settle()


def raise_failure() -> None:
    """See ``_Background.raise_failure``."""
    _background.raise_failure()


def telling(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same call, which raises the error of an earlier save first."""

    @functools.wraps(call)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        raise_failure()
        return call(*args, **kwargs)

    return told


def _exit_with_an_error() -> None:
    """Makes the exit code of a process that is ending 1. Python has decided on it before its handlers run. So one of
    the C library is added, which begins the end again where it is, with another code."""
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.exit, ctypes.c_void_p), ctypes.c_void_p(1), None)


def _touched(nbytes: int) -> Tensor:
    """Memory whose pages are there: the kernel would clear each when it is first written to, in the stall."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        memory.madvise(_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_LATER_S = 0.005  # until the caller is back in the training: the thread would keep the interpreter for so long
_POPULATE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


def save_async(
    state: object,
    folder: folders.PathLike,
    *,
    step: int,
    keep: int | None = None,
    keep_every: int | None = None,
    own: Sequence[str] = (),
    alike: Sequence[str] = (),
    group: Any = None,
) -> Saving:
    """Copies what this rank will write, and writes it in the background; see ``allranks.checkpoint.save_async``."""
    began = time.monotonic()
    settle()
    call = SaveCall(folder, step, keep, keep_every, group)
    company = company_apart(call.company)
    gathered = gather(call, state, own, alike)
    jobs = gathered.plan.files.get(call.company.rank, [])
    views: list[memoryview] = []
    failure: BaseException | None = None
    try:
        views = _copied(jobs, gathered.flat)
    except BaseException as error:  # noqa: BLE001 - the other ranks wait for this one: told to all by the thread
        failure = error
    gathered.flat.tensors.clear()
    gathered.is_copied = True
    saving = Saving(call.folder, step)

    def run() -> None:
        time.sleep(_LATER_S)
        try:
            saving._path = call.write(gathered, company, views, failure)
        except BaseException as error:  # noqa: BLE001 - it is raised by the next call
            saving._error = error
        finally:
            saving._ended.set()

    thread = threading.Thread(target=run, name=f"allranks-checkpoint-{step}")
    _background.saving = saving
    try:
        with guard:
            thread.start()
    except RuntimeError as error:  # there are too many threads
        failure = error
        run()
    saving.stall_s = time.monotonic() - began
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # Ctrl-C
    return saving


def company_apart(company: Company) -> Company:
    """The same ranks, whose calls do not mix with the program's: those made before, unless one of them lacks them."""
    if company.size == 1:
        return company
    kept = _background.apart
    mine = kept is not None and kept[0] == company.identity and kept[1].is_open()
    if not all(company.exchange(mine, bool)):
        kept = _background.apart = (company.identity, company.apart(_background.finish))
    assert kept is not None
    return kept[1]


def _copied(jobs: Sequence[SaveJob], flat: Flat) -> list[memoryview]:
    memory = _background.take(sum(_aligned(job.offer.nbytes) for job in jobs))
    views, at = [], 0
    for job in jobs:
        part = local_part(job.offer.name, flat.tensors[job.offer.name])[0]
        place = memory[at : at + part.nbytes]
        if part.nbytes:
            words = words_of(part)
            place.view(words.dtype).view(words.shape).copy_(words)
        views.append(view_of(place) if part.nbytes else memoryview(b""))
        at += _aligned(part.nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
