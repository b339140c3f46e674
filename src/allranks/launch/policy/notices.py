"""When the launcher tells, without being asked, why ranks wait. Pure.

A rank that has been in one call for long (``LongWait``) makes the launcher ask what all ranks do. If that shows ranks
that others wait for, their stacks are asked for, and one line is printed. The same is not printed twice, unless the
wait has passed a later limit. Nothing is printed where all that is waited for is a rank that waits for its own user.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from enum import Enum

from allranks._trace.diagnosis import Diagnosis, diagnose
from allranks._trace.state import RankState
from allranks.launch.policy.interface import Action, DumpStacks, InspectRanks, PrintNotice
from allranks.launch.policy.stack_request import Purpose, StackRequest
from allranks.launch.spec.events import LongWait, Stacks

__all__ = ["Notices"]

_ALIVE = ("running", "sleeping", "in uninterruptible sleep")  # these may tell their stacks
INSPECT_S = 1.0  # for the agents to answer
STACKS_S = 0.7


class _Phase(Enum):
    IDLE = "nothing is asked"
    INSPECTING = "what ranks do"
    DUMPING = "stacks of the late ranks"


class Notices:
    """The notices of one round."""

    def __init__(self) -> None:
        self._phase = _Phase.IDLE
        self._until = 0.0
        self._awaited: set[int] = set()
        self._states: dict[int, RankState] = {}
        self._limit = 0.0
        self._covered: dict[tuple[int, int], float] = {}  # rank and call -> the limit that a notice was about
        self._told: dict[tuple[object, ...], float] = {}
        self._diagnosis: Diagnosis | None = None
        self._stacks: StackRequest | None = None

    def deadline(self) -> float | None:
        """When ``check`` is due even if nothing happens; None for never."""
        if self._phase is _Phase.DUMPING and self._stacks is not None:
            return self._stacks.ends_at()
        return self._until if self._phase is _Phase.INSPECTING else None

    def forget(self) -> None:
        """Breaks off: the round is being stopped."""
        self._phase = _Phase.IDLE

    def take_wait(self, event: LongWait, ranks: Sequence[int], now: float) -> list[Action]:
        """A rank waits for long. ``ranks``: all of the job, those that have ended too."""
        if self._phase is not _Phase.IDLE or self._covered.get((event.rank, event.index), 0.0) >= event.seconds:
            return []
        self._phase, self._until, self._limit = _Phase.INSPECTING, now + INSPECT_S, event.seconds
        self._awaited, self._states = set(ranks), {}
        self._covered[event.rank, event.index] = event.seconds
        return [InspectRanks(tuple(ranks))]

    def take_state(self, state: RankState) -> None:
        """What a rank does."""
        if self._phase is _Phase.INSPECTING:
            self._states[state.rank] = state
            self._awaited.discard(state.rank)

    def take_stacks(self, event: Stacks, now: float) -> None:
        """A piece of a rank's stacks."""
        if self._stacks is not None:
            self._stacks.add(event, now)

    def check(self, running: Set[int], reader: int | None, now: float) -> list[Action]:
        """Goes on, if all answers have come or it is time.

        Args:
            running: ranks whose process is not gone, as far as is known.
            reader: the rank that has the keys of the terminal; None if none has.
            now: the time.
        """
        if self._phase is _Phase.INSPECTING and (not self._awaited or now >= self._until):
            return self._judge(running, reader, now)
        if self._phase is _Phase.DUMPING and self._stacks is not None and now >= self._stacks.ends_at():
            return self._tell()
        return []

    def _judge(self, running: Set[int], reader: int | None, now: float) -> list[Action]:
        self._phase = _Phase.IDLE
        found = diagnose(self._states.values())
        for rank, wait in found.waits.items():
            self._covered[rank, wait.call.index] = self._limit
        # A rank that waits for its own user is not late.
        late = tuple(r for r in found.late if not (r == reader or (r in self._states and self._states[r].reads_stdin)))
        if found.late and not late and not found.circles:
            return []
        found = replace(found, late=late)
        key = found.key()
        if (not late and not found.circles) or self._told.get(key, 0.0) >= self._limit:
            return []
        self._told[key] = self._limit
        self._diagnosis = found
        asked = tuple(r for r in late if r in running and r in self._states and self._states[r].process in _ALIVE)
        if not asked:
            return self._tell()
        self._phase = _Phase.DUMPING
        self._stacks = StackRequest(set(asked), now + STACKS_S, Purpose.NOTHING, last=now)
        return [DumpStacks(asked)]

    def _tell(self) -> list[Action]:
        assert self._diagnosis is not None
        stacks = self._stacks.texts if self._stacks is not None else {}
        notice = PrintNotice(self._diagnosis, dict(stacks))
        self._phase, self._diagnosis, self._stacks = _Phase.IDLE, None, None
        return [notice]
