"""Which processes form whole replicas of a model that several ranks have together. Pure.

A process keeps the place in a replica with which its program has built the model: its shards stay what they are. So a
replica is one process of each place. Those that are left over when a rank of their replica is lost are no members: they
wait, as newcomers do, until a process comes that has the missing place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["Comer", "chosen", "complete"]


class Comer(Protocol):
    """A process that wants to be in the next generation: a `succession.Claim`."""

    @property
    def seat(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def replica(self) -> int: ...


_Comer = TypeVar("_Comer", bound=Comer)


def chosen(claims: Sequence[_Comer]) -> list[_Comer]:
    """The members of the next generation, by rank.

    Ranks that follow each other are a replica. Seats of one replica stay together where all of them are there, as they
    are on one host. Each place is given to some process that has the state.

    Args:
        claims: of those that have come, by seat.

    Returns:
        All of them where each has the whole model, or where nobody has the state; also where there is no whole replica,
        which is for the program to tell.
    """
    size = max((claim.replica for claim in claims), default=1)
    full = [claim for claim in claims if claim.progress >= 0]
    if size == 1 or not full:
        return list(claims)
    rows = _replicas([claims], size)
    if {_place(claim, size) for row in rows for claim in row if claim.progress >= 0} != set(range(size)):
        rows = _replicas([full, claims], size)
    return [claim for row in sorted(rows, key=_seats) for claim in row] or list(claims)


def complete(claims: Sequence[Comer], size: int) -> bool:
    """Whether these processes, which wait, have a replica among them."""
    return {_place(claim, size) for claim in claims} == set(range(size))


def _replicas(pools: Sequence[Sequence[_Comer]], size: int) -> list[list[_Comer]]:
    """As many as possible of the first pool, then of what is left and the next."""
    rows: list[list[_Comer]] = []
    for pool in pools:
        rest = [claim for claim in pool if not any(claim in row for row in rows)]
        homes: dict[int, list[_Comer]] = defaultdict(list)
        for claim in rest:
            homes[claim.seat // size].append(claim)
        found = [home for home in homes.values() if len(home) == size and complete(home, size)]
        rows += [sorted(home, key=lambda claim: _place(claim, size)) for home in found]
        left: list[list[_Comer]] = [[] for _ in range(size)]
        for claim in sorted(rest, key=lambda claim: claim.progress < 0):
            if not any(claim in home for home in found):
                left[_place(claim, size)].append(claim)
        rows += [list(row) for row in zip(*left, strict=False)]
    return rows


def _place(claim: Comer, size: int) -> int:
    return claim.place % size


def _seats(row: Sequence[Comer]) -> list[int]:
    return [claim.seat for claim in row]
