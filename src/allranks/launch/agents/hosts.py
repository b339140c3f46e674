"""One host of a job, and the processes that start agents."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from allranks import __version__
from allranks._base.errors import ConfigError
from allranks._cluster.schedulers.interface import RemoteCommand
from allranks.launch.agents.link import Link
from allranks.launch.spec.messages import (
    AgentHello,
    AgentReady,
    Finished,
    Message,
    StartRanks,
    Unable,
)

__all__ = ["Host", "SharedStarter", "exit_text", "with_place", "same_name", "start_process", "wrong_version"]


# eq=False keeps the hash by identity: hosts are members of sets and keys of dictionaries.
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
        joining_ranks: number of ranks that it is preparing for, while a round continues without it.
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
    joining_ranks: int = 0
    addresses: tuple[str, ...] = ()
    started: StartRanks | None = None
    offset: float = math.inf
    restart: Callable[[], Host] | None = None
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


def start_process(command: Sequence[str], environ: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
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
        missing = isinstance(error, FileNotFoundError)
        hint = ".\n  Install it on this host, or add its folder to PATH." if missing else ""
        raise ConfigError(f"cannot start {command[0]!r}: {str(error.strerror).lower()}{hint}") from None


def wrong_version(host: Host) -> str:
    """Return a message if a host has another version of allranks than this one; "" if it has the same."""
    if host.hello is None or host.hello.version == __version__:
        return ""
    host_version = f"allranks {host.hello.version} (python {host.hello.python})"
    return f"{host_version} differs from host 0's allranks {__version__}.\n  Install the same version on all hosts."


def with_place(host: Host, place: int, slots: int | None) -> Host:
    host.place, host.slots = place, slots
    return host


def exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def same_name(wanted: str, host: str) -> bool:
    # One of the two names may lack the domain.
    return wanted == host or wanted.partition(".")[0] == host.partition(".")[0]
