"""Where this process records its calls: memory that its agent holds too, or its own where there is no agent."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

from allranks._base.forks import forks
from allranks._trace.reader import Reader, TraceError, memory_bytes

if TYPE_CHECKING:
    from allranks import _core

__all__ = ["MEMORY", "RECORDS", "RECORD_SWITCH", "create_memory", "reader", "recorder"]

RECORDS = 2048
"""How many calls are kept in memory: 128 KiB, and as many calls as torch's Flight Recorder keeps."""

MEMORY = "ALLRANKS_RECORD_MEMORY"
"""The variable by which an agent gives a rank its memory: a path in /proc, as descriptors may be closed on the way."""

RECORD_SWITCH = "ALLRANKS_RECORD"

_lock = threading.Lock()
_recorder: _core.Recorder | None = None
_reader: Reader | None = None
_made = -1  # forks() then


def create_memory(world_size: int) -> int:
    """A descriptor of memory for the calls of one rank; the caller closes it."""
    fd = os.memfd_create("allranks-calls", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, memory_bytes(RECORDS, world_size))
    except BaseException:
        os.close(fd)
        raise
    return fd


def recorder(rank: int = 0, world_size: int = 1, host: str = "") -> _core.Recorder | None:
    """This process's recorder, which the first call makes; None if it is switched off (ALLRANKS_RECORD=0)."""
    global _recorder, _reader, _made
    with _lock:
        if _made != forks():
            _recorder, _reader, _made = None, None, forks()
            if os.environ.get(RECORD_SWITCH, "1") == "0":
                return None
            from allranks import _core

            memory = _given(world_size) or (create_memory(world_size), world_size)
            fd, layout_size = memory
            view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            _recorder = _core.Recorder(fd, RECORDS, rank, world_size, layout_size, host)
            _reader = Reader(view)
        return _recorder


def reader() -> Reader | None:
    """What this process has recorded; None if nothing is."""
    return _reader if _made == forks() else None


def _given(world_size: int) -> tuple[int, int] | None:
    """The agent's memory, if it is there and nobody uses it, and the size of the world that it was made for."""
    path = os.environ.pop(MEMORY, "")  # a process that this one starts is no rank of the agent's
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # in a container that has a /proc of its own
        return None
    launched = os.environ.get("WORLD_SIZE", "")
    for size in (world_size, int(launched) if launched.isdecimal() else 0):
        if os.fstat(fd).st_size == memory_bytes(RECORDS, size) and not _in_use(fd):
            return fd, size
    os.close(fd)
    return None


def _in_use(fd: int) -> bool:
    """Whether another process that lives records there. A rank may run several programs, one after the other."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        try:
            pid = Reader(bytes(view)).identity.pid
        except TraceError:
            return False
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")
