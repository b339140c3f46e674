"""Where this process records its calls: memory that its agent holds too, or its own where there is no agent."""

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
"""The variable by which an agent gives a rank its memory: a path in /proc, as descriptors may be closed on the way."""

RECORD_SWITCH = "ALLRANKS_RECORD"

TRACE_FOLDER = "ALLRANKS_TRACE"
"""The variable with a folder in which all calls are recorded, from the first group on."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_recorder: _core.Recorder | None = None
_owner: TraceOwner | None = None
_file: FileRecording | None = None
_reader: TraceReader | None = None
_made = -1  # forks() then
_off = False
_kept: Descriptor | None = None
followers: list[Callable[[Path], Callable[[], None]]] = []
"""Called with the folder when this process begins to record in a file, for those that record with it:
a master's workers. Returns what ends that."""
has_agent = False
"""Whether an agent holds this process's memory, and tells why ranks wait."""


def create_memory(world_size: int) -> int:
    """A descriptor of memory for the calls of one rank; the caller closes it."""
    try:
        fd = os.memfd_create("allranks-calls", os.MFD_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"memfd_create: {error.strerror}") from None
    try:
        os.ftruncate(fd, memory_bytes(RECORDS, world_size))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise OSError(errno.EFBIG, "the limit on the size of files is too low (ulimit -f)") from None
        raise
    return fd


def recorder(rank: int = 0, world_size: int = 1, host: str = "") -> _core.Recorder | None:
    """This process's recorder, which the first call makes.

    None if it is switched off (ALLRANKS_RECORD=0), and where the system has no memory for it: the job goes on.
    """
    global _recorder, _reader, _made, _owner, _file
    with _lock:
        if _made != forks():
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
        _kept = Descriptor(os.dup(fd))  # other ranks of this host find it in /proc
    # A forked child has no such mapping, and must not remove what it has there instead.
    view.madvise(mmap.MADV_DONTFORK)
    leak(view)
    _recorder = _core.Recorder(fd, RECORDS, rank, world_size, layout_size, host)
    _reader = TraceReader(view)
    _owner = TraceOwner(rank, world_size, layout_size, host)
    _record_all(_recorder, _owner)


def _record_all(recorder: _core.Recorder, owner: TraceOwner) -> None:
    """Records all calls in a file, if ALLRANKS_TRACE asks for it. The job goes on where that is impossible."""
    global _file
    folder = os.environ.get(TRACE_FOLDER, "")
    if not folder:
        return
    try:
        _file = FileRecording(recorder, owner, Path(folder))
    except UsageError as error:
        _log.warning("rank %d: %s (%s)", owner.rank, error, TRACE_FOLDER)
        return
    atexit.register(_file.stop)


def record_in(folder: Path) -> FileRecording:
    """Records all calls of this process in a new file in a folder, from now on.

    Raises:
        NotInitializedError: there is no group yet.
        UsageError: calls are not recorded (ALLRANKS_RECORD=0), are recorded in another file already, or the file cannot
            be made.
    """
    global _file
    with _lock:
        if _made != forks():
            raise NotInitializedError("there is nothing to record before the first group: call init_process_group()")
        if _recorder is None or _owner is None:
            raise UsageError(f"calls are not recorded in this process ({RECORD_SWITCH}=0)")
        if _file is not None and _file.active:
            raise UsageError(
                f"calls are recorded in {str(_file.path)!r} already; a process has one such file at a time"
            )
        _file = FileRecording(_recorder, _owner, folder)
        return _file


def records_in_file() -> bool:
    """Whether all calls of this process are recorded in a file now."""
    return _file is not None and _file.active


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Groups that are made meanwhile are not recorded: for who measures what recording costs."""
    global _off
    _off = True
    try:
        yield
    finally:
        _off = False


def reader() -> TraceReader | None:
    """What this process has recorded; None if nothing is."""
    return _reader if _made == forks() else None


def memory_of(pid: int) -> TraceReader | None:
    """A copy of what another process of this host has recorded, if it belongs to this user and has no agent."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith("/memfd:allranks-calls"):
                with open(f"{folder}/{name}", "rb") as file:
                    return TraceReader(file.read())
    except (OSError, TraceError):  # it is gone, another user's, or about to begin
        return None
    return None


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
            pid = TraceReader(bytes(view)).identity.pid
        except TraceError:
            return False
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")
