"""Saves in the background: the caller waits only for a copy of this rank's share, and a thread does the rest.

The large calls of the thread run without the GIL, and its votes use a separate group.
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
from allranks.checkpoint.layout import CACHE_LINE_BYTES, SaveJob
from allranks.checkpoint.part_descriptions import as_words, local_part
from allranks.checkpoint.participants import Participants
from allranks.checkpoint.saving import SaveCall, gather
from allranks.checkpoint.values import Flat

__all__ = ["Saving", "duplicate_participants", "raise_failure", "save_async", "settle", "raise_earlier_failure_first"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Saving:
    """A save in progress in the background.

    Attributes:
        folder: The folder of the checkpoints.
        step: Step of the training.
        stall_s: Duration of the call of ``save_async``, in seconds.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.stall_s = folder, step, 0.0
        self._ended = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def done(self) -> bool:
        """Return whether the save has finished, with or without success."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: In seconds. None: no limit.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The checkpoint was not saved. The message has the cause.
            TimeoutError: The save has not finished in time. It continues.
        """
        from allranks._base.errors import TimeoutError

        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"checkpoint: step {self.step} was not saved into {self.folder} within {timeout:g} s, and the save"
                " continues.\n  Call wait() again, with a longer timeout or without one."
            )
        self._is_reported = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def __repr__(self) -> str:
        how = "in progress" if not self.done() else "failed" if self._error is not None else "complete"
        return f"<Saving of step {self.step} into {self.folder}: {how}>"


class _Background:
    """State that all background saves share: the save in progress, at most one, and the memory for its copy."""

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.memory: Tensor | None = None
        # (identity of the program's group, the separate group)
        self.duplicate: tuple[object, Participants] | None = None

    def settle(self) -> None:
        """Wait for the save in progress, and raise its error unless a call has raised it already."""
        # Cleared before the wait, so that an error is raised by one call only.
        saving, self.saving = self.saving, None
        if saving is not None:
            saving._ended.wait()
            if saving._error is not None and not saving._is_reported:
                saving._is_reported = True
                raise saving._error

    def finish(self) -> None:
        """Wait for the save in progress."""
        if self.saving is not None:
            self.saving._ended.wait()

    def raise_failure(self) -> None:
        """Raise the error of a finished save unless a call has raised it already. Does not wait."""
        if self.saving is not None and self.saving.done():
            self.settle()

    def report_at_exit(self) -> None:
        """At process exit: print an error that no call has raised, and make the exit code 1."""
        saving = self.saving
        if saving is not None and saving._error is not None and not saving._is_reported:
            print(f"allranks: {saving._error}", file=sys.stderr, flush=True)
            # Otherwise a failed last checkpoint would end with exit code 0.
            _exit_with_an_error()

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory of this size whose pages are present."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # free the old memory before allocating the new
            self.memory = _prefaulted(nbytes)
        return self.memory[:nbytes]


_background = _Background()
atexit.register(_background.report_at_exit)  # Python has joined the thread before it calls the handlers


def settle() -> None:
    """See ``_Background.settle``."""
    _background.settle()


def raise_failure() -> None:
    """See ``_Background.raise_failure``."""
    _background.raise_failure()


def raise_earlier_failure_first(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a call so that it first raises the error of an earlier save."""

    @functools.wraps(call)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        raise_failure()
        return call(*args, **kwargs)

    return checked


def _exit_with_an_error() -> None:
    """Make the exit code of a terminating process 1.

    Python fixes the exit code before it calls its exit handlers. Therefore register a handler of the C library, which
    calls ``exit(1)`` while the process already terminates.
    """
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.exit, ctypes.c_void_p), ctypes.c_void_p(1), None)


def _prefaulted(nbytes: int) -> Tensor:
    """Return memory whose pages are present.

    The kernel would otherwise clear each page at its first write, and the caller would wait for it.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # An optimization: a kernel without transparent huge pages refuses it.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Before Linux 5.14, the kernel refuses it, and clears the pages during the first copy.
    with contextlib.suppress(OSError):
        memory.madvise(_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# Seconds that the thread waits so that the caller returns to the training first. The thread could otherwise hold the
# GIL for this long.
_START_DELAY_S = 0.005
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
    """Copy this rank's share, and write it in the background; see ``allranks.checkpoint.save_async``."""
    began = time.monotonic()
    settle()
    call = SaveCall(folder, step, keep, keep_every, group)
    # In the calling thread: creating a group is a collective call, which all ranks make in the same order.
    participants = duplicate_participants(call.participants)
    gathered = gather(call, state, own, alike)
    jobs = gathered.plan.files.get(call.participants.rank, [])
    views: list[memoryview] = []
    failure: BaseException | None = None
    try:
        views = _copy_to_memory(jobs, gathered.flat)
    except BaseException as error:  # noqa: BLE001 - the other ranks wait for this one: the thread reports it to all
        failure = error
    # The state belongs to the caller again: the thread must use only the copy.
    gathered.flat.tensors.clear()
    gathered.is_copied = True
    saving = Saving(call.folder, step)

    def run() -> None:
        time.sleep(_START_DELAY_S)
        try:
            saving._path = call.write(gathered, participants, views, failure)
        except BaseException as error:  # noqa: BLE001 - the next call raises it
            saving._error = error
        # In every case: `settle` waits for this event without a timeout.
        finally:
            saving._ended.set()

    thread = threading.Thread(target=run, name=f"allranks-checkpoint-{step}")
    _background.saving = saving
    try:
        with guard:
            thread.start()
    except RuntimeError as error:  # the system permits no further thread: save in this one
        failure = error
        run()
    saving.stall_s = time.monotonic() - began
    # After the thread has started, so that the other ranks receive the failure instead of waiting.
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # such as Ctrl-C
    return saving


def duplicate_participants(participants: Participants) -> Participants:
    """Return the same ranks in a separate group, so that their calls do not mix with the program's.

    The group of an earlier call is reused if every rank still has it open.
    """
    if participants.size == 1:
        return participants
    cached = _background.duplicate
    is_reusable = cached is not None and cached[0] == participants.identity and cached[1].is_open()
    # Creating a group needs all ranks, so all of them must take the same branch.
    if not all(participants.exchange(is_reusable, bool)):
        cached = _background.duplicate = (participants.identity, participants.duplicate(_background.finish))
    assert cached is not None
    return cached[1]


def _copy_to_memory(jobs: Sequence[SaveJob], flat: Flat) -> list[memoryview]:
    memory = _background.allocate(sum(_aligned(job.description.nbytes) for job in jobs))
    views, offset = [], 0
    for job in jobs:
        part = local_part(job.description.name, flat.tensors[job.description.name])[0]
        destination = memory[offset : offset + part.nbytes]
        if part.nbytes:
            words = as_words(part)
            destination.view(words.dtype).view(words.shape).copy_(words)
        views.append(view_of(destination) if part.nbytes else memoryview(b""))
        # Each part begins at a cache line, as its tensor does: other copies are slower (see `layout.place`).
        offset += _aligned(part.nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
