"""What all ranks of a job do at one moment: asks their agents, and then some ranks for their stacks. Pure.

The launcher asks for a notice, and for other commands of the same user (``allranks trace show``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum

from allranks._trace.state import RankState
from allranks.launch.policy.interface import Action, DumpStacks, InspectRanks
from allranks.launch.policy.stack_request import Purpose, StackRequest
from allranks.launch.spec.events import Stacks

__all__ = ["Inquiry"]

_ALIVE = ("running", "sleeping", "in uninterruptible sleep")  # these can report their stacks
INSPECT_S = 0.5  # for the agents to answer
STACKS_S = 0.4


class _Phase(Enum):
    INSPECTING = "what ranks do"
    DUMPING = "stacks of some"
    DONE = "nothing"


class Inquiry:
    """One inquiry.

    Args:
        ranks: of the job.
        recent: how many of the newest calls of each rank are wanted.
        choose: given what ranks do, whose stacks are wanted.
        now: the time.

    Attributes:
        states: what ranks do, as far as it has come.
        stacks: the stacks that have come.
        reasons: why ranks have reported none.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        recent: int,
        choose: Callable[[Mapping[int, RankState]], Iterable[int]],
        now: float,
    ) -> None:
        self.states: dict[int, RankState] = {}
        self._ranks = tuple(ranks)
        self._recent = recent
        self._choose = choose
        self._awaited = set(ranks)
        self._until = now + INSPECT_S
        self._phase = _Phase.INSPECTING
        self._request: StackRequest | None = None

    @property
    def done(self) -> bool:
        """Whether all has come that will."""
        return self._phase is _Phase.DONE

    @property
    def stacks(self) -> dict[int, bytes]:
        """See the class."""
        return self._request.texts if self._request is not None else {}

    @property
    def reasons(self) -> dict[int, str]:
        """See the class."""
        return self._request.reasons if self._request is not None else {}

    def begin(self) -> list[Action]:
        """The first question."""
        return [InspectRanks(self._ranks, self._recent)]

    def deadline(self) -> float | None:
        """When ``check`` is due even if nothing happens; None for never."""
        if self._phase is _Phase.DUMPING and self._request is not None:
            return self._request.ends_at()
        return self._until if self._phase is _Phase.INSPECTING else None

    def take_state(self, state: RankState) -> None:
        """What a rank does."""
        if self._phase is _Phase.INSPECTING and state.rank in self._awaited:
            self.states[state.rank] = state
            self._awaited.discard(state.rank)

    def take_stacks(self, event: Stacks, now: float) -> None:
        """A piece of a rank's stacks."""
        if self._request is not None:
            self._request.add(event, now)

    def check(self, running: Set[int], now: float) -> list[Action]:
        """Goes on, if all answers have come or it is time. ``running``: ranks whose process is not gone."""
        if self._phase is _Phase.INSPECTING and (not self._awaited or now >= self._until):
            wanted = set(self._choose(self.states)) & set(self.states) & running
            asked = tuple(sorted(rank for rank in wanted if self.states[rank].process in _ALIVE))
            if not asked:
                self._phase = _Phase.DONE
                return []
            self._phase = _Phase.DUMPING
            self._request = StackRequest(set(asked), now + STACKS_S, Purpose.NOTHING, last=now)
            return [DumpStacks(asked)]
        if self._phase is _Phase.DUMPING and self._request is not None and now >= self._request.ends_at():
            self._phase = _Phase.DONE
        return []
