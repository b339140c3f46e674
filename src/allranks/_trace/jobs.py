"""The running jobs of this user on this host, and what their ranks do.

A launcher, and the agent on every other host, listens on a unix socket in the abstract namespace. Such a socket leaves
no file behind, and its name can be found: it has the user's number and the process's. The rest of it is random, or
others could take it before. Who asks is known by the kernel; another user gets nothing. A question and an answer are
one line of JSON each.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator

import msgspec

from allranks._base.errors import AllranksError
from allranks._net.sockets import unix_peer
from allranks._trace.state import RankState

__all__ = ["JobAnswer", "RunningJob", "JobEnded", "NoAnswer", "Question", "ask", "find", "own_address"]

_NAME = re.compile(r"@allranks-job-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}$")
_MOST_BYTES = 1 << 26


class NoAnswer(AllranksError):
    """A job ended, or its launcher is stopped."""


class JobEnded(NoAnswer):
    """A job ended before it could answer."""


class RunningJob(msgspec.Struct, frozen=True):
    """A running job: a process that answers for it, and that socket's name."""

    pid: int
    address: str


class Question(msgspec.Struct, frozen=True):
    """What is asked.

    Attributes:
        recent: how many of the newest calls of each rank.
        stacks: where ranks are that are in no call, too. They are interrupted for that.
    """

    recent: int = 0
    stacks: bool = True


class JobAnswer(msgspec.Struct, frozen=True):
    """What the ranks of a job do.

    Attributes:
        launcher: the process of the launcher.
        launcher_host: its host.
        command: what it runs.
        size: the number of ranks.
        hosts: the host of each rank; empty if there is one.
        seconds: how long the job has run.
        states: what ranks do, by rank, as far as it is known.
        places: the line in the program of ranks that are in no call.
        reasons: why such a rank has not told its line.
        restarts: how often the job was started again.
    """

    launcher: int
    launcher_host: str
    command: str
    size: int
    hosts: tuple[str, ...]
    seconds: float
    states: tuple[RankState, ...]
    places: dict[int, str] = {}
    reasons: dict[int, str] = {}
    restarts: int = 0


def own_address(number: int) -> str:
    """A name for the socket of this process's job of that number."""
    return f"\0allranks-job-{os.geteuid()}-{os.getpid()}-{number}-{secrets.token_hex(8)}"


def find() -> list[RunningJob]:
    """The jobs of this user on this host, oldest first."""
    found: dict[tuple[int, int], RunningJob] = {}
    with open("/proc/net/unix") as file:
        for line in file:
            match = _NAME.search(line.rstrip("\n"))
            if match is not None and int(match[1]) == os.geteuid():
                found[int(match[2]), int(match[3])] = RunningJob(int(match[2]), "\0" + match[0][1:])
    return [found[key] for key in sorted(found)]


def ask(job: RunningJob, question: Question, timeout_s: float = 10.0) -> JobAnswer:
    """Asks a job what its ranks do.

    Raises:
        NoAnswer: it has ended, or does not answer.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect(job.address)
            if unix_peer(connection)[1] != os.geteuid():
                raise NoAnswer(f"what answers for job {job.pid} belongs to another user")
            connection.sendall(msgspec.json.encode(question) + b"\n")
            data = b"".join(_read(connection, deadline))
        except TimeoutError:
            raise NoAnswer(f"job {job.pid} does not answer: is its launcher stopped?") from None
        except OSError as error:
            raise JobEnded(f"job {job.pid} has ended ({error.strerror})") from None
    try:
        return msgspec.json.decode(data, type=JobAnswer)
    except msgspec.DecodeError:
        if not data:
            raise JobEnded(f"job {job.pid} has ended") from None
        raise NoAnswer(f"job {job.pid} has answered in another version of allranks") from None


def _read(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    total = 0
    while total < _MOST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(1 << 16)
        if not data:
            return
        total += len(data)
        yield data
        if data.endswith(b"\n"):
            return
