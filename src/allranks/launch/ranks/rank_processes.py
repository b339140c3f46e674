"""The processes of the ranks of this host: their output, their state, and signals to them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import partial

import msgspec

from allranks._net.frames import LARGEST, FrameDecoder
from allranks._trace.inspection import rank_state
from allranks._trace.stacks import DUMP
from allranks._trace.stats import rank_stats
from allranks.launch.ranks.guard import Guard
from allranks.launch.ranks.pipes import Pipes, resize
from allranks.launch.ranks.placement import CpuPlace
from allranks.launch.ranks.rank import decode_status
from allranks.launch.ranks.recording import RankRecording
from allranks.launch.ranks.template import RankTemplate
from allranks.launch.signals import FORWARDED
from allranks.launch.spec.events import (
    Event,
    FailureReport,
    LongWait,
    Output,
    RankFailed,
    RankProgress,
    RestartRank,
    Returned,
    Stacks,
)
from allranks.launch.spec.options import STATISTICS_S, RankOptions
from allranks.launch.spec.stdio import Stdio

__all__ = ["CHUNK", "POLL_S", "RankPlan", "RankProcesses", "RankProcess", "StartInfo"]

# bytes; the capacity of a pipe on Linux (pipe(7)), so that one read usually empties it.
CHUNK = 1 << 16
POLL_S = 1.0  # seconds between two checks for long waits
# bytes; more than a pipe holds: all that an exited rank wrote, but not the endless output of a child of it.
_LAST_BYTES = 1 << 17


@dataclass(frozen=True)
class RankPlan:
    """The ranks that an agent starts.

    Attributes:
        nproc: number of ranks.
        first: number of the first rank in the job; the others follow.
        ranks: the target of the ranks, and how they start: "fork" continues in a copy of this process, "spawn" executes
            a fresh interpreter.
        environ: the environment that all ranks share.
        stdio: settings of the standard streams of each rank.
        cpu_places: CPUs and GPU of each rank; empty if no rank is restricted.
        role_first: number of the first rank among the ranks of its role; None: the same as in the job.
        starts: for ranks that come from a lost host: the number of processes that each rank slot had before. Other
            ranks are not started. Empty if all ranks start for the first time.
    """

    nproc: int
    ranks: RankOptions
    environ: dict[str, str]
    stdio: tuple[Stdio, ...]
    first: int = 0
    cpu_places: tuple[CpuPlace, ...] = ()
    role_first: int | None = None
    starts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StartInfo:
    """A rank that is being restarted."""

    wanted: RestartRank
    pipes: Pipes
    recording: RankRecording
    at: float


@dataclass
class RankProcess:
    rank: int  # number in the job
    pid: int
    pidfd: int  # -1: the kernel or the container has none
    pipes: Pipes
    recording: RankRecording
    status_frames: FrameDecoder = field(default_factory=lambda: FrameDecoder(LARGEST))
    exited: bool = False
    reaped: bool = False  # another process has replaced it
    waited_for: bool = False
    status: int = 0
    asked: int = 0  # the signal that requested its exit, sent without the processes that it has started


class RankProcesses:
    """The processes of the ranks of this host, and the descriptors through which they report.

    Args:
        plan: what to run.
    """

    def __init__(self, plan: RankPlan, guard: Guard) -> None:
        self._plan = plan
        self._guard = guard
        self._processes: list[RankProcess] = []
        self._wake_read_fd, self.wake = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        # ``signal.set_wakeup_fd`` requires a non-blocking descriptor.
        os.set_blocking(self.wake, False)
        self._selector: selectors.BaseSelector | None = None
        self._open: set[int] = set()  # this process's ends that are not at their end; the selector may not watch them
        self._watched: set[int] = set()
        self._writable: set[int] = set()
        self._reading = True
        self._finished = False
        self._pending_events: list[Event] = []  # for the next poll
        self._to_restart: dict[int, RestartRank] = {}  # requests that wait for the exit of the old process
        self._limits: tuple[Set[int], tuple[int, int]] = set(), (0, 0)
        self._template: RankTemplate | None = None
        self._starting: deque[StartInfo] = deque()  # requests to the template
        self._next_wait_check_at = 0.0
        self._measure_at = 0.0

    @property
    def running(self) -> list[int]:
        """The ranks whose process has not exited."""
        return [process.rank for process in self._processes if not process.exited]

    @property
    def output_open(self) -> bool:
        """Whether a process may still write output: a rank, or a child process that has outlived its rank."""
        return any(fd in self._open for process in self._processes for fd in process.pipes.read_fds.values())

    def _watch_process(self, process: RankProcess) -> None:
        assert self._selector is not None
        self._open |= {*process.pipes.own_fds()}
        self._watch_output(process)
        stacks = process.pipes.stacks_read_fd
        self._selector.register(stacks, selectors.EVENT_READ, partial(self._read_stacks, process))
        if process.pidfd >= 0:
            self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._read_exit, process))

    def _watch_output(self, process: RankProcess) -> None:
        assert self._selector is not None
        for stream, fd in process.pipes.read_fds.items():
            if fd in self._open:
                self._selector.register(fd, selectors.EVENT_READ, partial(self._read_output, process, stream, fd))
        status = process.pipes.status_read_fd
        if status in self._open and status not in self._selector.get_map():
            self._selector.register(status, selectors.EVENT_READ, partial(self._read_status, process))

    def read_output(self, on: bool) -> None:
        """Read the output of the ranks, or leave it in their pipes until the ranks wait.

        Exits and reports are read in any case. The results of functions, which may be large, wait. A report of such a
        rank then arrives with its exit at the latest.
        """
        if on == self._reading or self._selector is None:
            return
        self._reading = on
        for process in self._processes:
            if on:
                self._watch_output(process)
            else:
                read_fds = {*process.pipes.read_fds.values()}
                if self._plan.ranks.target.kind == "function":
                    read_fds.add(process.pipes.status_read_fd)
                for fd in self._open & read_fds:
                    self._selector.unregister(fd)

    def watch(self, fd: int) -> None:
        """Make ``poll`` return also if this descriptor is readable."""
        self._watched.add(fd)
        self._await(fd)

    def unwatch(self, fd: int) -> None:
        """Undo ``watch``."""
        self._watched.discard(fd)
        self._await(fd)

    def _await(self, fd: int) -> None:
        """Register a descriptor for reading, writing, or both: a socket may need both."""
        assert self._selector is not None
        events = selectors.EVENT_READ if fd in self._watched else 0
        events |= selectors.EVENT_WRITE if fd in self._writable else 0
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        if events:
            self._selector.register(fd, events, lambda events: None)

    def watch_writable(self, fds: Set[int]) -> None:
        """Make ``poll`` return also if one of these descriptors is writable. Replaces those of the last call."""
        before, self._writable = self._writable, set(fds)
        for fd in before ^ self._writable:
            self._await(fd)

    def _awake(self, events: list[Event]) -> None:
        os.read(self._wake_read_fd, CHUNK)

    def _read_output(self, process: RankProcess, stream: int, fd: int, events: list[Event]) -> int:
        """Read once. Return the number of bytes; 0 if there are none now, or at the end."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the last process has closed its side of the terminal
            data = b""
        if data:
            events.append(Output(process.rank, stream, data))
        else:
            self._forget(fd)
        return len(data)

    def _read_status(self, process: RankProcess, events: list[Event]) -> int:
        """Read reports and results once. See ``_read_output``."""
        try:
            data = os.read(process.pipes.status_read_fd, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._forget(process.pipes.status_read_fd)
        process.status_frames.feed(data)
        for message in decode_status(process.status_frames):
            if isinstance(message, RestartRank):
                events.append(message)
            elif isinstance(message, RankProgress):
                events.append(msgspec.structs.replace(message, rank=process.rank))
            elif isinstance(message, FailureReport):
                events.append(RankFailed(process.rank, process.pid, message))
            else:
                events.append(Returned(process.rank, message))
        return len(data)

    def _read_stacks(self, process: RankProcess, events: list[Event]) -> int:
        """Read stacks once. See ``_read_output``."""
        try:
            data = os.read(process.pipes.stacks_read_fd, CHUNK)
        except BlockingIOError:
            return 0
        if data:
            events.append(Stacks(process.rank, data))
        else:
            self._forget(process.pipes.stacks_read_fd)
        return len(data)

    def _read_rest(self, process: RankProcess, events: list[Event]) -> None:
        """Read the output that a rank wrote before it exited."""
        if self._selector is None:
            return
        readers = {process.pipes.status_read_fd: partial(self._read_status, process)}
        readers[process.pipes.stacks_read_fd] = partial(self._read_stacks, process)
        readers |= {fd: partial(self._read_output, process, n, fd) for n, fd in process.pipes.read_fds.items()}
        for fd, read in readers.items():
            # Bounded, because a process that the rank left behind may write to the same pipe.
            left = _LAST_BYTES
            while left > 0 and fd in self._open and (count := read(events)):
                left -= count

    def _forget(self, fd: int) -> None:
        """Close a descriptor that is read to its end."""
        if self._selector is None:
            os.close(fd)
        elif fd in self._open:
            # Only here, and only once: the closed number may belong to another file afterwards.
            self._open.remove(fd)
            if fd in self._selector.get_map():
                # Before the close, so that a new descriptor with this number can be registered.
                self._selector.unregister(fd)
            os.close(fd)

    def signal(self, number: int, ranks: list[int], alone: bool = False) -> None:
        """Send a signal to the process groups of ranks that have not exited.

        Args:
            number: the signal.
            ranks: the ranks.
            alone: exclude the children of python ranks, which may not handle the signal.
        """
        for process in self._processes:
            # A process that exits right here stays unreaped, so its pid is not reused.
            if process.rank in ranks and not process.exited:
                if alone and self._plan.ranks.target.is_python:
                    os.kill(process.pid, number)
                    # ``Agent._read_exit`` sends the same signal to the rest of the group when the rank has exited.
                    process.asked = number if number in FORWARDED else process.asked
                    continue
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # the rank has not created its group yet
                    os.kill(process.pid, number)

    def group_of(self, rank: int) -> int:
        """The process group of a rank."""
        # Processes are listed in the order of their start, so the last one is the current one.
        return next(process.pid for process in reversed(self._processes) if process.rank == rank)

    def stopped_by(self, rank: int) -> int | None:
        """Return the signal that has stopped a rank since the last call; None if none has."""
        try:
            stopped = os.waitid(os.P_PID, self.group_of(rank), os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:  # it has exited
            return None
        return None if stopped is None else stopped.si_status

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of all ranks' terminals, and send them SIGWINCH."""
        for process in self._processes:
            for fd in process.pipes.terminals:
                if fd in self._open:
                    resize(fd, rows, columns)
        self.signal(signal.SIGWINCH, self.running)

    def dump(self, ranks: list[int]) -> None:
        """Request the stacks of ranks that have not exited. ``poll`` returns them, or why there are none."""
        for process in self._processes:
            if process.rank not in ranks or process.exited:
                continue
            stacks = process.pipes.stacks_read_fd
            if why := _no_stacks_reason(process.pid, stacks if stacks in self._open else -1):
                self._pending_events.append(Stacks(process.rank, why=why))
            else:
                os.kill(process.pid, DUMP)

    def inspect(self, ranks: list[int], recent: int = 0) -> None:
        """Read the state of ranks, also of ranks that have exited. ``poll`` returns it as ``RankState``."""
        newest = {process.rank: process for process in self._processes}
        for rank in ranks:
            if (process := newest.get(rank)) is not None:
                self._pending_events.append(
                    rank_state(rank, process.pid, process.recording.reader(), recent, process.exited)
                )

    def _measure(self) -> None:
        now = time.monotonic()
        if self._plan.ranks.statistics and now >= self._measure_at:
            self._measure_at = now + STATISTICS_S
            for process in self._processes:
                if not process.exited:
                    self._report_calls(process, self._pending_events)

    def _report_calls(self, process: RankProcess, events: list[Event]) -> None:
        """Report the durations of a rank's calls, if it has created a group."""
        if (reader := process.recording.reader()) is not None:
            events.append(rank_stats(process.rank, reader, time.monotonic_ns()))

    def _check_long_waits(self) -> None:
        first_s, now = self._plan.ranks.notice_s, time.monotonic()
        if first_s <= 0 or now < self._next_wait_check_at:
            return
        self._next_wait_check_at = now + POLL_S
        for process in self._processes:
            if not process.exited and (found := process.recording.long_wait(first_s)) is not None:
                call, limit_s = found
                self._pending_events.append(LongWait(process.rank, call.index, limit_s))

    def _reap(self, process: RankProcess) -> None:
        """Reap an exited rank and kill its group, which may hold a GPU, port or lock that its next process needs."""
        # Before waitpid: afterwards the kernel may reuse the number of the group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._guard.forget(process.pid)
        os.waitpid(process.pid, 0)
        if process.pidfd >= 0:
            os.close(process.pidfd)
        process.recording.close()
        process.reaped = True

    def _read_exit(self, process: RankProcess, events: list[Event]) -> None:
        """Handle the exit of a rank. `Agent` decides whether it starts again."""
        raise NotImplementedError


def _no_stacks_reason(pid: int, stacks: int) -> str:
    """Return why a process cannot report its stacks; "" if it can.

    Args:
        pid: pid of the process.
        stacks: the descriptor from which the stacks are read; -1 if the process has closed its end.
    """
    with open(f"/proc/{pid}/status", errors="surrogateescape") as file:
        status = dict(line.rstrip("\n").partition(":\t")[::2] for line in file)
    if status["State"].startswith(("T", "t")):
        return f"is stopped (pid {pid}: SIGSTOP, a terminal or a debugger) and cannot report its stacks"
    if not int(status.get("SigCgt", "0"), 16) >> (DUMP - 1) & 1:  # without a handler, the signal would kill the process
        return f"does not run a python script (pid {pid}: a command, or not started yet) and cannot report its stacks"
    # otherwise the stacks would go into one of the program's own files
    if stacks < 0 or not _has_pipe(pid, os.fstat(stacks).st_ino):
        return f"has closed the descriptor for its stacks (pid {pid}) and cannot report them"
    return ""


def _has_pipe(pid: int, inode: int) -> bool:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed since the listing
            if os.readlink(f"{folder}/{name}") == f"pipe:[{inode}]":
                return True
    return False
