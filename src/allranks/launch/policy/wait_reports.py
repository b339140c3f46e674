"""Decides when the launcher prints a wait report without a request. Pure.

If a rank has been in one call for a long time (``LongWait``), the launcher requests the state of all ranks. If some
ranks delay others, it requests their stacks and prints one wait report. The same report is not printed twice, unless
the wait has exceeded a later limit. No report is printed if the only late rank waits for its own user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from allranks._trace.diagnosis import Diagnosis, diagnose
from allranks._trace.state import RankState
from allranks.launch.policy.inquiry import Inquiry
from allranks.launch.policy.interface import Action, PrintWaitReport
from allranks.launch.spec.events import LongWait, Stacks

__all__ = ["WaitReports"]


class WaitReports:
    """The wait reports of one round."""

    def __init__(self) -> None:
        self._inquiry: Inquiry | None = None
        self._limit = 0.0
        self._reader: int | None = None
        self._covered: dict[tuple[int, int], float] = {}  # rank and call -> the limit that a wait report covered
        self._reported: dict[tuple[object, ...], float] = {}
        self._diagnosis: Diagnosis | None = None

    def deadline(self) -> float | None:
        """Return the time when ``check`` is due even without an event; None for never."""
        return self._inquiry.deadline() if self._inquiry is not None else None

    def forget(self) -> None:
        """Cancel the request: the round is being stopped."""
        self._inquiry = None

    def take_wait(self, event: LongWait, ranks: Sequence[int], now: float) -> list[Action]:
        """Process a long wait of a rank. ``ranks``: all ranks of the job, including those that have exited."""
        if self._inquiry is not None or self._covered.get((event.rank, event.index), 0.0) >= event.seconds:
            return []
        self._limit, self._diagnosis = event.seconds, None
        self._covered[event.rank, event.index] = event.seconds
        self._inquiry = Inquiry(ranks, 0, self._choose_late_ranks, now)
        return self._inquiry.begin()

    def take_state(self, state: RankState) -> None:
        """Record the state of a rank."""
        if self._inquiry is not None:
            self._inquiry.take_state(state)

    def take_stacks(self, event: Stacks, now: float) -> None:
        """Record a piece of a rank's stacks."""
        if self._inquiry is not None:
            self._inquiry.take_stacks(event, now)

    def check(self, running: Set[int], reader: int | None, now: float) -> list[Action]:
        """Advance if all replies have arrived or a deadline has passed.

        Args:
            running: ranks whose process has not exited, as far as is known.
            reader: the rank that receives the keys of the terminal; None if no rank does.
            now: the time.
        """
        inquiry, self._reader = self._inquiry, reader
        if inquiry is None:
            return []
        actions = inquiry.check(running, now)
        if inquiry.done:
            self._inquiry = None
            if self._diagnosis is not None:
                actions.append(PrintWaitReport(self._diagnosis, dict(inquiry.stacks)))
        return actions

    def _choose_late_ranks(self, states: Mapping[int, RankState]) -> Sequence[int]:
        """Decide whether a report is needed. Return the ranks whose stacks are requested."""
        found = diagnose(states.values())
        # One report covers all waiting ranks: their own LongWait events start no further inquiry.
        for rank, wait in found.waits.items():
            self._covered[rank, wait.call.index] = self._limit
        # A rank that waits for its own user is not late.
        late = tuple(r for r in found.late if not (r == self._reader or (r in states and states[r].reads_stdin)))
        found = replace(found, late=late)
        key = found.key()
        if (late or found.circles) and self._reported.get(key, 0.0) < self._limit:
            self._reported[key] = self._limit
            self._diagnosis = found
            return late
        return ()
