"""Result of a rendezvous: rank, world size, a shared store, and an exchange of records."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import Finder
from allranks._rendezvous.join_protocol import TABLE, Member, exchange, unpack_members
from allranks._store import Store

__all__ = ["JobMeeting"]

_LINGER_S = 3.0  # seconds for which a leaving rank 0 keeps the store open for ranks that have not left yet


@dataclass
class JobMeeting:
    """A completed rendezvous of all ranks of a job.

    Attributes:
        rank: The rank of this process.
        world_size: The number of ranks.
        store: The shared store. Its keys belong to this rendezvous only.
        me: This process.
        finder: The rendezvous method, which holds the connection to the store.
        prefix: Prefix of the keys of this rendezvous.
        environ: The environment in which the process joined.
    """

    rank: int
    world_size: int
    store: Store
    me: Member = field(repr=False)
    finder: Finder = field(repr=False)
    prefix: str = field(repr=False)
    _timeout_s: float = field(repr=False)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    _local: tuple[int | None, int | None] = field(default=(None, None), repr=False)
    _times: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _members: tuple[Member, ...] = field(default=(), repr=False)

    @property
    def members(self) -> tuple[Member, ...]:
        """All ranks, in order. The first access sends one request to the store."""
        if not self._members:  # not cached_property: before Python 3.12 it has one lock for all instances
            alone = self.world_size == 1
            self._members = (self.me,) if alone else unpack_members(self.store.get(TABLE, self._timeout_s))
        return self._members

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its host: as set by the launcher, else in order of the ranks."""
        return self._near.index(self.rank) if self._local[0] is None else self._local[0]

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return len(self._near) if self._local[1] is None else self._local[1]

    @property
    def _near(self) -> list[int]:
        return [m.rank for m in self.members if m.machine == self.me.machine]

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Give every rank the records of all ranks, by rank. All ranks call it.

        Raises:
            TimeoutError: Ranks did not arrive in time. The message names them.
        """
        # Keys are never reused. All ranks call `exchange` in the same order, so their counters agree.
        prefix = f"exchange/{next(self._times)}/"
        steps = exchange(prefix, self.rank, self.world_size, record, timeout_s)
        return drive(steps, self.store._execute)  # type: ignore[arg-type]

    def close(self) -> None:
        """Leave. If rank 0 serves the store, it first waits up to 3 s for the others to leave. Idempotent."""
        if self.world_size > 1:  # a process that is alone has closed it already
            self.finder.close(_LINGER_S)
