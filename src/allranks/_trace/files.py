"""Trace files: all calls of one process each, in the layout of its memory with room for more.

A folder has one for each rank: ``rank-3.trace``. A rank that is started again, or a second program, gets a name of its
own: ``rank-3.1.trace``.
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
"""How many calls a file keeps: 256 MiB at most. Room is taken as it is needed."""

_SUFFIX = ".trace"
_NAME = re.compile(r"rank-(\d+)(?:\.(\d+))?\.trace")
_TEXT = 9  # of what the core tells of a failure
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceOwner:
    """Whose calls they are, as ``Recorder`` has it; ``members``: for how many ranks its tables are laid out."""

    rank: int
    world_size: int
    members: int
    host: str


class FileRecording:
    """All calls of this process, in a file of its own, until ``stop``.

    Args:
        recorder: of this process.
        owner: whose calls they are.
        folder: where the file is made; the folder is made, too.
        records: how many calls the file keeps, the newest; a power of two.

    Attributes:
        path: the file.

    Raises:
        UsageError: the file cannot be made.
    """

    def __init__(self, recorder: _core.Recorder, owner: TraceOwner, folder: Path, records: int = MOST_CALLS) -> None:
        self._recorder: _core.Recorder | None = recorder
        self._forks = forks()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd, self.path = _new_file(folder, owner.rank)
        except OSError as error:
            raise UsageError(f"cannot record calls in {str(folder)!r}: {error.strerror}") from error
        try:
            # It takes over the descriptor, also where it fails.
            os.ftruncate(fd, memory_bytes(records, owner.members))
            recorder.record_to(fd, records, owner.rank, owner.world_size, owner.members, owner.host)
        except Exception as error:
            self.path.unlink()
            # Of the core's facts about a failure, only the text is of interest: there is no call, and no other rank.
            why = error.args[_TEXT] if type(error).__module__ == "allranks._core" else getattr(error, "strerror", error)
            raise UsageError(f"cannot record calls in {str(self.path)!r}: {why}") from error

    @property
    def active(self) -> bool:
        """Calls are recorded there now."""
        return self._recorder is not None and self._forks == forks()

    def stop(self) -> None:
        """Ends it. Logs a warning if calls are missing, as the disk was full. In a forked child it does nothing."""
        if not self.active or self._recorder is None:
            return
        self._recorder.stop()
        self._recorder = None
        with contextlib.suppress(OSError, TraceError):  # somebody has removed it
            reader = open_trace(self.path)
            kept = _kept(reader)
            if kept < reader.count and not reader.last(1):
                _log.warning("the disk is full: %s has the first %d of %d calls", self.path, kept, reader.count)


def _new_file(folder: Path, rank: int) -> tuple[int, Path]:
    attempt = 0
    while True:
        path = folder / (f"rank-{rank}.{attempt}{_SUFFIX}" if attempt else f"rank-{rank}{_SUFFIX}")
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        except FileExistsError:
            attempt += 1


def _kept(reader: TraceReader) -> int:
    """How many calls there are from the first on, where the later ones are missing."""
    low, high = 0, reader.count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reader.has(middle) else (low, middle - 1)
    return low


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: of a folder all its trace files, in the order of their ranks.

    Raises:
        TraceError: there is none.
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
            raise TraceError(f"{path} has no trace files (rank-N{_SUFFIX}); allranks run --trace {path} writes them")
        found += sorted(inside, key=_order)
    return list(dict.fromkeys(found))


def _order(path: Path) -> tuple[int, int, str]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0), "") if match else (1 << 31, 0, path.name)


def open_trace(path: Path) -> TraceReader:
    """A trace file, also one that is still being written.

    Raises:
        TraceError: it cannot be read, or is none; the error names it.
    """
    try:
        with open(path, "rb") as file:
            # It is read and not mapped, as its process may cut it off at any time.
            head = file.read(320)
            size = min(bytes_used(head), os.fstat(file.fileno()).st_size)
            return TraceReader(head + file.read(max(0, size - len(head))), str(path))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
