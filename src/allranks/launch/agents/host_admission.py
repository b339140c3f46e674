"""The hosts of a job: those that the launcher starts, those that connect, and those that return after a loss."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from allranks._base.errors import ConfigError
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks.launch.agents.agent_command import explain
from allranks.launch.agents.agent_links import GONE_S, AgentLinks
from allranks.launch.agents.hosts import Host, SharedStarter, start_process, wrong_version
from allranks.launch.agents.link import to_agent
from allranks.launch.spec.events import (
    HostJoined,
)
from allranks.launch.spec.messages import (
    AgentReady,
    Prepare,
    Unable,
)

__all__ = ["AGAIN_S", "HostAdmission"]

AGAIN_S = 3.0  # seconds between two attempts to restart a lost agent


class HostAdmission(AgentLinks):
    """The agents of a job until all have connected and prepared, and hosts that come later."""

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
        process = start_process(words, environ, subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        # Duplicated, because the link closes its descriptors, and Popen's files close their own.
        link = to_agent(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        process.stdin.close()
        process.stdout.close()
        restart = partial(self._call, name, command, words, python, environ)
        host = Host(name, command, python, process, link, restart=restart)
        self._attach(host)
        self._watch_stderr(host, process)
        return host

    def start_shared(self, command: RemoteCommand, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a command whose agents connect by themselves.

        Raises:
            ConfigError: the command does not exist on this host.
        """
        starter = SharedStarter(command, start_process(words, environ, subprocess.DEVNULL))
        self._starters.append(starter)
        self._watch_stderr(starter, starter.process)

    def add_expected(self, names: Iterable[str], command: RemoteCommand) -> None:
        """Add hosts whose agents will connect under these names."""
        self.hosts += [Host(name, command) for name in names]

    @property
    def hosts_connect(self) -> bool:
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
        return f"(refused: {'; '.join(f'{peer}: {why}' for peer, why in refused.items())})" if refused else ""

    @property
    def callers(self) -> list[Host]:
        """Agents that have connected and identified themselves, and were not expected by name."""
        return [host for host in self._callers if host.hello is not None]

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
            lost_hosts = [host for host in self.hosts if host.why]
            if lost_hosts:
                self._await_further_losses(lost_hosts)
                raise ConfigError("\n".join(dict.fromkeys(host.why for host in self.hosts if host.why)))
            for starter in self._starters:
                if (code := starter.process.poll()) is not None:
                    names = [host.name for host in self.hosts if host.hello is None]
                    absent = ", ".join(names or [host.name for host in self.hosts])
                    self._read_all_stderr()
                    text = starter.stderr_text.decode(errors="replace")
                    # A shared starter runs this interpreter on all hosts.
                    raise ConfigError(explain(starter.command, absent, sys.executable, code, text))
            left = until - time.monotonic()
            if left <= 0:
                raise ConfigError(self._missing_hosts_text() if missing is None else missing())
            # At most 0.5 s: the exit of a shared starter, and the deadlines in ``enough``, cause no event.
            self._turn(min(left, 0.5))

    def _await_further_losses(self, lost_hosts: list[Host]) -> None:
        """Wait a moment for other hosts to fail too, so that one message names all."""
        until = time.monotonic() + GONE_S
        while (left := until - time.monotonic()) > 0 and any(h.hello is None and not h.why for h in self.hosts):
            self._turn(left)

    def _missing_hosts_text(self) -> str:
        missing = [host.name for host in self.hosts if host.hello is None or host.link is None]
        written = " | ".join(
            starter.stderr_text.decode(errors="replace").strip() for starter in self._starters if starter.stderr_text
        )
        words = f"no answer in time from {', '.join(missing) or 'the other hosts'}"
        if refused := self.refusals():
            words += f" {refused}"
        return words + (f"; {written}" if written else "") + ".\n  To wait longer, use --join-timeout."

    def all_identified(self) -> bool:
        """Return whether the agents of all hosts have identified themselves.

        Raises:
            ConfigError: one of them has another version of allranks.
        """
        for host in self.hosts:
            if why := wrong_version(host):
                raise ConfigError(f"{host.name}: {why}")
        return all(host.hello is not None for host in self.hosts)

    def report_callers(
        self, check_caller: Callable[[Host], str] | None, admit_caller: Callable[[Host], Prepare] | None = None
    ) -> None:
        """Make ``poll`` report hosts that could take part.

        Args:
            check_caller: returns why a caller may not take part, "" if it may; None: do not report callers.
            admit_caller: admits a caller to a running round, and returns its ``Prepare`` command. The caller is
                reported when it is ready. None: the first callers are reported immediately, and wait for the next
                round.
        """
        self._check_caller, self._admit_caller = check_caller, admit_caller

    def _report(self, check_caller: Callable[[Host], str]) -> None:
        for caller in self.callers:
            if why := check_caller(caller):
                self.refuse_caller(caller, why)
            elif self._admit_caller is not None:
                command = self._admit_caller(caller)
                caller.joining_ranks = command.nproc
                self._send(caller, command)
        if self.callers:  # without ``admit_caller``, they wait for the next round
            self._check_caller = None
            self._events.append(HostJoined(", ".join(host.name for host in self.callers)))

    def admit(self, host: Host) -> None:
        """Move a caller to the hosts."""
        self._callers.remove(host)
        self._restart_commands.pop(host.name, None)
        self.hosts.append(host)
        self.hosts.sort(key=lambda host: host.place)

    def drop(self, host: Host, try_again: bool) -> None:
        """Remove a host.

        Args:
            host: a lost host.
            retry_lost: check from time to time whether it is available again.
        """
        self.hosts.remove(host)
        self._detach(host)
        if host.process is not None:
            self._reap(host.process)
            # A new agent of the same host may already have replaced it.
            if try_again and not any(other.name == host.name and not other.why for other in self.hosts):
                self._retry(host)

    def retry_lost(self) -> None:
        """Restart lost agents, at most every 3 s."""
        if time.monotonic() < self._next_retry_at:
            return
        self._next_retry_at = time.monotonic() + AGAIN_S
        trying = {host.name for host in self._callers}
        for name, restart in self._restart_commands.items():
            if name not in trying:
                # the command is missing, for example together with its network file system
                with contextlib.suppress(ConfigError):
                    self._callers.append(restart())

    @property
    def may_grow(self) -> bool:
        """Whether hosts can join, or return."""
        return self.hosts_connect or bool(self._restart_commands or self._callers)

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

    def unable(self) -> dict[Host, str]:
        """Return the hosts that cannot execute their command, with the reasons."""
        return {host: host.answer.why for host in self.hosts if isinstance(host.answer, Unable)}

    def _raise_unable(self) -> None:
        whys: dict[str, list[str]] = {}
        for host, why in self.unable().items():
            whys.setdefault(why, []).append(host.name)
        if whys:
            raise ConfigError("\n".join(f"{', '.join(names)}: {why}" for why, names in whys.items()))
