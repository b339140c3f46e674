"""Request for the states of all ranks of a job at one moment, and then for the stacks of some ranks. Pure.

The launcher uses it for a wait report, and for other commands of the same user (``allranks trace show``).
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
INSPECT_S = 0.5  # seconds for the replies of the agents
STACKS_S = 0.4  # seconds for the stacks


class _Phase(Enum):
    INSPECTING = "states of the ranks"
    DUMPING = "stacks of selected ranks"
    DONE = "nothing"


class Inquiry:
    """One request.

    Args:
        ranks: ranks of the job.
        recent: number of the newest calls of each rank to report.
        choose: receives the states of the ranks, and returns the ranks whose stacks are requested.
        now: the time.

    Attributes:
        states: the states that have arrived.
        stacks: the stacks that have arrived.
        reasons: by rank, the reason why it reported no stacks.
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
        """Whether the request is finished: all replies have arrived or it is too late for them."""
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
        """Return the first request."""
        return [InspectRanks(self._ranks, self._recent)]

    def deadline(self) -> float | None:
        """Return the time when ``check`` is due even without an event; None for never."""
        if self._phase is _Phase.DUMPING and self._request is not None:
            return self._request.ends_at()
        return self._until if self._phase is _Phase.INSPECTING else None

    def take_state(self, state: RankState) -> None:
        """Record the state of a rank."""
        if self._phase is _Phase.INSPECTING and state.rank in self._awaited:
            self.states[state.rank] = state
            self._awaited.discard(state.rank)

    def take_stacks(self, event: Stacks, now: float) -> None:
        """Record a piece of a rank's stacks."""
        if self._request is not None:
            self._request.add(event, now)

    def check(self, running: Set[int], now: float) -> list[Action]:
        """Advance if all replies have arrived or a deadline has passed. ``running``: ranks that have not exited."""
        if self._phase is _Phase.INSPECTING and (not self._awaited or now >= self._until):
            # A rank may have exited since its state was read.
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
