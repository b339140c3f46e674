"""The agents of a job that runs on other hosts, or on several. The loop of a round uses it as one (`runtime.agents`).

Each host has a link. Often it also has a process on this host (ssh, srun, an agent), whose exit shows why a link ended.
``poll`` returns the events of the agents, with times on this host's clock. The loss of a host is an event, like an
exit.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import msgspec

from allranks import __version__
from allranks._base.errors import ConfigError
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks._net.listener import Listener
from allranks._net.sockets import keep_alive
from allranks.launch.agents.agent_command import CONNECTED, explain
from allranks.launch.agents.link import Garbled, Link, LinkLost, to_agent
from allranks.launch.reporter import Reporter
from allranks.launch.spec.events import (
    Asked,
    Event,
    Exited,
    HostJoined,
    HostLost,
    HostMessage,
    RankFailed,
    RankRestarted,
    RestartRank,
)
from allranks.launch.spec.messages import (
    AgentHello,
    AgentReady,
    Answered,
    Command,
    EndAgent,
    Ended,
    Finish,
    Finished,
    Inspect,
    Message,
    Prepare,
    ReadOutput,
    RequestStacks,
    Resize,
    Signal,
    StartRanks,
    Unable,
)

__all__ = ["AgentPool", "SharedStarter", "Host", "wrong_version"]

_CHUNK = 1 << 16
_STDERR_BYTES = 1 << 14
_FINISH_S = 20.0  # processes that hold a GPU take a long time to exit
_END_S = 2.0
_GONE_S = 0.3
_AGAIN_S = 3.0
_LOST_AFTER_S = 15  # seconds; an elastic job replaces a lost host's ranks soon, but must survive a network cut of 7 s


@dataclass(eq=False)
class Host:
    """One host of a job, and its agent.

    Attributes:
        name: the name of the host, from the user, the scheduler or the host itself.
        command: the command that started the agent there.
        python: the interpreter that runs it.
        process: the process of this host that exits when the agent does, if the host has its own one.
        link: the link to the agent; None before the agent has connected, and after it is lost.
        hello: the first message of the agent.
        slots: number of ranks that it is meant for; None if it is not given.
        place: its place in the order of ranks.
        ranks: its ranks in this round.
        running: those of its ranks whose process has not exited.
        starting: those of its ranks that are being restarted.
        coming: number of ranks that it is preparing for, while a round continues without it.
        addresses: its addresses for other hosts, as its agent has reported them.
        started: the last command to start ranks there; None if none was sent.
        offset: seconds to add to its clock to get this host's clock.
    """

    name: str
    command: RemoteCommand
    python: str = ""
    process: subprocess.Popen[bytes] | None = None
    link: Link[Message] | None = None
    hello: AgentHello | None = None
    slots: int | None = None
    place: int = 0
    ranks: range = range(0)
    running: set[int] = field(default_factory=set)
    starting: set[int] = field(default_factory=set)
    coming: int = 0
    addresses: tuple[str, ...] = ()
    started: StartRanks | None = None
    offset: float = math.inf
    start_again: Callable[[], Host] | None = None
    answer: AgentReady | Unable | Finished | None = None
    why: str = ""  # not empty: the host is lost, for this reason
    stderr_text: bytearray = field(default_factory=bytearray)
    stderr_line: bytearray = field(default_factory=bytearray)

    def update_clock(self, now: float) -> None:
        """Update the offset from a time that its agent has just sent.

        The message has spent some time on its way. The smallest difference belongs to the fastest message, so it is the
        most accurate.
        """
        self.offset = min(self.offset, time.monotonic() - now)


@dataclass(eq=False)
class SharedStarter:
    """A process that starts the agents of many hosts, which then connect: srun.

    Attributes:
        command: the command.
        process: the process.
        stderr_text: its output on stderr.
    """

    command: RemoteCommand
    process: subprocess.Popen[bytes]
    stderr_text: bytearray = field(default_factory=bytearray)
    stderr_line: bytearray = field(default_factory=bytearray)


class AgentPool:
    """The agents of a job.

    Args:
        reporter: formats the lines that are sent to agents.
        listener: accepts connections of agents; None if no agent connects. The pool closes it.
        has_master: the host of rank 0 receives a message when another rank exits.
        elastic: the job continues without a lost host, so the loss of a host must be detected soon.

    Attributes:
        hosts: the hosts that the job needs; in the order of their ranks, after this order is known.
        wake: a byte written to this descriptor makes ``poll`` return.
    """

    def __init__(
        self, reporter: Reporter, listener: Listener | None = None, *, has_master: bool = False, elastic: bool = False
    ) -> None:
        self._reporter = reporter
        self.hosts: list[Host] = []
        self._has_master = has_master
        self._elastic = elastic
        self._starters: list[SharedStarter] = []
        self._listener = listener
        # Agents that have connected or are retried, and are not among the hosts yet.
        self._callers: list[Host] = []
        self._absent: dict[str, Callable[[], Host]] = {}  # commands that restart lost agents
        self._try_at = 0.0
        self._vet: Callable[[Host], str] | None = None
        self._welcome: Callable[[Host], Prepare] | None = None
        self._listener_closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self.wake = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        os.set_blocking(self.wake, False)
        self._events: list[Event] = []
        self._asking: list[Host] = []
        self._writable: set[int] = set()
        self._reading = True
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ, lambda: os.read(self._wake_read_fd, _CHUNK))
        if listener is not None:
            self._selector.register(listener.wake, selectors.EVENT_READ, self._let_in)

    # Before the ranks start.

    def start_host(
        self, name: str, command: RemoteCommand, words: Sequence[str], python: str, environ: Mapping[str, str]
    ) -> Host:
        """Start an agent that communicates through the pipes of a command.

        Raises:
            ConfigError: the command does not exist on this host.
        """
        host = self._call(name, command, words, python, environ)
        self.hosts.append(host)
        return host

    def _call(
        self, name: str, command: RemoteCommand, words: Sequence[str], python: str, environ: Mapping[str, str]
    ) -> Host:
        process = _start(words, environ, subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        link = to_agent(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        process.stdin.close()
        process.stdout.close()
        again = partial(self._call, name, command, words, python, environ)
        host = Host(name, command, python, process, link, start_again=again)
        self._attach(host)
        self._watch_stderr(host, process)
        return host

    def start_shared(self, command: RemoteCommand, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a command whose agents connect by themselves.

        Raises:
            ConfigError: the command does not exist on this host.
        """
        starter = SharedStarter(command, _start(words, environ, subprocess.DEVNULL))
        self._starters.append(starter)
        self._watch_stderr(starter, starter.process)

    def expect(self, names: Iterable[str], command: RemoteCommand) -> None:
        """Add hosts whose agents will connect under these names."""
        self.hosts += [Host(name, command) for name in names]

    def gather(self, until: float, enough: Callable[[], bool], missing: Callable[[], str] | None = None) -> None:
        """Wait until ``enough`` returns True. It is called after each batch of events.

        Args:
            until: time when to give up (``time.monotonic``).
            enough: returns whether all hosts are available.
            missing: describes the missing hosts, if hosts connect by themselves.

        Raises:
            ConfigError: a host is not available, or the time is over.
        """
        while not enough():
            gone = [host for host in self.hosts if host.why]
            if gone:
                self._settle(gone)
                raise ConfigError("\n".join(dict.fromkeys(host.why for host in self.hosts if host.why)))
            for starter in self._starters:
                if (code := starter.process.poll()) is not None:
                    names = [host.name for host in self.hosts if host.hello is None]
                    absent = ", ".join(names or [host.name for host in self.hosts])
                    self._read_all_stderr()
                    raise ConfigError(
                        explain(starter.command, absent, "", code, starter.stderr_text.decode(errors="replace"))
                    )
            left = until - time.monotonic()
            if left <= 0:
                raise ConfigError(self._who_is_missing() if missing is None else missing())
            self._turn(min(left, 0.5))

    def admit(self, host: Host) -> None:
        """Move a caller to the hosts."""
        self._callers.remove(host)
        self._absent.pop(host.name, None)
        self.hosts.append(host)
        self.hosts.sort(key=lambda host: host.place)

    def turn_away(self, host: Host, why: str) -> None:
        """Refuse a caller."""
        self._send(host, EndAgent(2, self._reporter.line(f"error: host 0 does not take this host: {why}").encode()))
        self.forget(host)

    def forget(self, host: Host) -> None:
        """Remove a host or a caller, and do not retry it."""
        for hosts in (self.hosts, self._callers):
            if host in hosts:  # a caller may have been removed while the message was sent
                hosts.remove(host)
        self._absent.pop(host.name, None)
        self._detach(host)
        if host.process is not None:
            self._reap(host.process)

    def drop(self, host: Host, try_again: bool) -> None:
        """Remove a host.

        Args:
            host: a lost host.
            try_again: check from time to time whether it is available again.
        """
        self.hosts.remove(host)
        self._detach(host)
        if host.process is not None:
            self._reap(host.process)
            if try_again and not any(other.name == host.name and not other.why for other in self.hosts):
                self._retry(host)

    def _retry(self, host: Host) -> None:
        """Restart its agent from time to time, until one starts."""
        if host.start_again is not None:
            again, place, slots = host.start_again, host.place, host.slots
            self._absent[host.name] = lambda: _like(again(), place, slots)

    def report_callers(
        self, vet: Callable[[Host], str] | None, welcome: Callable[[Host], Prepare] | None = None
    ) -> None:
        """Make ``poll`` report hosts that could take part.

        Args:
            vet: returns why a caller may not take part, "" if it may; None: do not report callers.
            welcome: admits a caller to a running round, and returns its ``Prepare`` command. The caller is reported
                when it is ready. None: the first callers are reported immediately, and wait for the next round.
        """
        self._vet, self._welcome = vet, welcome

    @property
    def by_callers(self) -> bool:
        """Whether hosts connect by themselves."""
        return self._listener is not None and not self._starters

    @property
    def listener_port(self) -> int:
        """The port that hosts connect to."""
        assert self._listener is not None
        return self._listener.port

    def refusals(self) -> str:
        """Return the refused connections, with the reasons; "" if there are none."""
        refused = self._listener.refused if self._listener is not None else {}
        return f"(turned away: {'; '.join(f'{peer}: {why}' for peer, why in refused.items())})" if refused else ""

    def close_listener(self) -> int:
        """Stop accepting connections. Return the port of the listener, which is free then."""
        assert self._listener is not None
        port = self._listener.port
        self._selector.unregister(self._listener.wake)
        self._listener.close()
        self._listener_closed = True
        return port

    @property
    def callers(self) -> list[Host]:
        """Agents that have connected and identified themselves, and were not expected by name."""
        return [host for host in self._callers if host.hello is not None]

    def greeted(self) -> bool:
        """Return whether the agents of all hosts have identified themselves.

        Raises:
            ConfigError: one of them has another version of allranks.
        """
        for host in self.hosts:
            if why := wrong_version(host):
                raise ConfigError(f"{host.name}: {why}")
        return all(host.hello is not None for host in self.hosts)

    def prepare(self, commands: Sequence[Prepare], until: float) -> list[AgentReady]:
        """Make all hosts prepare everything that precedes the start of ranks. Return their replies, by host.

        Raises:
            ConfigError: a host cannot prepare, or does not reply in time.
        """
        for host, command in zip(self.hosts, commands, strict=True):
            host.answer = None
            self._send(host, command)
        self.gather(until, lambda: all(host.answer is not None for host in self.hosts))
        self._raise_unable()
        return [host.answer for host in self.hosts if isinstance(host.answer, AgentReady)]

    def start(self, commands: Sequence[StartRanks]) -> None:
        """Make all hosts start their ranks. A spare host, which has no ranks, receives no command yet."""
        for host, command in zip(self.hosts, commands, strict=True):
            host.answer = None
            host.started = command
            host.ranks = range(command.first, command.first + command.count)
            host.running = set(host.ranks)
            host.starting.clear()
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
        if new.link is None:
            self._lose_ranks(new)
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

    # The interface of an agent.

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
        if self._vet is not None and self._absent:
            timeout_s = min(_AGAIN_S if timeout_s is None else timeout_s, _AGAIN_S)
            self.try_again()
        if not self._events:
            self._turn(timeout_s)
        if self._vet is not None and self.callers:
            self._report(self._vet)
        events, self._events = self._events, []
        return events

    def _report(self, vet: Callable[[Host], str]) -> None:
        for caller in self.callers:
            if why := vet(caller):
                self.turn_away(caller, why)
            elif self._welcome is not None:
                command = self._welcome(caller)
                caller.coming = command.nproc
                self._send(caller, command)
        if self.callers:  # without ``welcome``, they wait for the next round
            self._vet = None
            self._events.append(HostJoined(", ".join(host.name for host in self.callers)))

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
        for host in self._asking:
            self._send(host, Answered(answer))
        self._asking.clear()

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
        until = time.monotonic() + patience_s + _FINISH_S
        while any(h.link is not None and not isinstance(h.answer, Finished) for h in self.hosts):
            if (left := until - time.monotonic()) <= 0:
                break
            self._turn(left)
        for host in self.hosts:
            if host.link is not None and not isinstance(host.answer, Finished):
                self._lose(host, f"{host.name}: its agent did not answer for {_FINISH_S:g} s")
            host.running.clear()
        self._reading = True
        events, self._events = self._events, []
        return events

    def end(self, code: int, text: bytes = b"") -> None:
        """Send the exit code of the job, and the reason of a failure, to all agents."""
        for host in (*self.hosts, *self._callers):
            self._send(host, EndAgent(code, text))

    def close(self) -> None:
        """Stop all agents and the processes that started them. Call it once. Ctrl-C is delayed by some seconds."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _close(self) -> None:
        processes = [h.process for h in (*self.hosts, *self._callers) if h.process is not None]
        processes += [starter.process for starter in self._starters]
        until = time.monotonic() + _END_S
        everybody = (*self.hosts, *self._callers)
        while any(h.link is not None and h.link.backlog for h in everybody) and time.monotonic() < until:
            self._turn(0.05)  # sends the last messages
        for host in (*self.hosts, *self._callers):
            self._detach(host)
        if self._listener is not None and not self._listener_closed:
            self.close_listener()
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GONE_S)
            self._reap(process)
        self._selector.close()
        os.close(self._wake_read_fd)
        os.close(self.wake)

    def try_again(self) -> None:
        """Restart lost agents, at most every 3 s."""
        if time.monotonic() < self._try_at:
            return
        self._try_at = time.monotonic() + _AGAIN_S
        trying = {host.name for host in self._callers}
        for name, again in self._absent.items():
            if name not in trying:
                # the command is missing, for example together with its network file system
                with contextlib.suppress(ConfigError):
                    self._callers.append(again())

    # Descriptors.

    def _turn(self, timeout_s: float | None) -> None:
        for host in (*self.hosts, *self._callers):
            if host.link is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if host.link.backlog else 0)
                if host.link.read_fd == host.link.write_fd:
                    self._selector.modify(host.link.read_fd, events, self._receiver(host))
                elif host.link.backlog:
                    with contextlib.suppress(KeyError):  # it is registered already
                        self._selector.register(host.link.write_fd, selectors.EVENT_WRITE, lambda: None)
                elif host.link.write_fd in self._selector.get_map():
                    self._selector.unregister(host.link.write_fd)
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map():
                key.data()
        for host in (*self.hosts, *self._callers):
            if host.link is not None and host.link.backlog:
                self._try(host, host.link.flush)

    def _attach(self, host: Host) -> None:
        assert host.link is not None
        self._selector.register(host.link.read_fd, selectors.EVENT_READ, self._receiver(host))

    def _receiver(self, host: Host) -> Callable[[], None]:
        return lambda: self._receive(host)

    def _detach(self, host: Host) -> None:
        link, host.link = host.link, None
        if link is not None:
            for fd in {link.read_fd, link.write_fd}:
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
            link.close()

    def _let_in(self) -> None:
        assert self._listener is not None
        for sock in self._listener.take():
            if self._elastic:
                keep_alive(sock, _LOST_AFTER_S)
            fd = sock.detach()
            host = Host("?", CONNECTED, link=to_agent(fd, fd))
            self._callers.append(host)
            self._attach(host)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stderr is not None and not process.stderr.closed:
            if process.stderr.fileno() in self._selector.get_map():
                self._selector.unregister(process.stderr.fileno())
            process.stderr.close()

    def _watch_stderr(self, source: Host | SharedStarter, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        fd = process.stderr.fileno()
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._read_stderr(source, fd))

    def _read_stderr(self, source: Host | SharedStarter, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if not data and fd in self._selector.get_map():
            self._selector.unregister(fd)
        source.stderr_text += data
        del source.stderr_text[:-_STDERR_BYTES]
        source.stderr_line += data
        *lines, rest = source.stderr_line.split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], bytearray()
        source.stderr_line = bytearray(rest)
        if source in self._callers:
            return  # an agent that is retried usually fails
        name = source.name if isinstance(source, Host) else source.command.name
        lines = [line for line in lines if line.strip() and not any(noise in line for noise in source.command.noise)]
        self._events += [HostMessage(name, bytes(line)) for line in lines]

    def _read_all_stderr(self) -> None:
        sources: list[Host | SharedStarter] = [*self.hosts, *self._starters]
        for source in sources:
            if source.process is not None and source.process.stderr is not None:
                fd = source.process.stderr.fileno()
                if fd in self._selector.get_map():
                    self._read_stderr(source, fd)

    # Messages.

    def _send(self, host: Host, command: Command) -> None:
        if host.link is not None:
            link = host.link
            self._try(host, lambda: link.send(command))

    def _try(self, host: Host, act: Callable[[], object]) -> None:
        try:
            act()
        except LinkLost as lost:
            self._lost(host, lost)

    def _receive(self, host: Host) -> None:
        try:
            messages = host.link.receive() if host.link is not None else []
        except LinkLost as lost:
            self._lost(host, lost)
            return
        for message in messages:
            self._take(host, message)

    def _take(self, host: Host, message: Message) -> None:
        match message:
            case AgentHello():
                host.hello = message
                host.update_clock(message.now)
                if host.link is not None:
                    host.link.trust()
                self._recognise(host)
            case AgentReady() | Unable() | Finished():
                host.answer = message
                if isinstance(message, AgentReady):
                    host.update_clock(message.now)
                    host.addresses = message.addresses
                    if host.coming:
                        self._events.append(HostJoined(host.name, host.coming))
                        host.coming = 0
                elif isinstance(message, Unable) and host.coming:
                    self._events.append(HostMessage(host.name, f"it cannot join: {message.why}".encode()))
                    self.turn_away(host, message.why)
                elif isinstance(message, Unable) and (host.running or host.starting):
                    self._lose(host, f"{host.name}: {message.why}")
            case RankFailed(rank, pid, report):
                at = report.at + host.offset if report.at else time.monotonic()
                report = msgspec.structs.replace(report, at=min(at, time.monotonic()))
                self._events.append(RankFailed(rank, pid, report))
            case Exited(rank, pid, status):
                host.running.discard(rank)
                host.starting.discard(rank)
                self._events.append(message)
                self._forward_to_master(Ended(rank, pid, status))
            case RankRestarted():
                host.running.add(message.rank)
                host.starting.discard(message.rank)
                self._events.append(message)
            case Asked():
                self._asking.append(host)
                self._events.append(message)
            case _:
                self._events.append(message)

    def _forward_to_master(self, ended: Ended) -> None:
        if self._has_master:
            for host in self.hosts:
                if 0 in host.ranks:
                    self._send(host, ended)

    def _recognise(self, caller: Host) -> None:
        """Give the link of a connected agent to the expected host with its name."""
        assert caller.hello is not None
        if caller not in self._callers:
            return
        name = caller.hello.host
        for host in self.hosts:
            if host.hello is None and host.process is None and _same_name(host.name, name):
                self._callers.remove(caller)
                link, caller.link = caller.link, None
                assert link is not None
                host.link, host.hello, host.offset = link, caller.hello, caller.offset
                self._selector.modify(link.read_fd, selectors.EVENT_READ, self._receiver(host))
                return
        caller.name = name

    def _lost(self, host: Host, lost: LinkLost) -> None:
        if host.link is None:
            return
        if host.process is None:
            self._lose(host, f"{host.name}: the connection to its agent is gone ({lost})")
            return
        self._detach(host)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.process.wait(_GONE_S)  # its last lines and its exit code are better reasons than the pipe
        self._read_all_stderr()
        code = host.process.poll()
        if isinstance(lost, Garbled):
            self._lose(
                host,
                f"{host.name}: {lost}.\n  A shell that prints something there (.bashrc, a banner) must be silent where"
                " nobody types.",
            )
            return
        if host.hello is None:
            self._lose(
                host, explain(host.command, host.name, host.python, code, host.stderr_text.decode(errors="replace"))
            )
            return
        what = f"({lost})"
        if code is not None:
            what = f"its agent is gone ({host.command.name} ended with {_ending(code)})"
        last = host.stderr_text.decode(errors="replace").strip().splitlines()[-1:]
        self._lose(host, ": ".join([f"{host.name}: {what}", *last]))

    def _lose(self, host: Host, why: str) -> None:
        self._detach(host)
        if host in self._callers:
            self._callers.remove(host)
            if host.process is not None:
                self._reap(host.process)
        host.why = why
        host.answer = None
        if host.running or host.starting or (host.started is not None and not host.started.count):
            self._lose_ranks(host)

    def _lose_ranks(self, host: Host) -> None:
        """Report the ranks of a host as lost: none for a spare host."""
        gone = sorted(host.running | host.starting)
        self._events.append(HostLost(host.name, tuple(gone), host.why))
        if self._welcome is not None and host.start_again is not None:
            self._retry(host)
        for rank in gone:
            self._forward_to_master(Ended(rank, 0, host.why))
        host.running.clear()
        host.starting.clear()

    def _settle(self, gone: list[Host]) -> None:
        """Wait a moment for other hosts to fail too, so that one message names all."""
        until = time.monotonic() + _GONE_S
        while (left := until - time.monotonic()) > 0 and any(h.hello is None and not h.why for h in self.hosts):
            self._turn(left)

    def unable(self) -> dict[Host, str]:
        """Return the hosts that cannot execute their command, with the reasons."""
        return {host: host.answer.why for host in self.hosts if isinstance(host.answer, Unable)}

    @property
    def may_grow(self) -> bool:
        """Whether hosts can join, or return."""
        return self.by_callers or bool(self._absent or self._callers)

    def _raise_unable(self) -> None:
        whys: dict[str, list[str]] = {}
        for host, why in self.unable().items():
            whys.setdefault(why, []).append(host.name)
        if whys:
            raise ConfigError("\n".join(f"{', '.join(names)}: {why}" for why, names in whys.items()))

    def _who_is_missing(self) -> str:
        missing = [host.name for host in self.hosts if host.hello is None or host.link is None]
        written = " | ".join(
            starter.stderr_text.decode(errors="replace").strip() for starter in self._starters if starter.stderr_text
        )
        words = f"no answer from {', '.join(missing) or 'the other hosts'} in time"
        if refused := self.refusals():
            words += f" {refused}"
        return words + (f"; {written}" if written else "") + " (longer: --join-timeout)"

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)


def _start(command: Sequence[str], environ: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE if stdin == subprocess.PIPE else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a separate session, so that only this process handles Ctrl-C
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {str(error.strerror).lower()}") from None


def wrong_version(host: Host) -> str:
    """Return a message if a host has another version of allranks than this one; "" if it has the same."""
    if host.hello is None or host.hello.version == __version__:
        return ""
    theirs = f"allranks {host.hello.version} (python {host.hello.python})"
    return f"it has {theirs}, host 0 has {__version__}; install one version on all hosts"


def _like(host: Host, place: int, slots: int | None) -> Host:
    host.place, host.slots = place, slots
    return host


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _same_name(wanted: str, host: str) -> bool:
    return wanted == host or wanted.partition(".")[0] == host.partition(".")[0]
