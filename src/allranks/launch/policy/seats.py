"""The bookkeeping of an elastic round: which rank may be lost, which is started again, and what the table says. Pure.

``_rendezvous/seats`` is what ranks read of it. The rules:

- A lost rank is started again as long as it has respawns left, and another rank runs that has the state of the program,
  as far as is known: a rank that finds that there is none reports it, and the round ends.
- A rank that is not started again is gone for good. The others go on while at least ``Elastic.least`` ranks are left.
  A rank that has ended with code 0 counts as left: it has done its part.
- The ranks of a lost host are started on a spare host, as long as there is one.
- A host that comes later gets the ranks of a lost one, else new numbers, else it is spare. The others do not wait for
  ranks that come later: they take them when they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks._rendezvous.seats import GONE, OPTIONAL, RUNNING, STARTING, Seat, SeatTable
from allranks.launch.policy.root_cause import Failure

__all__ = ["Elastic", "Seats", "first_table"]


@dataclass(frozen=True)
class Elastic:
    """What is fixed for the seats of a round.

    Attributes:
        least: the number of ranks without which the job does not go on.
        respawns: how often each rank may be started again.
        spares: hosts that run no rank at first.
        most: the number of ranks beyond which none come later; None: there is no limit.
    """

    least: int
    respawns: int = 0
    spares: tuple[str, ...] = ()
    most: int | None = None


def first_table(ranks: Iterable[int], least: int) -> SeatTable:
    """The table of a round that begins. It is in the store before ranks start."""
    return SeatTable(1, least, tuple(Seat(rank) for rank in sorted(ranks)))


class Seats:
    """The seats of a round.

    Args:
        rules: what is fixed.
        ranks: those that were started.

    Attributes:
        table: as it is now.
        losses: the last loss of each rank that was lost.
        spares: spare hosts that have no ranks yet.
        vacant: lost hosts whose ranks nobody has taken, and those ranks.
    """

    def __init__(self, rules: Elastic, ranks: Sequence[int]) -> None:
        self._rules = rules
        self.table = first_table(ranks, rules.least)
        self.losses: dict[int, Failure] = {}
        self.spares = list(rules.spares)
        self.vacant: dict[str, tuple[int, ...]] = {}
        self._gone: set[int] = set()  # lost, and not started again
        self._respawned = dict.fromkeys(ranks, 0)

    @property
    def respawns(self) -> int:
        """How often each rank may be started again."""
        return self._rules.respawns

    @property
    def last_loss(self) -> Failure | None:
        """The newest loss; None if no rank was lost."""
        return max(self.losses.values(), key=lambda failure: failure.at, default=None)

    @property
    def starting(self) -> list[int]:
        """The ranks that are being started again."""
        return [seat.number for seat in self.table.seats if seat.state == STARTING]

    @property
    def left(self) -> int:
        """How many ranks are not gone for good."""
        return len(self.table.seats) - len(self._gone)

    def is_enough(self) -> bool:
        """Whether the others go on."""
        return self.left >= self._rules.least

    def start_of(self, rank: int) -> int:
        """How many processes had this rank's seat before the present one, or before the one that is being started."""
        return self._seat(rank).start

    def is_gone(self, rank: int) -> bool:
        """Whether nobody will come."""
        return self._seat(rank).state == GONE

    def may_start(self, rank: int) -> bool:
        """Whether a lost rank has respawns left."""
        return self._respawned[rank] < self._rules.respawns

    def respawned(self, rank: int) -> int:
        """How many of its respawns a rank has used. That its host was lost costs none."""
        return self._respawned[rank]

    def lose(self, failure: Failure, again: bool) -> None:
        """A rank is lost. ``again``: it is being started again."""
        seat = self._seat(failure.rank)
        self.losses[failure.rank] = failure
        if again:
            self._respawned[failure.rank] += not failure.lost
            state = OPTIONAL if seat.state == OPTIONAL else STARTING
            self._change(Seat(seat.number, seat.start + 1, state))
        else:
            self._gone.add(seat.number)
            self._change(Seat(seat.number, seat.start, GONE))

    def start(self, rank: int) -> bool:
        """The next process of a rank runs. False if there is no seat for it."""
        seat = self._seat(rank)
        if seat.state == STARTING:
            self._change(Seat(rank, seat.start, RUNNING))
        return seat.state in (STARTING, OPTIONAL)

    def join(self, host: str, room: int) -> tuple[str, dict[int, int]]:
        """A host comes that can run some ranks.

        Returns:
            The lost host whose ranks it gets, "" for new ones; how many processes had the seat of each before. No ranks
            if there are none for it: it is spare then.
        """
        whole = [name for name, ranks in self.vacant.items() if name == host or len(ranks) <= room]
        lost = host if host in whole else next(iter(whole), "")
        if lost:
            starts = {rank: self.start_of(rank) + 1 for rank in self.vacant.pop(lost)}
        else:
            number = len(self.table.seats)
            more = room if self._rules.most is None else min(room, self._rules.most - self.left)
            starts = dict.fromkeys(range(number, number + max(0, more)), 0)
        for rank, start in starts.items():
            self._gone.discard(rank)
            self._respawned.setdefault(rank, 0)
            self._change(Seat(rank, start, OPTIONAL))
        if not starts:
            self.spares.append(host)
        return lost, starts

    def end(self, rank: int) -> None:
        """A rank has ended with code 0: nobody waits for it."""
        self._change(Seat(rank, self._seat(rank).start, GONE, done=True))

    def _seat(self, rank: int) -> Seat:
        seat = self.table.find(rank)
        assert seat is not None
        return seat

    def _change(self, seat: Seat) -> None:
        self.table = self.table.changed([seat])
