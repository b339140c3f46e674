"""The running jobs of this user on this host, and the state of their ranks.

The launcher, and the agent on every other host, listen on a unix socket in the abstract namespace. Such a socket leaves
no file behind, and its name can be found: it contains the numbers of the user and of the process. The rest of the name
is random, so that no other process can take the name first. The kernel reports the user of a connecting process;
another user receives nothing. A question and an answer are one line of JSON each.
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
_MOST_BYTES = 1 << 26  # of an answer; reading stops there


class NoAnswer(AllranksError):
    """A job gave no answer: it has ended, its launcher is stopped, or its answer cannot be used."""


class JobEnded(NoAnswer):
    """A job ended before it could answer."""


class RunningJob(msgspec.Struct, frozen=True):
    """A running job: the process that answers for it, and the name of its socket."""

    pid: int
    address: str


class Question(msgspec.Struct, frozen=True):
    """A request for the state of a job.

    Attributes:
        recent: Number of the newest calls of each rank to return.
        stacks: Also return the places of ranks that are in no call. These ranks are interrupted by a signal.
    """

    recent: int = 0
    stacks: bool = True


class JobAnswer(msgspec.Struct, frozen=True):
    """The state of the ranks of a job.

    Attributes:
        launcher: Pid of the launcher.
        launcher_host: Host of the launcher.
        command: The command that the job runs.
        size: Number of ranks.
        hosts: Host of each rank. Empty if there is one host.
        seconds: How long the job has run.
        states: States of the ranks that are known, by rank.
        places: Line of the program, by rank, for ranks that are in no call.
        reasons: Why such a rank did not report its line, by rank.
        restarts: How often the job was restarted.
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
    """Return a name for the socket of this process's job with that number."""
    return f"\0allranks-job-{os.geteuid()}-{os.getpid()}-{number}-{secrets.token_hex(8)}"


def find() -> list[RunningJob]:
    """Return the jobs of this user on this host, oldest first."""
    found: dict[tuple[int, int], RunningJob] = {}
    with open("/proc/net/unix", errors="surrogateescape") as file:
        for line in file:
            match = _NAME.search(line.rstrip("\n"))
            if match is not None and int(match[1]) == os.geteuid():
                # The kernel prints the leading zero byte of an abstract name as "@".
                found[int(match[2]), int(match[3])] = RunningJob(int(match[2]), "\0" + match[0][1:])
    return [found[key] for key in sorted(found)]


def ask(job: RunningJob, question: Question, timeout_s: float = 10.0) -> JobAnswer:
    """Return the state of a job's ranks.

    Raises:
        NoAnswer: The job has ended, does not answer, or its answer cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect(job.address)
            if unix_peer(connection)[1] != os.geteuid():
                raise NoAnswer(f"the process that answers for job {job.pid} belongs to another user")
            connection.sendall(msgspec.json.encode(question) + b"\n")
            data = b"".join(_read(connection, deadline))
        except TimeoutError:
            raise NoAnswer(
                f"job {job.pid} has not answered within {timeout_s:g} s.\n  If its launcher is stopped (T in"
                f" `ps -o stat {job.pid}`), continue it with `kill -CONT {job.pid}`."
            ) from None
        except OSError as error:
            raise JobEnded(f"job {job.pid} has ended ({error.strerror})") from None
    try:
        return msgspec.json.decode(data, type=JobAnswer)
    except msgspec.DecodeError:
        if not data:
            raise JobEnded(f"job {job.pid} has ended") from None
        raise NoAnswer(
            f"job {job.pid} runs another version of allranks.\n  Use the `allranks` command of the job's environment."
        ) from None


def _read(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    total = 0
    while total < _MOST_BYTES:
        # Not 0, which would make the socket non-blocking.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(1 << 16)
        if not data:
            return
        total += len(data)
        yield data
        # An answer is one line: JSON escapes line ends within strings.
        if data.endswith(b"\n"):
            return
