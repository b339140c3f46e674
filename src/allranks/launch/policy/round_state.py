"""The state of one round of a job, and the actions that several of its rules share: stop, kill, print."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from allranks._base.errors import rank_list
from allranks._elastic.rank_slots import ElasticRules, RankSlots
from allranks.launch.policy.inquiry import Inquiry
from allranks.launch.policy.interface import (
    Action,
    DumpStacks,
    Ending,
    FinishRanks,
    Level,
    Outcome,
    Print,
    PublishSlots,
    ReclaimTerminal,
    SignalRanks,
    StopLauncher,
)
from allranks.launch.policy.root_cause import Failure, RootCause
from allranks.launch.policy.stack_request import Purpose, StackRequest
from allranks.launch.policy.wait_reports import WaitReports
from allranks.launch.spec.events import (
    RankState,
)

__all__ = ["DUMP_S", "Phase", "RoundState", "Rules", "Suspension"]

LEFT_BEHIND_S = 2.0  # seconds for processes that ranks left behind to exit
HINT_S = 1.5  # seconds from Ctrl-C to a remark about ranks that do not exit
DUMP_S = 1.0  # seconds that a stop waits for stacks, which take milliseconds


class Phase(Enum):
    """The condition that the round waits for."""

    RUNNING = "ranks"
    CLOSING = "processes that ranks left behind"
    FINISHING = "remaining processes that are killed and reaped"
    DRAINING = "readers of the output"
    ENDED = "nothing"


@dataclass(frozen=True)
class Rules:
    """Fixed parameters of a round.

    Attributes:
        grace_s: seconds between the signal that requests the exit of ranks and SIGKILL.
        hosts: the host of each rank, if there are several.
        idle_s: seconds without output of any rank before the round is stopped; None: no limit.
        until: time when the round is stopped if it still runs; None for never.
        passed_on: signals that are forwarded to the ranks and do not stop the round.
        master: the rank that all others work for. The others may fail one by one, and exit with it. -1: the caller is
            the master, and ends the round by ``KillRequested``. None: all ranks are alike.
        reader: the rank whose stdin is the terminal of the launcher; None if there is none.
        elastic: a lost rank does not stop the round; None: it does. Always None if there is a master.
    """

    grace_s: float
    hosts: Sequence[str] = ()
    idle_s: float | None = None
    until: float | None = None
    passed_on: Sequence[int] = ()
    master: int | None = None
    reader: int | None = None
    elastic: ElasticRules | None = None


@dataclass(frozen=True)
class Suspension:
    """A stop of the launcher by job control: signal, ranks that stop too, and whether the reader had the keys."""

    number: int
    ranks: tuple[int, ...]
    had_terminal: bool


class RoundState:
    """The state of a round.

    Attributes:
        phase: the condition that it waits for.
        running: ranks whose process has not exited, as far as is known.
        cause: the failure that caused the others; None if there is none yet.
        signalled: the signal that ended the round; None if none did.
        late: the round was stopped because it took too long (``Rules.until``).
        failed: a rank failed or hung, or a host was lost; the end was not requested.
        joined: the round was stopped so that a host that has joined can take part.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.phase = Phase.RUNNING
        self.running: set[int] = set()
        self.cause: Failure | None = None
        self.signalled: int | None = None
        self.late = self.failed = self.joined = False
        self._now = 0.0
        self._actions: list[Action] = []
        self._root_cause = RootCause()
        self._kill_at: float | None = None  # set when the round is being stopped
        self._stopped_at = 0.0
        self._stop_number: int = signal.SIGTERM
        self._killed_at: float | None = None
        self._exited: list[int] = []  # with code 0, before any failure
        self._output_lost = False
        self._second_signal = False  # by a signal, while the output is drained
        self._linger_at: float | None = None
        self._hint_at: float | None = None
        self._idle_at: float | None = None
        self._stopped_idle = False
        self._all_ranks: frozenset[int] = frozenset()
        self._wait_reports = WaitReports()
        self._inquiry: Inquiry | None = None  # of another command
        self._last_states: dict[int, RankState] = {}  # states of ranks when the cause was clear
        self._request: StackRequest | None = None
        self._answered: StackRequest | None = None
        self._silent: list[int] = []  # ranks that the stop signal killed before they could report their stacks
        self._borrower: int | None = None  # the rank that receives the keys of the terminal
        self._suspension: Suspension | None = None
        self._lent_after: int | None = None  # the signal that stopped the reader, which now receives the terminal
        self._phase_ends_at = 0.0
        self._outcome = Outcome(Ending.CLEAN, 0)
        self._slots: RankSlots[Failure] | None = None  # of an elastic round
        self._published = 0  # the published version of its table
        self._hosts = list(rules.hosts)  # the current host of each rank
        self._reports: dict[int, Failure] = {}  # in an elastic round, of ranks that have failed and not exited yet
        self._leaving: dict[int, float] = {}  # the times when those ranks are killed

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank, if there are several."""
        return self._hosts

    @property
    def stopping(self) -> bool:
        """Whether the ranks were requested to exit."""
        return self._kill_at is not None

    def _has_failures(self) -> bool:
        """Return whether failures are known that stop the round, now or unless their cause arrives earlier."""
        return bool(self._root_cause.failures)

    def _has_keys(self, rank: int) -> bool:
        """Return whether Ctrl-C goes to a rank and not to the launcher; never while the round is being stopped."""
        return not self.stopping and self._borrower == rank

    def _may_fail(self, rank: int) -> bool:
        """Return whether the other ranks continue without this rank."""
        return self.rules.master is not None and rank != self.rules.master

    def _has_cause(self) -> bool:
        """Return whether the cause of the end is known, and will be selected at the next ``TimePassed``."""
        return any(not failure.echo for failure in self._root_cause.failures.values())

    def _add_failure(self, failure: Failure) -> None:
        self._root_cause.add(self._on_host(failure))

    def _on_host(self, failure: Failure) -> Failure:
        return replace(failure, host=self._hosts[failure.rank]) if self._hosts else failure

    def _without_cause(self, cause: Failure) -> set[int]:
        """Return the ranks to signal: every running rank except the failed one, unless it has been restarted."""
        is_restarted = self._slots is not None and cause.rank in self._slots.losses
        return self.running if is_restarted else self.running - {cause.rank}

    def _take_cause(self, loss: Failure) -> None:
        """Process a loss after failures that may be its echoes."""
        if self._has_cause():
            self._root_cause.add(loss)
        else:
            self._stop_for_echo(self._root_cause.select(), loss)

    def _stop_for_echo(self, echo: Failure, loss: Failure) -> None:
        """Stop the round: the program did not survive the loss. The loss is the cause, because it is no echo."""
        title = f" ({echo.report.title})" if echo.report is not None and echo.report.title else ""
        self._root_cause.add(loss)
        self._print(
            f"rank {echo.rank} did not survive the loss of rank {loss.rank}{title}; the job stops.\n"
            "  To survive losses, see docs/resilience.md."
        )

    def _interrupt(self, spared: Sequence[int] = ()) -> None:
        """Stop the round by SIGINT, so that a rank that runs python reports the line where it was."""
        self.signalled = signal.SIGINT
        self._stop(signal.SIGINT, self.running.difference(spared))
        self._request_stacks(DUMP_S, Purpose.NOTHING)
        self._hint_at = self._now + HINT_S

    def _stop(self, number: int, ranks: Iterable[int]) -> None:
        self._reclaim()  # the launcher receives the keys again, so Ctrl-C kills
        self._request = None
        self._stop_number = number
        self._stopped_at = self._now
        self._kill_at = self._now + self.rules.grace_s
        chosen = sorted(ranks)
        if chosen:
            self._print(f"{signal.Signals(number).name} to {rank_list(chosen)}", Level.DETAIL)
        # A terminal sends Ctrl-C to all processes. Other signals go to the rank only, which may still need its
        # children.
        self._signal(number, chosen, alone=number != signal.SIGINT)
        self._signal(signal.SIGCONT, chosen)  # a stopped process would not handle the signal

    def _kill(self, why: str) -> None:
        self._request = None
        # A repeated kill must not extend the time after which ranks are given up.
        if self._killed_at is None:
            self._killed_at = self._now
        if self.running and why:
            verb = "was" if len(self.running) == 1 else "were"
            self._print(f"{rank_list(sorted(self.running))} {why} and {verb} killed", Level.REMARK)
        self._signal(signal.SIGKILL, self.running)

    def _finish(self) -> None:
        self.phase = Phase.FINISHING
        # Ranks that are still here survived SIGKILL for too long and are given up.
        self.running.clear()
        patience_s = LEFT_BEHIND_S
        if self._killed_at is not None:
            patience_s = 0.0
        elif self.signalled is not None and self._kill_at is not None:  # a child may save what its rank did not
            patience_s = max(patience_s, self._kill_at - self._now)
        self._actions.append(FinishRanks(patience_s))

    def _request_stacks(self, wait_s: float, purpose: Purpose) -> None:
        """Request the stacks of all ranks, before another action changes them."""
        self._request = StackRequest(set(self.running), self._now + wait_s, purpose, last=self._now)
        if self.running:
            self._actions.append(DumpStacks(tuple(sorted(self.running))))

    def _reclaim(self, restore: bool = False) -> None:
        if self._borrower is not None:
            self._actions.append(ReclaimTerminal(self._borrower, restore))
        self._borrower = None

    def _suspend(self, number: int) -> None:
        """Stop the ranks and the launcher."""
        ranks = tuple(sorted(self.running))
        self._suspension = Suspension(number, ranks, self._borrower is not None)
        # Before the launcher stops: its shell expects the terminal with the launcher's group.
        self._reclaim()
        # SIGTSTP has no effect in an orphaned process group, as in a rank's own session
        self._signal(signal.SIGSTOP, ranks)
        self._actions.append(StopLauncher(number))

    def _signal(self, number: int, ranks: Iterable[int], alone: bool = False) -> None:
        if chosen := tuple(sorted(ranks)):
            self._actions.append(SignalRanks(number, chosen, alone))

    def _print(self, text: str, level: Level = Level.ESSENTIAL) -> None:
        self._actions.append(Print(text, level))

    def _publish(self) -> None:
        # An unchanged table is not written again.
        if self._slots is not None and self._slots.table.version != self._published:
            self._published = self._slots.table.version
            self._actions.append(PublishSlots(self._slots.table))
