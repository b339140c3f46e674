"""What ranks have when they have met: their numbers, a shared store, and an exchange of records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from allranks._rendezvous.board import Board
from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import Finder
from allranks._rendezvous.join_protocol import TABLE, Member, exchange, unpack_members
from allranks._store import Store

__all__ = ["JobMeeting"]

_LINGER_S = 3.0  # how long rank 0, when it leaves, keeps the store for those who have not left yet


@dataclass
class JobMeeting:
    """All ranks of a job have met.

    Attributes:
        rank: this process.
        world_size: how many there are.
        store: what they share; its keys are this meeting's own.
        board: where they decide who goes on after a loss; None where no store outlives the meeting.
    """

    rank: int
    world_size: int
    store: Store
    _me: Member = field(repr=False)
    _timeout_s: float = field(repr=False)
    _local: tuple[int | None, int | None] = field(default=(None, None), repr=False)
    board: Board | None = field(default=None, repr=False)
    _finder: Finder | None = field(default=None, repr=False)
    _times: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _members: tuple[Member, ...] = field(default=(), repr=False)

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, by rank. Asks the store, once."""
        if not self._members:  # not cached_property, which has one lock for all meetings, before Python 3.12
            alone = self.world_size == 1
            self._members = (self._me,) if alone else unpack_members(self.store.get(TABLE, self._timeout_s))
        return self._members

    @property
    def local_rank(self) -> int:
        """This process among those of its host: as the launcher has set it, else by rank."""
        return self._near.index(self.rank) if self._local[0] is None else self._local[0]

    @property
    def local_world_size(self) -> int:
        """How many share its host."""
        return len(self._near) if self._local[1] is None else self._local[1]

    @property
    def _near(self) -> list[int]:
        return [m.rank for m in self.members if m.machine == self._me.machine]

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's record, by rank. Called by all of them.

        Raises:
            TimeoutError: some did not come in time; names them.
        """
        prefix = f"exchange/{next(self._times)}/"
        steps = exchange(prefix, self.rank, self.world_size, record, timeout_s)
        return drive(steps, self.store._ask)  # type: ignore[arg-type]

    def close(self) -> None:
        """Leaves. Rank 0, where it serves the store, first waits a little for the others to leave. Idempotent."""
        if self._finder is not None:
            self._finder.close(_LINGER_S)
