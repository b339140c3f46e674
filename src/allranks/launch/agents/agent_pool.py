"""The agents of a job that runs on other hosts, or on several. The loop of a round uses it as one (`runtime.agents`).

Each host has a link. Often it also has a process on this host (ssh, srun, an agent), whose exit shows why a link ended.
``poll`` returns the events of the agents, with times on this host's clock. The loss of a host is an event, like an
exit.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import msgspec

from allranks.launch.agents.host_admission import AGAIN_S, HostAdmission
from allranks.launch.agents.hosts import Host
from allranks.launch.spec.events import (
    Event,
    HostLost,
    RestartRank,
)
from allranks.launch.spec.messages import (
    Answered,
    EndAgent,
    Finish,
    Finished,
    Inspect,
    ReadOutput,
    RequestStacks,
    Resize,
    Signal,
    StartRanks,
)

__all__ = ["AgentPool"]

_FINISH_S = 20.0  # processes that hold a GPU take a long time to exit


class AgentPool(HostAdmission):
    """The agents of a job, with the interface of one agent."""

    def start(self, commands: Sequence[StartRanks]) -> None:
        """Make all hosts start their ranks. A spare host, which has no ranks, receives no command yet."""
        for host, command in zip(self.hosts, commands, strict=True):
            host.answer = None
            host.started = command
            host.ranks = range(command.first, command.first + command.count)
            host.running = set(host.ranks)
            host.starting.clear()
        # A separate loop: a failed send already needs the ranks of its host, and the host of the master.
        for host, command in zip(self.hosts, commands, strict=True):
            if command.count:
                self._send(host, command)

    def start_elsewhere(self, lost: str, spare: str, starts: Mapping[int, int]) -> None:
        """Start ranks of a lost host on a spare one.

        Args:
            lost: the lost host.
            spare: the spare host.
            starts: the ranks; see ``StartRanks``.
        """
        new = next(host for host in self.hosts if host.name == spare and not host.ranks and not host.why)
        if lost:
            old = next(host for host in self.hosts if host.name == lost and set(starts) <= set(host.ranks))
            assert old.started is not None
            command, old.ranks = old.started, range(0)
        else:
            command = self._new_ranks(new, starts)
        leader = new.addresses if 0 in starts else command.leader
        command = msgspec.structs.replace(command, starts=dict(starts), leader=leader)
        new.ranks = range(command.first, command.first + command.count)
        new.starting, new.started = set(starts), command
        # The spare host was lost after the policy had chosen it.
        if new.link is None:
            self._report_lost_ranks(new)
        self._send(new, command)

    def _new_ranks(self, new: Host, starts: Collection[int]) -> StartRanks:
        """Return the command that starts ranks with numbers that no rank had."""
        others = [host.started for host in self.hosts if host.started is not None and host.started.count]
        roles = sum(start.count for start in others)
        nodes = max(start.nodes for start in others) + 1
        return msgspec.structs.replace(
            others[0],
            first=min(starts),
            count=len(starts),
            world_size=max(starts) + 1,
            node=new.place,
            nodes=nodes,
            role_first=roles,
            role_size=roles + len(starts),
            stdio=(),
        )

    @property
    def running(self) -> list[int]:
        """The ranks whose process has not exited."""
        return sorted(rank for host in self.hosts for rank in host.running)

    @property
    def output_open(self) -> bool:
        """False: when an agent finishes, it waits itself for processes that still write."""
        return False

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events, for ``wake``, or for the time to pass."""
        if self._check_caller is not None and self._restart_commands:
            timeout_s = min(AGAIN_S if timeout_s is None else timeout_s, AGAIN_S)
            self.retry_lost()
        # Commands may have caused events, for example the loss of a host.
        if not self._events:
            self._turn(timeout_s)
        if self._check_caller is not None and self.callers:
            self._report(self._check_caller)
        events, self._events = self._events, []
        return events

    def signal(self, number: int, ranks: list[int], alone: bool = False) -> None:
        """Send a signal to the process groups of ranks that have not exited; see ``Agent.signal``."""
        for host in self.hosts:
            if chosen := sorted(host.running.intersection(ranks)):
                self._send(host, Signal(number, chosen, alone))

    def restart(self, wanted: RestartRank) -> None:
        """Restart a rank; see ``Agent.restart``. If its host is lost and there is no master, report it as lost."""
        for host in self.hosts:
            if wanted.rank in host.ranks and host.link is not None:
                host.starting.add(wanted.rank)
                self._send(host, wanted)
            elif wanted.rank in host.ranks and not self._has_master:
                self._events.append(HostLost(host.name, (wanted.rank,), host.why))

    def dump(self, ranks: list[int]) -> None:
        """Request the stacks of ranks, which arrive as ``Stacks``."""
        for host in self.hosts:
            if chosen := sorted(host.running.intersection(ranks)):
                self._send(host, RequestStacks(chosen))

    def inspect(self, ranks: list[int], recent: int = 0) -> None:
        """Request the state of ranks; see ``Agent.inspect``."""
        for host in self.hosts:
            if chosen := sorted(set(host.ranks).intersection(ranks)):
                self._send(host, Inspect(chosen, recent))

    def answer(self, answer: bytes) -> None:
        """Answer the hosts that have requested the state of the ranks."""
        for host in self._requesting_hosts:
            self._send(host, Answered(answer))
        self._requesting_hosts.clear()

    def watch(self, fd: int) -> None:
        """Make ``poll`` return also if this descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, lambda: None)

    def unwatch(self, fd: int) -> None:
        """Undo ``watch``."""
        self._selector.unregister(fd)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of all ranks' terminals, and send them SIGWINCH."""
        for host in self.hosts:
            self._send(host, Resize(rows, columns))

    def read_output(self, on: bool) -> None:
        """Read the output of the ranks, or leave it in their pipes until the ranks wait."""
        if on != self._reading:
            self._reading = on
            for host in self.hosts:
                self._send(host, ReadOutput(on))

    def watch_writable(self, fds: Set[int]) -> None:
        """Make ``poll`` return also if one of these descriptors is writable. Replaces those of the last call."""
        for fd in self._writable - fds:
            self._selector.unregister(fd)
        for fd in fds - self._writable:
            self._selector.register(fd, selectors.EVENT_WRITE, lambda: None)
        self._writable = set(fds)

    def finish(self, patience_s: float) -> list[Event]:
        """Finish the round: kill the remaining processes of the ranks, and read the rest of their output.

        Args:
            patience_s: see ``Agent.finish``.
        """
        self.watch_writable(set())
        for host in self.hosts:
            host.answer = None
            self._send(host, Finish(patience_s))
        # The agents themselves wait for ``patience_s`` before they reply.
        until = time.monotonic() + patience_s + _FINISH_S
        while any(h.link is not None and not isinstance(h.answer, Finished) for h in self.hosts):
            if (left := until - time.monotonic()) <= 0:
                break
            self._turn(left)
        for host in self.hosts:
            if host.link is not None and not isinstance(host.answer, Finished):
                self._mark_lost(host, f"{host.name}: its agent did not reply within {_FINISH_S:g} s")
            host.running.clear()
        self._reading = True
        events, self._events = self._events, []
        return events

    def end(self, code: int, text: bytes = b"") -> None:
        """Send the exit code of the job, and the reason of a failure, to all agents."""
        for host in (*self.hosts, *self._callers):
            self._send(host, EndAgent(code, text))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)
