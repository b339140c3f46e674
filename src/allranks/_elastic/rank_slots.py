"""Bookkeeping of an elastic round: which rank may be lost, which is restarted, and the table of rank slots. Pure.

``_elastic/slot_table`` is the part that ranks read. The rules:

- A lost rank is restarted if it has respawns left, and if another rank runs that has the state of the program, as far
  as is known. A rank that finds that no rank has the state reports it, and the round ends.
- A rank that is not restarted is gone for good. The others continue while at least ``ElasticRules.least`` ranks are
  left. A rank that has exited with code 0 counts as left: it has completed its part.
- The ranks of a lost host are started on a spare host, if there is one.
- A host that joins later receives the ranks of a lost host, else new rank numbers, else it is spare. Running ranks do
  not wait for ranks that join later: they admit them when they are ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from allranks._elastic.slot_table import GONE, OPTIONAL, RUNNING, STARTING, RankSlot, SlotTable

__all__ = ["ElasticRules", "Loss", "RankSlots", "first_table"]


@dataclass(frozen=True)
class ElasticRules:
    """Fixed parameters of the rank slots of a round.

    Attributes:
        least: the number of ranks that the job needs to continue.
        respawns: how often each rank may be restarted.
        spares: hosts that run no rank at first.
        most: the number of ranks above which no rank joins later; None: no limit.
    """

    least: int
    respawns: int = 0
    spares: tuple[str, ...] = ()
    most: int | None = None


def first_table(ranks: Iterable[int], least: int) -> SlotTable:
    """Return the table of a round that begins. It is in the store before ranks start."""
    return SlotTable(1, least, tuple(RankSlot(rank) for rank in sorted(ranks)))


class Loss(Protocol):
    """The part of the description of a loss that the slots need.

    Attributes:
        rank: the lost rank.
        lost: the reason why its whole host is lost; "" if it is not.
        at: time of the loss, in seconds.
    """

    @property
    def rank(self) -> int: ...
    @property
    def lost(self) -> str: ...
    @property
    def at(self) -> float: ...


_L = TypeVar("_L", bound=Loss)


class RankSlots(Generic[_L]):
    """The rank slots of a round.

    Args:
        rules: fixed parameters.
        ranks: the ranks that were started.

    Attributes:
        table: the current table.
        losses: the last loss of each rank that was lost.
        spares: spare hosts that have no ranks yet.
        vacant: lost hosts whose ranks no other host has taken, with those ranks.
    """

    def __init__(self, rules: ElasticRules, ranks: Sequence[int]) -> None:
        self._rules = rules
        self.table = first_table(ranks, rules.least)
        self.losses: dict[int, _L] = {}
        self.spares = list(rules.spares)
        self.vacant: dict[str, tuple[int, ...]] = {}
        self._gone: set[int] = set()  # lost, and not restarted
        # Separate from the start number, which also counts processes that were lost with their host.
        self._respawned = dict.fromkeys(ranks, 0)

    @property
    def respawns(self) -> int:
        """How often each rank may be restarted."""
        return self._rules.respawns

    @property
    def last_loss(self) -> _L | None:
        """The newest loss; None if no rank was lost."""
        return max(self.losses.values(), key=lambda failure: failure.at, default=None)

    @property
    def starting(self) -> list[int]:
        """The ranks that are being restarted."""
        return [slot.number for slot in self.table.slots if slot.state == STARTING]

    @property
    def left(self) -> int:
        """Number of ranks that are not gone for good."""
        return len(self.table.slots) - len(self._gone)

    def is_enough(self) -> bool:
        """Return whether enough ranks are left for the others to continue."""
        return self.left >= self._rules.least

    def start_of(self, rank: int) -> int:
        """Return the number of processes that had a rank's slot before the current or starting one."""
        return self._slot(rank).start

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank is gone: no further process of it will start."""
        return self._slot(rank).state == GONE

    def may_start(self, rank: int) -> bool:
        """Return whether a lost rank has respawns left."""
        return self._respawned[rank] < self._rules.respawns

    def respawned(self, rank: int) -> int:
        """Return how many of its respawns a rank has used. The loss of its host uses up none."""
        return self._respawned[rank]

    def lose(self, failure: _L, again: bool) -> None:
        """Record the loss of a rank. ``again``: it is being restarted."""
        slot = self._slot(failure.rank)
        self.losses[failure.rank] = failure
        if again:
            self._respawned[failure.rank] += not failure.lost
            # A rank that joined later stays optional: a host that keeps failing must not block the others.
            state = OPTIONAL if slot.state == OPTIONAL else STARTING
            # The table names the next start before it runs, so that the survivors wait for it.
            self._change(RankSlot(slot.number, slot.start + 1, state))
        else:
            self._gone.add(slot.number)
            self._change(RankSlot(slot.number, slot.start, GONE))

    def start(self, rank: int) -> bool:
        """Record that the next process of a rank runs. Return False if there is no slot for it."""
        slot = self._slot(rank)
        if slot.state == STARTING:
            self._change(RankSlot(rank, slot.start, RUNNING))
        # False: the slot is GONE because the others have finished, so the agent must kill the new process.
        return slot.state in (STARTING, OPTIONAL)

    def join(self, host: str, room: int) -> tuple[str, dict[int, int]]:
        """Add a host that can run some ranks.

        Returns:
            The lost host whose ranks it receives, "" for new ranks; the number of previous processes of each rank slot.
            If there are no ranks for the host, the mapping is empty, and the host becomes spare.
        """
        # A returning host takes its own ranks back, also with fewer slots. Another host must have room for all of them.
        whole = [name for name, ranks in self.vacant.items() if name == host or len(ranks) <= room]
        lost = host if host in whole else next(iter(whole), "")
        if lost:
            starts = {rank: self.start_of(rank) + 1 for rank in self.vacant.pop(lost)}
        else:
            number = len(self.table.slots)
            more = room if self._rules.most is None else min(room, self._rules.most - self.left)
            starts = dict.fromkeys(range(number, number + max(0, more)), 0)
        for rank, start in starts.items():
            # The slot counts for `least` again as soon as a host has taken it.
            self._gone.discard(rank)
            self._respawned.setdefault(rank, 0)
            self._change(RankSlot(rank, start, OPTIONAL))
        if not starts:
            self.spares.append(host)
        return lost, starts

    def end(self, rank: int) -> None:
        """Record that a rank has exited with code 0: no rank waits for it."""
        # GONE without an entry in _gone: a rank that has completed its work still counts for `least`.
        self._change(RankSlot(rank, self._slot(rank).start, GONE, done=True))

    def _slot(self, rank: int) -> RankSlot:
        slot = self.table.find(rank)
        assert slot is not None
        return slot

    def _change(self, slot: RankSlot) -> None:
        self.table = self.table.changed([slot])
