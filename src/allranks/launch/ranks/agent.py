"""Starts the ranks of this host and reports events: their output, their failures, their exits.

One thread and one selector serve the pipes, the terminals, and a pidfd for each rank. This module decides nothing:
``policy`` decides when to stop the job, and what a failure means.

An exited rank stays unreaped until the end. Its pid is also its process group, and cannot be reused while the group may
still receive signals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from types import MappingProxyType

from allranks._base.console import printable
from allranks._cluster.outer_job import SEAL, seal
from allranks._elastic.slot_table import START
from allranks._trace.memory import MEMORY
from allranks.launch.ranks.environ import place_environ
from allranks.launch.ranks.pipes import Pipes
from allranks.launch.ranks.preload import preload_for_elastic_ranks
from allranks.launch.ranks.rank import Rank, become_rank
from allranks.launch.ranks.rank_processes import CHUNK, POLL_S, RankPlan, RankProcess, RankProcesses, StartInfo
from allranks.launch.ranks.recording import RankRecording
from allranks.launch.ranks.template import PATIENCE_S, NewRank, RankTemplate
from allranks.launch.spec.events import (
    Event,
    Exited,
    FailureReport,
    LeftBehind,
    RankFailed,
    RankRestarted,
    RestartRank,
)

__all__ = ["Agent", "RankPlan"]

_EXIT_POLL_S = 0.02  # seconds between two checks for exits of ranks that have no pidfd
_OF_PYTHON = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")  # these exit by themselves
_LEFT_BEHIND_S = 0.5  # seconds for processes that a rank left behind, before they receive SIGTERM
_GROUP_POLL_S = 0.02  # seconds; no descriptor reports that the members of a group have exited


class Agent(RankProcesses):
    """The ranks of one host.

    Args:
        plan: the ranks to start.
        guard: kills the ranks if this process cannot.

    Attributes:
        wake: a byte written to this descriptor makes ``poll`` return.
    """

    def start(self, mask: Set[int], files: tuple[int, int]) -> Rank | None:
        """Start all ranks. Return in each of the processes, as ``os.fork`` does.

        The caller blocks the signals that it will handle, so that no signal is lost between fork and handler.

        Args:
            mask: the signal mask for the ranks.
            files: the limits on open files for the ranks.

        Returns:
            None in this process; in a forked rank, the rank. The caller must call its ``run``.

        Raises:
            OSError: a process, pipe or terminal could not be created.
        """
        self._limits = mask, files
        child: Rank | None = None
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise each rank would write the buffered output again
        if self._uses_fork and self._restarts_ranks:
            # Before the pipes of ranks exist, so that the template holds none of them open.
            made = RankTemplate.fork(self._enter_template)
            if isinstance(made, NewRank):
                return self._become_new(made, parent)
            self._template = made
        for local_rank in range(self._plan.nproc):
            if self._plan.starts and self._plan.first + local_rank not in self._plan.starts:
                continue
            pipes = Pipes.open(self._plan.stdio[local_rank])
            recording = self._recording()
            # Before the fork, because the path contains the pid of this process.
            path = recording.path
            pid = os.fork()
            if pid == 0:
                try:
                    self._guard.protect(os.getpid())  # called by the rank, because the agent may be killed right here
                    # A copy of a pipe in another rank would delay its end of file beyond the exit of its own rank.
                    inherited = {fd for p in self._processes for fd in (p.pidfd, p.recording.fd, *p.pipes.own_fds())}
                    inherited |= {recording.fd, self._guard.fd, self._wake_read_fd, self.wake, *pipes.own_fds()}
                    become_rank(parent, pipes, self._plan.stdio[local_rank], tuple(inherited - {-1}), mask, files)
                    child = self._become(local_rank, pipes, path)
                finally:
                    if child is None:  # an error must not propagate into the launcher's code, of which this is a copy
                        traceback.print_exc()
                        os._exit(1)
                return child
            # Otherwise this process would keep its own ends from their end of file.
            pipes.close_rank_ends()
            rank = self._plan.first + local_rank
            self._processes.append(RankProcess(rank, pid, _pidfd(pid), pipes, recording))
        # After the last fork, so that no rank inherits the descriptor of the selector.
        self._open_selector()
        return None

    @property
    def _restarts_ranks(self) -> bool:
        """Whether single ranks are restarted."""
        return self._plan.ranks.elastic is not None or self._plan.ranks.target.has_workers

    @property
    def _uses_fork(self) -> bool:
        return self._plan.ranks.start == "fork" and self._plan.ranks.target.is_python

    def _enter_template(self) -> Iterator[None]:
        """Prepare the template, outside of this agent's process group, which receives the terminal's signals."""
        if any(stdio.terminal for stdio in self._plan.stdio):
            os.setpgid(0, 0)  # a rank can have the terminal only in its session
        else:
            os.setsid()
        if self._plan.ranks.elastic is not None:
            yield from preload_for_elastic_ranks()

    def _become_new(self, new: NewRank, parent: int) -> Rank:
        """Become a rank, in a process that the template has forked."""
        rank: Rank | None = None
        try:
            self._guard.protect(os.getpid())
            local_rank = new.wanted.rank - self._plan.first
            inherited = self._guard.fd, self._wake_read_fd, self.wake
            become_rank(parent, new.pipes, self._plan.stdio[local_rank], inherited, *self._limits)
            rank = self._become(local_rank, new.pipes, new.memory, new.wanted.environ)
        finally:
            if rank is None:
                traceback.print_exc()
                os._exit(1)
        return rank

    def restart(self, wanted: RestartRank) -> None:
        """Restart a rank when its process has exited; a running process is killed.

        The rank is a copy of the template. If there is no template, or it is lost, it is a fresh interpreter.
        """
        for process in self._processes:
            if process.rank == wanted.rank and not process.exited:
                # ``_read_exit`` calls this method again when the old process has exited.
                self._to_restart[wanted.rank] = wanted
                # Its group does not exist yet if the process has just been forked.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)  # not reaped, so the number still belongs to it
                return
        for process in self._processes:
            if process.rank == wanted.rank and not process.reaped:
                self._reap(process)
        recording = pipes = None
        try:
            recording = self._recording()
            pipes = Pipes.open(self._plan.stdio[wanted.rank - self._plan.first])
            start = StartInfo(wanted, pipes, recording, time.monotonic())
            if self._template is not None and self._template.request_process(wanted, start.pipes, start.recording.path):
                self._starting.append(start)
            else:
                self._execute(start)
        except OSError as error:
            if recording is not None:
                recording.close()
            if pipes is not None:
                pipes.close_rank_ends()
                for fd in pipes.own_fds():
                    os.close(fd)
            self._pending_events += _restart_failed(wanted.rank, error)

    def _execute(self, start: StartInfo) -> None:
        """Start a rank in a fresh interpreter."""
        wanted, pipes, recording = start.wanted, start.pipes, start.recording
        local_rank, parent = wanted.rank - self._plan.first, os.getpid()
        path = recording.path
        pid = os.fork()  # safe even with threads: the child only calls exec
        if pid == 0:
            try:
                self._guard.protect(os.getpid())
                # There is nothing to close: no descriptor of this process survives the exec.
                become_rank(parent, pipes, self._plan.stdio[local_rank], (), *self._limits)
                self._become(local_rank, pipes, path, wanted.environ, fresh=True)
            # Reached only if no exec replaced the process.
            finally:
                traceback.print_exc()
                os._exit(1)
        self._add(start, pid, self._pending_events)

    def _add(self, start: StartInfo, pid: int, events: list[Event]) -> None:
        start.pipes.close_rank_ends()
        process = RankProcess(start.wanted.rank, pid, _pidfd(pid), start.pipes, start.recording)
        self._processes.append(process)
        self._watch_process(process)
        events.append(RankRestarted(process.rank))

    def _handle_template_reply(self, events: list[Event]) -> None:
        """Process a reply of the template: it has forked a process, or is lost."""
        assert self._template is not None
        pid = self._template.take()
        if pid is None:
            self._abandon_template(events)
            return
        start = self._starting.popleft()
        if pid:
            self._add(start, pid, events)
        # The gate opens only after the pid is registered, so no rank runs unknown to this agent.
        self._template.open_gate(bool(pid))
        if not pid:
            self._execute_or_report(start, events)

    def _abandon_template(self, events: list[Event]) -> None:
        # This closes the gates, so a process that was forked already exits before it becomes a second rank.
        self._close_template()
        while self._starting:
            self._execute_or_report(self._starting.popleft(), events)

    def _execute_or_report(self, start: StartInfo, events: list[Event]) -> None:
        # The round ended while the request was pending.
        if self._finished:
            start.pipes.close_rank_ends()
            for fd in start.pipes.own_fds():
                os.close(fd)
            start.recording.close()
            return
        try:
            self._execute(start)
        except OSError as error:
            events += _restart_failed(start.wanted.rank, error)

    def _close_template(self) -> None:
        assert self._template is not None
        if self._selector is not None and self._template.fd in self._selector.get_map():
            self._selector.unregister(self._template.fd)
        self._template.close()
        self._template = None

    def _recording(self) -> RankRecording:
        return RankRecording(int(self._plan.environ["WORLD_SIZE"]))

    def _become(
        self,
        local_rank: int,
        pipes: Pipes,
        memory: str,
        more: Mapping[str, str] = MappingProxyType({}),
        fresh: bool = False,
    ) -> Rank:
        plan = self._plan
        target = plan.ranks.target.on(local_rank, plan.first + local_rank)
        rank = Rank(target, pipes.status, pipes.stacks, os.getpid())
        role_first = plan.first if plan.role_first is None else plan.role_first
        shown = 0 if plan.ranks.virtual_local_rank else local_rank
        environ = plan.environ | place_environ(plan.first + local_rank, shown, role_first + local_rank)
        environ[MEMORY] = memory
        if target.mode == "master":  # a torch group would wait forever; without these, its env:// fails immediately
            environ = {name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
        if plan.cpu_places:
            cpu_place = plan.cpu_places[local_rank]
            environ |= cpu_place.environ()
            if cpu_place.cpus:
                # The process has a single thread here, from which all later threads inherit the mask.
                os.sched_setaffinity(0, cpu_place.cpus)
        stdio = plan.stdio[local_rank]
        if not stdio.stdin and any(other.stdin for other in plan.stdio):
            # one rank is debugged, and the other ranks continue until they wait for it
            environ.setdefault("PYTHONBREAKPOINT", "0")
        if stdio.out_tty or stdio.err_tty:
            size = {"LINES": stdio.rows, "COLUMNS": stdio.columns}
            environ |= {name: str(value) for name, value in size.items() if name in environ}
        if start := plan.starts.get(plan.first + local_rank, 0):
            environ[START] = str(start)
        environ |= more
        # After all changes: the seal covers the variables of rank and task.
        environ[SEAL] = seal(environ, os.getpid())
        if fresh and plan.ranks.target.is_python:
            rank.execute(environ, fresh=True)
        elif self._uses_fork:
            rank.adopt(environ)
        else:
            rank.execute(environ, fresh=plan.ranks.target.is_python)
        return rank

    def _open_selector(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ, partial(self._awake))
        for process in self._processes:
            self._watch_process(process)
        if self._template is not None:
            self._selector.register(self._template.fd, selectors.EVENT_READ, partial(self._handle_template_reply))

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events, for ``wake``, or for the time to pass."""
        assert self._selector is not None
        self._check_long_waits()
        self._measure()
        # A stopped template sends no event, so only the time shows that it is lost.
        if self._starting:
            timeout_s = PATIENCE_S if timeout_s is None else min(timeout_s, PATIENCE_S)
            if time.monotonic() > self._starting[0].at + PATIENCE_S:
                self._abandon_template(self._pending_events)
        events, self._pending_events = self._pending_events, []
        if (self._plan.ranks.notice_s > 0 or self._plan.ranks.statistics) and self.running:
            timeout_s = POLL_S if timeout_s is None else min(timeout_s, POLL_S)
        # Without a pidfd, no descriptor reports the exit.
        polled = [process for process in self._processes if process.pidfd < 0 and not process.exited]
        if polled:
            timeout_s = _EXIT_POLL_S if timeout_s is None else min(timeout_s, _EXIT_POLL_S)
        # Pending events are returned with those that are ready now, without a wait.
        for key, _ in self._selector.select(0 if events else timeout_s):
            # An earlier handler in this loop, for a rank's exit, may have read this descriptor to its end and closed
            # it.
            if key.fd in self._selector.get_map():
                handle: Callable[[list[Event]], object] = key.data
                handle(events)
        for process in polled:
            self._read_exit(process, events)
        return events

    def start_elsewhere(self, lost: str, spare: str, starts: Mapping[int, int]) -> None:
        """Never called: a job on one host has no spare host."""
        raise AssertionError(f"a job on one host has no spare host {spare}")

    def answer(self, answer: bytes) -> None:
        """Do nothing: no other host requests the state of these ranks."""

    def finish(self, patience_s: float = 0.0) -> list[Event]:
        """Kill the remaining processes of the ranks, and read the rest of their output. Idempotent.

        Args:
            patience_s: seconds that processes which ranks left behind have to exit. A signal ends the wait.
        """
        events: list[Event] = []
        if self._finished:
            return events
        self._finished = True
        # A requested process may exist already; it is killed with the others below.
        while self._starting:
            self._handle_template_reply(events)
        if self._template is not None:
            self._close_template()
        self._end_left_behind(patience_s, events)
        for process in self._processes:
            is_over = process.reaped or process.waited_for
            for kill in () if is_over else (os.killpg, os.kill):  # the rank may not have created its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
            self._read_rest(process, events)
            if not process.exited:
                self._report_calls(process, events)
        # Before the waitpid below: the guard would otherwise signal numbers that may be reused.
        self._guard.dismiss()
        for process in self._processes:
            if not process.reaped:
                if not process.waited_for:
                    os.waitpid(process.pid, 0)
                process.exited = True
                if process.pidfd >= 0:
                    if self._selector is not None and process.pidfd in self._selector.get_map():
                        self._selector.unregister(process.pidfd)
                    os.close(process.pidfd)
                process.recording.close()
            for fd in process.pipes.own_fds():
                self._forget(fd)
        return events

    def _end_left_behind(self, patience_s: float, events: list[Event]) -> None:
        """Stop processes that ranks left behind. They receive SIGTERM first, unless they already received a signal.

        A zombie belongs to its group. Only after the rank is reaped, the group shows whether another process is in it.
        The group's number may then be reused if no process is in it, so the members are checked before each signal.
        """
        ended = [process for process in self._processes if process.exited and not process.reaped]
        for process in ended:
            os.waitpid(process.pid, 0)
            process.waited_for = True
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read_fd, CHUNK)  # only a later wake ends the wait
        begin = time.monotonic()
        until, reported = begin + patience_s, False
        while left := [(process, pids) for process in ended if (pids := _members(process.pid))]:
            if not reported and time.monotonic() >= begin + min(_LEFT_BEHIND_S, patience_s):
                reported = True
                for process, pids in left:
                    if process.asked:
                        continue
                    if process.status == 0 and (what := _named(pids)):
                        events.append(LeftBehind(process.rank, what))
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            if time.monotonic() >= until or select.select([self._wake_read_fd], [], [], _GROUP_POLL_S)[0]:
                for process, _ in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                break

    def close(self) -> None:
        """Call ``finish``, and free all resources. Call it once."""
        self.finish()
        if self._selector is not None:
            self._selector.close()
        os.close(self._wake_read_fd)
        os.close(self.wake)

    def _read_exit(self, process: RankProcess, events: list[Event]) -> None:
        # WNOWAIT leaves a zombie, whose pid keeps the number of the group from being reused.
        result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (os.WNOHANG if process.pidfd < 0 else 0))
        if result is None:
            return
        assert self._selector is not None
        if process.pidfd >= 0:
            # A pidfd stays readable after the exit, so ``poll`` would never sleep again.
            self._selector.unregister(process.pidfd)
        # Before ``Exited``: the rank's own report takes precedence over its exit status.
        self._read_rest(process, events)
        self._report_calls(process, events)
        process.exited = True
        if process.asked:  # its child processes have no more reason to run
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, process.asked)
        process.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        events.append(Exited(process.rank, process.pid, process.status))
        if process.rank in self._to_restart:
            self.restart(self._to_restart.pop(process.rank))


def _restart_failed(rank: int, error: OSError) -> list[Event]:
    """Return the events for a rank that cannot be restarted."""
    text = f"cannot restart rank {rank}: {error.strerror}\n"
    return [RankFailed(rank, 0, FailureReport(126, text=text, at=time.monotonic())), Exited(rank, 0, 126)]


def _pidfd(pid: int) -> int:
    """Return a descriptor that is readable after the exit of a process.

    -1 if there is none: kernels before 5.3, seccomp filters.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return -1


def _members(group: int) -> list[int]:
    """Return the processes of a group that have not exited."""
    # orphans become children of this process if it is process 1 of a container
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        # Signal 0 only tests whether the group exists, which saves the scan of /proc.
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    found: list[int] = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == group:
                # The command name in parentheses may contain spaces and parentheses itself (proc(5)).
                state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
                if state not in (b"Z", b"X"):  # a zombie, whose new parent has not reaped it yet
                    found.append(int(name))
    return found


def _named(pids: list[int]) -> str:
    """Return a description of processes; "" if python itself has started all of them."""
    found: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command, name = (Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "comm"))
            if not any(word in command for word in _OF_PYTHON):
                found.append(f"{printable(name.decode(errors='surrogateescape').rstrip())} (pid {pid})")
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
