"""The events and actions of the state machine in ``round``. Reports of ranks and hosts are in ``spec/events``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from allranks._elastic.slot_table import SlotTable
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
    "PrintWaitReport",
    "PrintReport",
    "PrintStacks",
    "PublishSlots",
    "RanksFinished",
    "RanksStarted",
    "ReaderChanged",
    "ReclaimTerminal",
    "RestartRank",
    "SignalRanks",
    "SignalReceived",
    "StartElsewhere",
    "StatesRequested",
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
    """All pending events were passed. Follows each batch of them, and is due at ``Round.deadline``."""


@dataclass(frozen=True)
class SignalReceived:
    """This process, or an agent, received a signal."""

    number: int


@dataclass(frozen=True)
class KillRequested:
    """The caller stops the job immediately."""


@dataclass(frozen=True)
class ReaderChanged:
    """A child stopped or exited. ``stopped_by``: the signal that stopped the reader, or None."""

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
    """An output is no longer writable. ``reader_gone``: it is a pipe whose reader has closed it."""

    name: str
    why: str
    reader_gone: bool


@dataclass(frozen=True)
class OutputBlocked:
    """The queue of output for the reader is full, so the ranks cannot write."""


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
class StatesRequested:
    """A command requests the state of the ranks. Answered by ``AnswerStates``.

    Attributes:
        recent: number of the newest calls of each rank to report.
        stacks: report also the stacks of ranks that are in no call. These ranks are interrupted for that.
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
    | StatesRequested
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
    """Print the traceback of a rank whose failure does not stop the job."""

    rank: int
    text: str


@dataclass(frozen=True)
class PrintStacks:
    """Print the stacks of ranks."""

    texts: Mapping[int, bytes]


@dataclass(frozen=True)
class PrintWaitReport:
    """Print a wait report. ``stacks``: the stacks of the late ranks that have arrived."""

    diagnosis: Diagnosis
    stacks: Mapping[int, bytes]


@dataclass(frozen=True)
class AnswerStates:
    """Answer all commands that requested the state of the ranks.

    ``stacks``, ``reasons``: of the ranks whose stacks were requested.
    """

    states: Sequence[RankState]
    stacks: Mapping[int, bytes]
    reasons: Mapping[int, str]


@dataclass(frozen=True)
class SignalRanks:
    """Send a signal to the process groups of ranks. If ``alone`` is set, exclude the children of python ranks."""

    number: int
    ranks: tuple[int, ...]
    alone: bool = False


@dataclass(frozen=True)
class DumpStacks:
    """Request the stacks of ranks, which arrive as ``Stacks``."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class InspectRanks:
    """Request the state of ranks, which arrives as ``RankState``.

    This includes ranks that have exited. ``recent``: number of calls to report.
    """

    ranks: tuple[int, ...]
    recent: int = 0


@dataclass(frozen=True)
class StartElsewhere:
    """Start the ranks of a lost host on another host, or new ranks. ``RankRestarted`` reports each one.

    Attributes:
        lost: the lost host; "" for new ranks.
        spare: the other host, which has no ranks yet.
        starts: number of previous processes of each rank slot. Ranks that are not in it are not started.
    """

    lost: str
    spare: str
    starts: Mapping[int, int]


@dataclass(frozen=True)
class PublishSlots:
    """Write the table of rank slots into the job's store, where ranks read it, before any later action."""

    table: SlotTable


@dataclass(frozen=True)
class LendTerminal:
    """Make the reader the foreground process group of the terminal. Answered by ``TerminalLent``."""

    rank: int


@dataclass(frozen=True)
class ReclaimTerminal:
    """Make this process the foreground process group again. ``restore``: restore the terminal's modes, too."""

    rank: int
    restore: bool = False


@dataclass(frozen=True)
class StopLauncher:
    """Stop this process by a signal of job control. Answered by ``LauncherContinued``."""

    number: int


@dataclass(frozen=True)
class AwaitOutput:
    """Wait for the end of the output: processes that ranks left behind may write. Answered by ``OutputClosed``."""


@dataclass(frozen=True)
class FinishRanks:
    """Kill and reap all remaining processes of the ranks, and read the rest of their output.

    Answered by ``RanksFinished``.

    Attributes:
        patience_s: seconds that processes which ranks left behind have to exit.
    """

    patience_s: float


class Ending(Enum):
    """Reason why a round ended."""

    CLEAN = "no rank failed"
    FAILED = "a rank failed or a host was lost"
    SIGNALLED = "a signal stopped the job"
    IDLE = "no rank wrote any output for too long"
    JOINED = "a new host joined"


@dataclass(frozen=True)
class Outcome:
    """Result of a round.

    Attributes:
        ending: the reason why it ended.
        code: the exit code.
        cause: the failure that caused the others, if there is one.
        failures: all failures, by rank.
        before: failures that happened before the job was stopped.
        exited: ranks that had exited with code 0 before any failure.
        signal: the signal that stopped the job, or None.
        stacks: stacks of ranks that could not report them themselves; for ``IDLE``, of all ranks; if a rank failed
            because other ranks were late, of the late ranks.
        states: states of the ranks when a rank failed, and their last calls.
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
    """Print the result of the round, and write all output. Answered by ``OutputWritten``."""

    outcome: Outcome


@dataclass(frozen=True)
class EndRound:
    """End the round: no work is left in it. The last action."""

    code: int


Action: TypeAlias = (
    Print
    | PrintReport
    | PrintStacks
    | PrintWaitReport
    | AnswerStates
    | SignalRanks
    | DumpStacks
    | InspectRanks
    | RestartRank
    | StartElsewhere
    | PublishSlots
    | LendTerminal
    | ReclaimTerminal
    | StopLauncher
    | AwaitOutput
    | FinishRanks
    | Conclude
    | EndRound
)
