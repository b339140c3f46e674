"""The memory in which this process records its calls: shared with its agent, or its own if there is no agent."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from allranks._base.errors import NotInitializedError, UsageError
from allranks._base.forks import Descriptor, forks, leak
from allranks._base.system import refusal
from allranks._trace.files import FileRecording, TraceOwner
from allranks._trace.kernel import memory_files
from allranks._trace.reader import TraceError, TraceReader, memory_bytes

if TYPE_CHECKING:
    from allranks import _core

__all__ = [
    "MEMORY",
    "RECORDS",
    "RECORD_SWITCH",
    "TRACE_FOLDER",
    "create_memory",
    "followers",
    "has_agent",
    "memory_of",
    "reader",
    "record_in",
    "recorder",
    "records_in_file",
    "switched_off",
]

RECORDS = 2048
"""How many calls are kept in memory: 128 KiB, and as many calls as torch's Flight Recorder keeps."""

MEMORY = "ALLRANKS_RECORD_MEMORY"
"""The variable in which an agent passes memory to a rank: a path in /proc, because a process in between may close
inherited descriptors."""

_MEMORY_NAME = "allranks-calls"

RECORD_SWITCH = "ALLRANKS_RECORD"

TRACE_FOLDER = "ALLRANKS_TRACE"
"""The variable that names the folder in which all calls are recorded, from the first group on."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_recorder: _core.Recorder | None = None
_owner: TraceOwner | None = None
_file: FileRecording | None = None
_reader: TraceReader | None = None
_made = -1  # value of forks() when the recorder was created; a forked child creates its own
_off = False
_kept: Descriptor | None = None
followers: list[Callable[[Path], Callable[[], None]]] = []
"""Called with the folder when this process begins to record in a file, so that others record as well: a master's
workers. Each call returns a function that stops their recording."""
has_agent = False
"""Whether an agent shares this process's memory, and reports why ranks wait."""


def create_memory(world_size: int) -> int:
    """Return a descriptor of memory for the calls of one rank. The caller closes it."""
    try:
        fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"memfd_create: {error.strerror}") from None
    try:
        os.ftruncate(fd, memory_bytes(RECORDS, world_size))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise OSError(errno.EFBIG, "the limit on the size of files is too low: raise `ulimit -f`") from None
        raise
    return fd


def recorder(rank: int = 0, world_size: int = 1, host: str = "") -> _core.Recorder | None:
    """Return the recorder of this process. The first call creates it.

    Return None if recording is switched off (ALLRANKS_RECORD=0). If the system has no memory for it, the job continues
    without a record, and None is returned.
    """
    global _recorder, _reader, _made, _owner, _file
    # Held while the recorder is created, because threads can create the first groups simultaneously.
    with _lock:
        if _made != forks():
            # `_made` is set before the attempt: after a failure, the next group neither tries nor warns again.
            _recorder, _reader, _made, _owner, _file = None, None, forks(), None, None
            if os.environ.get(RECORD_SWITCH, "1") == "0":
                return None
            try:
                _make(rank, world_size, host)
            except (OSError, MemoryError) as error:
                warnings.warn(refusal("calls are not recorded", error), RuntimeWarning, stacklevel=2)
        return None if _off else _recorder


def _make(rank: int, world_size: int, host: str) -> None:
    global _recorder, _reader, _owner, _kept, has_agent
    from allranks import _core

    given = _given(world_size)
    has_agent = given is not None
    fd, layout_size = given or (create_memory(world_size), world_size)
    try:
        view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except BaseException:
        os.close(fd)
        raise
    if not has_agent:
        _kept = Descriptor(os.dup(fd))  # `memory_of` in other ranks of this host finds it in /proc
    # A forked child does not inherit this mapping. It must not unmap another mapping at the same address, hence `leak`.
    view.madvise(mmap.MADV_DONTFORK)
    leak(view)
    _recorder = _core.Recorder(fd, RECORDS, rank, world_size, layout_size, host)
    _reader = TraceReader(view)
    _owner = TraceOwner(rank, world_size, layout_size, host)
    _record_all(_recorder, _owner)


def _record_all(recorder: _core.Recorder, owner: TraceOwner) -> None:
    """Record all calls in a file, if ALLRANKS_TRACE requests it. If this fails, the job continues without a file."""
    global _file
    folder = os.environ.get(TRACE_FOLDER, "")
    if not folder:
        return
    try:
        _file = FileRecording(recorder, owner, Path(folder))
    except UsageError as error:
        _log.warning("rank %d: %s: %s", owner.rank, TRACE_FOLDER, error)
        return
    atexit.register(_file.stop)


def record_in(folder: Path) -> FileRecording:
    """Record all calls of this process in a new file in a folder, from now on.

    Raises:
        NotInitializedError: No group exists yet.
        UsageError: Calls are not recorded (ALLRANKS_RECORD=0) or are already recorded in another file, or the file
            cannot be created.
    """
    global _file
    with _lock:
        if _made != forks():
            raise NotInitializedError(
                "calls cannot be recorded before the first group exists: call init_process_group() first"
            )
        if _recorder is None or _owner is None:
            if os.environ.get(RECORD_SWITCH) == "0":
                raise UsageError(
                    f"calls are not recorded in this process: {RECORD_SWITCH}=0.\n  Unset {RECORD_SWITCH}."
                )
            raise UsageError(
                "calls are not recorded in this process: the system has refused the memory for the record.\n"
                "  Fix the cause that the warning of the first group states."
            )
        if _file is not None and _file.active:
            raise UsageError(
                f"calls are already recorded in {str(_file.path)!r}, and a process records into one file at a time.\n"
                f"  End that recording first, or unset {TRACE_FOLDER}."
            )
        _file = FileRecording(_recorder, _owner, folder)
        return _file


def records_in_file() -> bool:
    """Return whether all calls of this process are recorded in a file now."""
    return _file is not None and _file.active


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Do not record groups that are created inside the context. Benchmarks use it to measure the cost of recording."""
    global _off
    _off = True
    try:
        yield
    finally:
        _off = False


def reader() -> TraceReader | None:
    """Return a reader of this process's record. None if nothing is recorded."""
    # In a forked child, the mapping does not exist (MADV_DONTFORK), and a read would raise SIGSEGV.
    return _reader if _made == forks() else None


def memory_of(pid: int) -> TraceReader | None:
    """Return a copy of the record of another process of this host, if it belongs to this user and has no agent."""
    try:
        for path in memory_files(pid, _MEMORY_NAME):
            with open(path, "rb") as file:
                return TraceReader(file.read())
    except (OSError, TraceError):  # the process has exited, belongs to another user, or has not begun to record
        return None
    return None


def _given(world_size: int) -> tuple[int, int] | None:
    """Return the agent's memory and the world size for which it was created. None if there is none or it is in use."""
    path = os.environ.pop(MEMORY, "")  # a child of this process is not a rank of the agent
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # this process is in a container with its own /proc
        return None
    # The agent sized the memory for the world that it launched. The program's own world may be smaller.
    launched = os.environ.get("WORLD_SIZE", "")
    for size in (world_size, int(launched) if launched.isdecimal() else 0):
        if os.fstat(fd).st_size == memory_bytes(RECORDS, size) and not _in_use(fd):
            return fd, size
    os.close(fd)
    return None


def _in_use(fd: int) -> bool:
    """Return whether another live process records in the memory.

    A rank may run several programs, one after the other.
    """
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        try:
            pid = TraceReader(bytes(view)).identity.pid
        except TraceError:
            return False
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")
