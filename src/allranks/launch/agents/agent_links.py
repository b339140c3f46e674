"""The links to the agents of a job: descriptors, messages, and the loss of a host."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable

import msgspec

from allranks._net.listener import Listener
from allranks._net.sockets import keep_alive
from allranks.launch.agents.agent_command import CONNECTED, explain, last_message
from allranks.launch.agents.hosts import Host, SharedStarter, exit_text, same_name, with_place
from allranks.launch.agents.link import Garbled, LinkLost, to_agent
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
)
from allranks.launch.spec.messages import (
    AgentHello,
    AgentReady,
    Command,
    EndAgent,
    Ended,
    Finished,
    Message,
    Prepare,
    Unable,
)

__all__ = ["GONE_S", "AgentLinks"]

_CHUNK = 1 << 16
_STDERR_BYTES = 1 << 14  # bytes; the last lines explain why an agent did not start
_END_S = 2.0  # seconds for the agents to receive the last messages and exit, before SIGTERM
GONE_S = 0.3  # seconds for a process to exit, and for other hosts to fail with the first
_LOST_AFTER_S = 15  # seconds; an elastic job replaces a lost host's ranks soon, but must survive a network cut of 7 s


class AgentLinks:
    """The agents of a job, and what they send.

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
        self._restart_commands: dict[str, Callable[[], Host]] = {}  # commands that restart lost agents
        self._next_retry_at = 0.0
        self._check_caller: Callable[[Host], str] | None = None
        self._admit_caller: Callable[[Host], Prepare] | None = None
        self._listener_closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self.wake = os.pipe()
        os.set_blocking(self._wake_read_fd, False)
        os.set_blocking(self.wake, False)
        self._events: list[Event] = []
        self._requesting_hosts: list[Host] = []
        self._writable: set[int] = set()
        self._reading = True
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ, lambda: os.read(self._wake_read_fd, _CHUNK))
        if listener is not None:
            self._selector.register(listener.wake, selectors.EVENT_READ, self._accept_agents)

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
            # An earlier handler of this loop may have detached this link.
            if key.fd in self._selector.get_map():
                key.data()
        # A flush that would block returns immediately, so it needs no check for writability.
        for host in (*self.hosts, *self._callers):
            if host.link is not None and host.link.backlog:
                self._attempt_send(host, host.link.flush)

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

    def _accept_agents(self) -> None:
        assert self._listener is not None
        for sock in self._listener.take():
            # Other jobs do not take silence for a loss: a laptop that sleeps must not end its job (decision 057).
            if self._elastic:
                keep_alive(sock, _LOST_AFTER_S)
            fd = sock.detach()
            host = Host("?", CONNECTED, link=to_agent(fd, fd))
            self._callers.append(host)
            self._attach(host)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # ``start_process`` gave it its own session, so the group contains only its children.
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

    def _send(self, host: Host, command: Command) -> None:
        if host.link is not None:
            link = host.link
            self._attempt_send(host, lambda: link.send(command))

    def _attempt_send(self, host: Host, action: Callable[[], object]) -> None:
        try:
            action()
        except LinkLost as lost:
            self._on_link_lost(host, lost)

    def _receive(self, host: Host) -> None:
        try:
            messages = host.link.receive() if host.link is not None else []
        except LinkLost as lost:
            self._on_link_lost(host, lost)
            return
        for message in messages:
            self._handle_message(host, message)

    def _handle_message(self, host: Host, message: Message) -> None:
        match message:
            case AgentHello():
                host.hello = message
                host.update_clock(message.now)
                if host.link is not None:
                    # It is an agent and not the text of a shell, so large messages are allowed.
                    host.link.trust()
                self._match_caller(host)
            case AgentReady() | Unable() | Finished():
                host.answer = message
                if isinstance(message, AgentReady):
                    host.update_clock(message.now)
                    host.addresses = message.addresses
                    if host.joining_ranks:
                        self._events.append(HostJoined(host.name, host.joining_ranks))
                        host.joining_ranks = 0
                elif isinstance(message, Unable) and host.joining_ranks:
                    self._events.append(HostMessage(host.name, f"cannot join the job: {message.why}".encode()))
                    self.refuse_caller(host, message.why)
                elif isinstance(message, Unable) and (host.running or host.starting):
                    self._mark_lost(host, f"{host.name}: {message.why}")
            case RankFailed(rank, pid, report):
                at = report.at + host.offset if report.at else time.monotonic()
                # The clock offset is an estimate; a time in the future would delay the choice of the cause.
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
                self._requesting_hosts.append(host)
                self._events.append(message)
            case _:
                self._events.append(message)

    def _forward_to_master(self, ended: Ended) -> None:
        if self._has_master:
            for host in self.hosts:
                if 0 in host.ranks:
                    self._send(host, ended)

    def _match_caller(self, caller: Host) -> None:
        """Give the link of a connected agent to the expected host with its name."""
        assert caller.hello is not None
        if caller not in self._callers:
            return
        name = caller.hello.host
        for host in self.hosts:
            if host.hello is None and host.process is None and same_name(host.name, name):
                self._callers.remove(caller)
                link, caller.link = caller.link, None
                assert link is not None
                host.link, host.hello, host.offset = link, caller.hello, caller.offset
                self._selector.modify(link.read_fd, selectors.EVENT_READ, self._receiver(host))
                return
        caller.name = name

    def _on_link_lost(self, host: Host, lost: LinkLost) -> None:
        # A failed send and the end of the stream may report the same loss.
        if host.link is None:
            return
        if host.process is None:
            self._mark_lost(host, f"{host.name}: lost the connection to its agent ({lost})")
            return
        self._detach(host)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.process.wait(GONE_S)  # its last lines and its exit code are better reasons than the pipe
        self._read_all_stderr()
        code = host.process.poll()
        if isinstance(lost, Garbled):
            self._mark_lost(
                host,
                f"{host.name}: {lost}.\n  Disable all output of the shell's startup files on that host (.bashrc, a"
                " banner) for non-interactive shells.",
            )
            return
        if host.hello is None:
            self._mark_lost(
                host, explain(host.command, host.name, host.python, code, host.stderr_text.decode(errors="replace"))
            )
            return
        what = f"lost the connection to its agent ({lost})"
        if code is not None:
            what = f"its agent has terminated ({host.command.name}: {exit_text(code)})"
        last = last_message(host.stderr_text.decode(errors="replace"))
        self._mark_lost(host, ": ".join(filter(None, [f"{host.name}: {what}", last])))

    def _mark_lost(self, host: Host, why: str) -> None:
        self._detach(host)
        if host in self._callers:
            self._callers.remove(host)
            if host.process is not None:
                self._reap(host.process)
        host.why = why
        host.answer = None
        if host.running or host.starting or (host.started is not None and not host.started.count):
            self._report_lost_ranks(host)

    def _report_lost_ranks(self, host: Host) -> None:
        """Report the ranks of a host as lost: none for a spare host."""
        lost_ranks = sorted(host.running | host.starting)
        self._events.append(HostLost(host.name, tuple(lost_ranks), host.why))
        if self._admit_caller is not None and host.restart is not None:
            self._retry(host)
        for rank in lost_ranks:
            # The master waits for the exits of its workers, and none will be reported for these.
            self._forward_to_master(Ended(rank, 0, host.why))
        host.running.clear()
        host.starting.clear()

    def _retry(self, host: Host) -> None:
        """Restart its agent from time to time, until one starts."""
        if host.restart is not None:
            restart, place, slots = host.restart, host.place, host.slots
            self._restart_commands[host.name] = lambda: with_place(restart(), place, slots)

    def refuse_caller(self, host: Host, why: str) -> None:
        """Refuse a caller."""
        self._send(host, EndAgent(2, self._reporter.line(f"error: host 0 refused this host: {why}").encode()))
        self.remove(host)

    def remove(self, host: Host) -> None:
        """Remove a host or a caller, and do not retry it."""
        for hosts in (self.hosts, self._callers):
            if host in hosts:  # a caller may have been removed while the message was sent
                hosts.remove(host)
        self._restart_commands.pop(host.name, None)
        self._detach(host)
        if host.process is not None:
            self._reap(host.process)

    def close_listener(self) -> int:
        """Stop accepting connections. Return the port of the listener, which is free then."""
        assert self._listener is not None
        port = self._listener.port
        self._selector.unregister(self._listener.wake)
        self._listener.close()
        self._listener_closed = True
        return port

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
        all_hosts = (*self.hosts, *self._callers)
        while any(h.link is not None and h.link.backlog for h in all_hosts) and time.monotonic() < until:
            self._turn(0.05)  # sends the last messages
        # An agent exits when its link closes, so all links close before the wait.
        for host in (*self.hosts, *self._callers):
            self._detach(host)
        if self._listener is not None and not self._listener_closed:
            self.close_listener()
        for process in processes:
            try:
                # One deadline for all processes, so that the times of the hosts do not add up.
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GONE_S)
            self._reap(process)
        self._selector.close()
        os.close(self._wake_read_fd)
        os.close(self.wake)
