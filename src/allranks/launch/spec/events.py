"""What happens to the ranks of a job while they run, as agents report it.

Typed and free of objects of this process, as an agent may run on another host. These are the events that
``launch/policy`` decides on, so this file imports nothing of the launcher. ``RankState`` says what a rank does, where
that was asked for; ``RankStats`` what its calls took.
"""

from __future__ import annotations

import msgspec

from allranks._trace.state import RankState
from allranks._trace.stats import RankStats

__all__ = [
    "RestartRank",
    "StopRequested",
    "RankRestarted",
    "RankProgress",
    "HostJoined",
    "Asked",
    "Event",
    "Exited",
    "RankFailed",
    "HostLost",
    "HostMessage",
    "LeftBehind",
    "LongWait",
    "Output",
    "RankState",
    "RankStats",
    "FailureReport",
    "Returned",
    "Stacks",
]


class FailureReport(msgspec.Struct, frozen=True, tag=True):
    """How a python rank failed, reported by the rank itself at the moment it happens.

    Attributes:
        code: the exit code that the interpreter will end with.
        title: the last line of the traceback, for example ``ValueError: boom``; "" for ``sys.exit(3)``.
        text: the formatted traceback; "" if there is none, or if the rank prints it by a hook of its own.
        where: the innermost line of the user's own code, for example ``train.py:12 in step``.
        echo: the failure is a consequence of another rank's: a ``PeerLostError`` or what it led to.
        interrupted: it is a KeyboardInterrupt.
        at: when, on the clock that all processes of a host share (``time.monotonic``).
        error: what a function raised, pickled, where it can be.
    """

    code: int
    title: str = ""
    text: str = ""
    where: str = ""
    echo: bool = False
    interrupted: bool = False
    at: float = 0.0
    error: bytes = b""


class Output(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a rank wrote. ``stream`` is 1 or 2; a rank with one channel for both sends 1."""

    rank: int
    stream: int
    data: bytes


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank reported its failure. Its process is still on its way out."""

    rank: int
    pid: int
    report: FailureReport


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone.

    Attributes:
        status: its exit code, or minus the signal that killed it.
        tail: its last lines, where its agent shows what ranks write, and has not shown them.
    """

    rank: int
    pid: int
    status: int
    tail: tuple[bytes, ...] = ()


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """More of the stacks that ``Dump`` asked for. ``why``: there are none, and the reason."""

    rank: int
    text: bytes = b""
    why: str = ""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """A rank that ran a function is through with it. ``piece``: more of what it returned, pickled."""

    rank: int
    piece: bytes


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """How far a rank that runs a function is in its loop, for the bar of ``allranks.run``.

    Attributes:
        done: how many items of the loop.
        total: of how many; None where that is not known.
        name: of the loop; "" for none.
        note: what the function adds, for example its loss.
        rank: its number, which its agent adds.
    """

    done: int
    total: int | None = None
    name: str = ""
    note: str = ""
    rank: int = -1


class LongWait(msgspec.Struct, frozen=True, tag=True):
    """A rank has been in one call for long.

    Attributes:
        rank: its number.
        index: of the call, in the order of the rank's calls.
        seconds: the limit that was passed: how long a call may take before that is told, or tells again.
    """

    rank: int
    index: int
    seconds: float


class Asked(msgspec.Struct, frozen=True, tag=True):
    """Another command on an agent's host asks what the ranks of the job do; see ``Question`` in ``_trace/jobs``."""

    recent: int
    stacks: bool


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """An agent received a signal that is meant for the whole job, from a batch system for example."""

    signal: int


class RestartRank(msgspec.Struct, frozen=True, tag=True):
    """Start a rank again, alone; what is left of its process is killed first. A master requests it for a worker.

    Attributes:
        rank: the rank.
        environ: variables on top of the rank's own.
    """

    rank: int
    environ: dict[str, str]


class RankRestarted(msgspec.Struct, frozen=True, tag=True):
    """A rank has been started again. All events of its last process came before."""

    rank: int


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """A host is gone, with all its ranks: its agent ended, or the connection to it."""

    host: str
    ranks: tuple[int, ...]
    why: str


class HostJoined(msgspec.Struct, frozen=True, tag=True):
    """A host is there that could take part. Told by a pool, not by an agent.

    Attributes:
        host: its name.
        room: how many ranks it is ready to start, in an elastic round; 0 elsewhere: all ranks start again with it.
    """

    host: str
    room: int = 0


class LeftBehind(msgspec.Struct, frozen=True, tag=True):
    """A rank that has ended with exit code 0 has left processes behind, which are ended. ``what``: which."""

    rank: int
    what: str


class HostMessage(msgspec.Struct, frozen=True, tag=True):
    """A line that ssh or an agent itself wrote on stderr."""

    host: str
    text: bytes


Event = (
    Output
    | RankFailed
    | Exited
    | Stacks
    | Asked
    | LongWait
    | RankState
    | RankProgress
    | RankStats
    | Returned
    | RestartRank
    | RankRestarted
    | StopRequested
    | HostLost
    | HostJoined
    | HostMessage
    | LeftBehind
)
"""What happens while ranks run."""
