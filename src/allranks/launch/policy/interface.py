"""The events and actions of the state machine in ``round``. What a rank or a host reports is in ``spec/events``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from allranks._rendezvous.seats import SeatTable
from allranks._trace.diagnosis import Diagnosis
from allranks._trace.state import RankState
from allranks.launch.policy.root_cause import Failure
from allranks.launch.spec import events
from allranks.launch.spec.events import RestartRank

__all__ = [
    "Action",
    "AnswerStates",
    "AwaitOutput",
    "Conclude",
    "DumpStacks",
    "EndRound",
    "Ending",
    "Event",
    "FinishRanks",
    "InspectRanks",
    "KillRequested",
    "LauncherContinued",
    "LendTerminal",
    "Level",
    "Outcome",
    "OutputBlocked",
    "OutputClosed",
    "OutputLost",
    "OutputWritten",
    "Print",
    "PrintNotice",
    "PrintReport",
    "PrintStacks",
    "PublishSeats",
    "RanksFinished",
    "RanksStarted",
    "ReaderChanged",
    "ReclaimTerminal",
    "RestartRank",
    "SignalRanks",
    "SignalReceived",
    "StartElsewhere",
    "StatesAsked",
    "StopLauncher",
    "TerminalLent",
    "TimePassed",
]


# Events.


@dataclass(frozen=True)
class RanksStarted:
    """All ranks were started. The first event."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TimePassed:
    """All events that had come were passed. Follows each batch of them, and is due at ``Round.deadline``."""


@dataclass(frozen=True)
class SignalReceived:
    """This process, or an agent, received a signal."""

    number: int


@dataclass(frozen=True)
class KillRequested:
    """The caller ends the job at once."""


@dataclass(frozen=True)
class ReaderChanged:
    """A child stopped or ended. ``stopped_by``: the signal that stopped the reader, or None."""

    stopped_by: int | None = None


@dataclass(frozen=True)
class TerminalLent:
    """``LendTerminal`` was performed. ``lent`` is False if another job has the terminal."""

    lent: bool


@dataclass(frozen=True)
class LauncherContinued:
    """``StopLauncher`` was performed. ``stopped`` is False if this process could not be stopped."""

    stopped: bool


@dataclass(frozen=True)
class OutputLost:
    """An output cannot be written to any more. ``reader_gone``: it is a pipe whose reader has closed it."""

    name: str
    why: str
    reader_gone: bool


@dataclass(frozen=True)
class OutputBlocked:
    """So much output waits for its reader that the ranks cannot write."""


@dataclass(frozen=True)
class OutputClosed:
    """No process can write to the pipes of the ranks any more. Answers ``AwaitOutput``."""


@dataclass(frozen=True)
class RanksFinished:
    """``FinishRanks`` was performed, and its events were passed."""


@dataclass(frozen=True)
class OutputWritten:
    """All output was written. Answers ``Conclude``."""


@dataclass(frozen=True)
class StatesAsked:
    """Somebody asks what ranks do. Answered by ``AnswerStates``.

    Attributes:
        recent: how many of the newest calls of each are wanted.
        stacks: where ranks are that are in no call, is wanted too. They are interrupted for that.
    """

    recent: int = 0
    stacks: bool = True


Event: TypeAlias = (
    RanksStarted
    | TimePassed
    | SignalReceived
    | KillRequested
    | ReaderChanged
    | TerminalLent
    | LauncherContinued
    | OutputLost
    | OutputBlocked
    | OutputClosed
    | RanksFinished
    | OutputWritten
    | StatesAsked
    | events.Event
)


# Actions.


class Level(Enum):
    """How important a line is: ``ESSENTIAL`` is always printed, ``REMARK`` not with -q, ``DETAIL`` only with -v."""

    ESSENTIAL = 0
    REMARK = 1
    DETAIL = 2


@dataclass(frozen=True)
class Print:
    """Print a line of the launcher's own."""

    text: str
    level: Level = Level.ESSENTIAL


@dataclass(frozen=True)
class PrintReport:
    """Print the traceback of a rank that may fail."""

    rank: int
    text: str


@dataclass(frozen=True)
class PrintStacks:
    """Print the stacks of ranks."""

    texts: Mapping[int, bytes]


@dataclass(frozen=True)
class PrintNotice:
    """Print why ranks wait. ``stacks``: of those that are late, as far as they have come."""

    diagnosis: Diagnosis
    stacks: Mapping[int, bytes]


@dataclass(frozen=True)
class AnswerStates:
    """Answer all who have asked what ranks do. ``stacks``, ``reasons``: of those that were asked where they are."""

    states: Sequence[RankState]
    stacks: Mapping[int, bytes]
    reasons: Mapping[int, str]


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal to the process groups of ranks. ``alone``: to python ranks without their children."""

    number: int
    ranks: tuple[int, ...]
    alone: bool = False


@dataclass(frozen=True)
class DumpStacks:
    """Ask ranks for their stacks, which come as ``Stacks``."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class InspectRanks:
    """Ask what ranks do, which comes as ``RankState``. Of ranks that have ended, too. ``recent``: so many calls."""

    ranks: tuple[int, ...]
    recent: int = 0


@dataclass(frozen=True)
class StartElsewhere:
    """Start the ranks of a lost host on another one, or new ranks. Each comes as ``RankRestarted``.

    Attributes:
        lost: the lost host; "" for new ranks.
        spare: the other one, which has no ranks yet.
        starts: how many processes had the seat of each rank before. Ranks that are not there are not started.
    """

    lost: str
    spare: str
    starts: Mapping[int, int]


@dataclass(frozen=True)
class PublishSeats:
    """Put the table of seats into the store of the job, where ranks read it. Before any later action."""

    table: SeatTable


@dataclass(frozen=True)
class LendTerminal:
    """Make the reader the foreground process group of the terminal. Answered by ``TerminalLent``."""

    rank: int


@dataclass(frozen=True)
class ReclaimTerminal:
    """Make this process the foreground process group again. ``restore``: with the terminal's modes, too."""

    rank: int
    restore: bool = False


@dataclass(frozen=True)
class StopLauncher:
    """Stop this process by a signal of job control. Answered by ``LauncherContinued``."""

    number: int


@dataclass(frozen=True)
class AwaitOutput:
    """The ranks have ended, but processes that they left behind may still write. Answered by ``OutputClosed``."""


@dataclass(frozen=True)
class FinishRanks:
    """Kill and reap all that is left of the ranks, read what is left of their output. Then: ``RanksFinished``.

    Attributes:
        patience_s: seconds that processes which they have left behind have to end.
    """

    patience_s: float


class Ending(Enum):
    """Why a round ended."""

    CLEAN = "no rank is to blame"
    FAILED = "a rank failed or a host was lost"
    SIGNALLED = "a signal stopped it"
    IDLE = "no rank had written anything for too long"
    JOINED = "a host has come that can take part"


@dataclass(frozen=True)
class Outcome:
    """How a round ended.

    Attributes:
        ending: why.
        code: the exit code.
        cause: the failure that caused the others, if there is one.
        failures: all failures, by rank.
        before: those that happened before the job was stopped.
        exited: ranks that had exited with code 0 while all was well.
        signal: the signal that stopped the job, or None.
        stacks: where ranks were that could not report it themselves; for ``IDLE`` where all were; where a rank failed
            because others did not come, where those were.
        states: what ranks did when a rank failed, and their last calls.
    """

    ending: Ending
    code: int
    cause: Failure | None = None
    failures: Sequence[Failure] = ()
    before: Sequence[Failure] = ()
    exited: Sequence[int] = ()
    signal: int | None = None
    stacks: Mapping[int, bytes] = field(default_factory=dict)
    states: Sequence[RankState] = ()


@dataclass(frozen=True)
class Conclude:
    """Print how the round ended, and write all output. Answered by ``OutputWritten``."""

    outcome: Outcome


@dataclass(frozen=True)
class EndRound:
    """Nothing is left to do in this round. The last action."""

    code: int


Action: TypeAlias = (
    Print
    | PrintReport
    | PrintStacks
    | PrintNotice
    | AnswerStates
    | SignalRanks
    | DumpStacks
    | InspectRanks
    | RestartRank
    | StartElsewhere
    | PublishSeats
    | LendTerminal
    | ReclaimTerminal
    | StopLauncher
    | AwaitOutput
    | FinishRanks
    | Conclude
    | EndRound
)
