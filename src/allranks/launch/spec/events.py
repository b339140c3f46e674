"""Events of the ranks of a job while they run, as agents report them.

The events are typed and contain no objects of this process, because an agent may run on another host. ``launch/policy``
decides on these events, so this file imports nothing of the launcher. ``RankState`` reports the state of a
rank on request. ``RankStats`` reports the duration of its calls.
"""

from __future__ import annotations

from enum import Enum

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
    "FailureKind",
    "FailureReport",
    "Returned",
    "Stacks",
]


class FailureKind(Enum):
    """Failures of a rank from which the launcher concludes something about other ranks."""

    OTHER = "other"
    LATE = "late"  # other ranks did not take part in a call
    EXCLUDED = "excluded"  # the other ranks have continued without this rank
    STATE_LOST = "state lost"  # no rank has the state of the training, which is true for all ranks


class FailureReport(msgspec.Struct, frozen=True, tag=True):
    """The failure of a python rank, reported by the rank itself when it happens.

    Attributes:
        code: the exit code that the interpreter will exit with.
        title: the last line of the traceback, for example ``ValueError: boom``; "" for ``sys.exit(3)``.
        text: the formatted traceback; "" if there is none, or if the rank prints it with its own hook.
        where: the innermost line of the user's own code, for example ``train.py:12 in step``.
        echo: the failure is a consequence of another rank's failure: a ``PeerLostError`` or an error that it led to.
        interrupted: the failure is a KeyboardInterrupt.
        kind: what the failure means for other ranks.
        at: time of the failure, on the clock that all processes of a host share (``time.monotonic``).
        error: the exception that a function raised, pickled, if that is possible.
    """

    code: int
    title: str = ""
    text: str = ""
    where: str = ""
    echo: bool = False
    interrupted: bool = False
    at: float = 0.0
    error: bytes = b""
    kind: FailureKind = FailureKind.OTHER


class Output(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a rank wrote. ``stream`` is 1 or 2; a rank with one channel for both sends 1."""

    rank: int
    stream: int
    data: bytes


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank reported its failure. Its process has not exited yet."""

    rank: int
    pid: int
    report: FailureReport


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The process of a rank has exited.

    Attributes:
        status: its exit code, or the negative number of the signal that killed it.
        tail: its last lines, if its agent shows the output of ranks, and has not shown these lines.
    """

    rank: int
    pid: int
    status: int
    tail: tuple[bytes, ...] = ()


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """A piece of the stacks that ``RequestStacks`` requested. ``why``: the reason, if there are no stacks."""

    rank: int
    text: bytes = b""
    why: str = ""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished its function. ``piece``: a piece of the return value, pickled."""

    rank: int
    piece: bytes


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a rank in the loop of its function, for the progress bar of ``allranks.run``.

    Attributes:
        done: number of completed items of the loop.
        total: number of all items; None if it is not known.
        name: name of the loop; "" for none.
        note: text that the function adds, for example its loss.
        rank: number of the rank. Its agent adds it.
    """

    done: int
    total: int | None = None
    name: str = ""
    note: str = ""
    rank: int = -1


class LongWait(msgspec.Struct, frozen=True, tag=True):
    """A rank has been in one call for a long time.

    Attributes:
        rank: its number.
        index: index of the call, in the order of the rank's calls.
        seconds: the limit that the call has exceeded: the time until the first report of a wait, or until a later one.
    """

    rank: int
    index: int
    seconds: float


class Asked(msgspec.Struct, frozen=True, tag=True):
    """Another command on an agent's host requests the state of the ranks; see ``Question`` in ``_trace/jobs``."""

    recent: int
    stacks: bool


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """An agent received a signal that is meant for the whole job, for example from a batch system."""

    signal: int


class RestartRank(msgspec.Struct, frozen=True, tag=True):
    """Request to restart one rank; its old process is killed first. A master requests it for a worker.

    Attributes:
        rank: the rank.
        environ: variables on top of the rank's own.
    """

    rank: int
    environ: dict[str, str]


class RankRestarted(msgspec.Struct, frozen=True, tag=True):
    """A rank has been restarted. All events of its previous process precede this event."""

    rank: int


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """A host is lost, with all its ranks: its agent exited, or the connection to the agent closed."""

    host: str
    ranks: tuple[int, ...]
    why: str


class HostJoined(msgspec.Struct, frozen=True, tag=True):
    """A host is available that could take part. A pool reports it, not an agent.

    Attributes:
        host: its name.
        room: number of ranks that it can start in an elastic round; 0 in other rounds, where all ranks restart with it.
    """

    host: str
    room: int = 0


class LeftBehind(msgspec.Struct, frozen=True, tag=True):
    """A rank that exited with code 0 has left processes behind, which are terminated. ``what``: which processes."""

    rank: int
    what: str


class HostMessage(msgspec.Struct, frozen=True, tag=True):
    """A line that ssh or an agent itself wrote to stderr."""

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
"""Anything that happens while ranks run."""
