"""Trace files: all calls of one process each, in the layout of its memory with space for more calls.

A folder has one file per rank: ``rank-3.trace``. A restarted rank, or a second program, gets a new name:
``rank-3.1.trace``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks._base.errors import UsageError
from allranks._base.forks import forks
from allranks._trace.reader import TraceError, TraceReader, bytes_used, memory_bytes

if TYPE_CHECKING:
    from allranks import _core

__all__ = ["MOST_CALLS", "FileRecording", "TraceOwner", "open_trace", "trace_files"]

MOST_CALLS = 1 << 22
"""The most calls that a file keeps: 256 MiB at most. The file uses disk space only as calls are recorded."""

_SUFFIX = ".trace"
_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.trace")
_TEXT = 9  # index of the text in the core's description of a failure
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceOwner:
    """The identity under which ``Recorder`` records calls. ``members``: the number of ranks in its tables."""

    rank: int
    world_size: int
    members: int
    host: str


class FileRecording:
    """The recording of all calls of this process in a file of its own, until ``stop``.

    Args:
        recorder: Recorder of this process.
        owner: Identity of this process.
        folder: Folder of the file. It is created if it is missing.
        records: How many of the newest calls the file keeps; a power of two.

    Attributes:
        path: The file.

    Raises:
        UsageError: The file cannot be created.
    """

    def __init__(self, recorder: _core.Recorder, owner: TraceOwner, folder: Path, records: int = MOST_CALLS) -> None:
        self._recorder: _core.Recorder | None = recorder
        self._forks = forks()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd, self.path = _new_file(folder, owner.rank)
        except OSError as error:
            raise UsageError(
                f"cannot record calls in {str(folder)!r}: {error.strerror}.\n"
                "  Use a folder in which this process can create files."
            ) from error
        try:
            # ``record_to`` takes ownership of the descriptor, even if it fails.
            os.ftruncate(fd, memory_bytes(records, owner.members))
            recorder.record_to(fd, records, owner.rank, owner.world_size, owner.members, owner.host)
        except Exception as error:
            self.path.unlink()
            # A failure of the core also describes a call and ranks. Here there are none, so only the text is used.
            why = error.args[_TEXT] if type(error).__module__ == "allranks._core" else getattr(error, "strerror", error)
            raise UsageError(f"cannot record calls in {str(self.path)!r}: {why}") from error

    @property
    def active(self) -> bool:
        """Whether calls are recorded in the file now."""
        return self._recorder is not None and self._forks == forks()

    def stop(self) -> None:
        """Stop the recording. Log a warning if the disk was full and calls are missing. No effect in a forked child."""
        if not self.active or self._recorder is None:
            return
        self._recorder.stop()
        self._recorder = None
        with contextlib.suppress(OSError, TraceError):  # the user has removed the file
            reader = open_trace(self.path)
            kept = _kept(reader)
            if kept < reader.count and not reader.last(1):
                _log.warning(
                    "the disk is full: %s has the first %d of %d calls.\n  Use a folder on a disk with more space.",
                    self.path,
                    kept,
                    reader.count,
                )


def _new_file(folder: Path, rank: int) -> tuple[int, Path]:
    attempt = 0
    while True:
        path = folder / (f"rank-{rank}.{attempt}{_SUFFIX}" if attempt else f"rank-{rank}{_SUFFIX}")
        try:
            # O_EXCL: ranks of two jobs may choose the same name at the same moment.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        except FileExistsError:
            attempt += 1


def _kept(reader: TraceReader) -> int:
    """Return how many calls from the first on are in the file, if the later ones are missing."""
    low, high = 0, reader.count
    # A full disk ends the recording, so the available calls are a prefix and a binary search finds its end.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reader.has(middle) else (low, middle - 1)
    return low


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the trace files of the given paths. A folder stands for all its trace files, in the order of their ranks.

    Raises:
        TraceError: There is none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        try:
            inside = [each for each in path.iterdir() if each.name.endswith(_SUFFIX)]
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from None
        if not inside:
            raise TraceError(
                f"{path} has no trace files (rank-N{_SUFFIX}).\n  Record them with `allranks run --trace {path}`."
            )
        found += sorted(inside, key=_order)
    return list(dict.fromkeys(found))


def _order(path: Path) -> tuple[int, int, str]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0), "") if match else (1 << 31, 0, path.name)


def open_trace(path: Path) -> TraceReader:
    """Return a reader of a trace file, which may still be written.

    Raises:
        TraceError: The file cannot be read, or is not a trace file. The error names it.
    """
    try:
        with open(path, "rb") as file:
            # The file is copied, not mapped: its process may truncate it at any time, and a read beyond the end of a
            # mapped file raises SIGBUS.
            head = file.read(320)
            size = min(bytes_used(head), os.fstat(file.fileno()).st_size)
            return TraceReader(head + file.read(max(0, size - len(head))), str(path))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
