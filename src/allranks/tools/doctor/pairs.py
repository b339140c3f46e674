"""Every pair of ranks: who measures with whom and when, and which pairs stand out. Nothing here sends anything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Pair", "Pairs", "kinds", "rounds", "standing_out"]

_ONE_BY_ONE = 16  # up to so many ranks no pair disturbs another; beyond, it would take minutes
_FACTOR = 4.0


@dataclass(frozen=True)
class Pair:
    """What one pair of ranks has measured, the first being the lower."""

    first: int
    second: int
    latency_us: float
    bandwidth_gb_s: float


@dataclass(frozen=True)
class Pairs:
    """All of them.

    Attributes:
        found: each pair.
        nbytes: size of the messages that measured bandwidth.
        one_by_one: whether the others were idle meanwhile.
    """

    found: tuple[Pair, ...]
    nbytes: int
    one_by_one: bool

    def matrix(self, size: int, value: Callable[[Pair], float]) -> list[list[float | None]]:
        """One of the figures as a symmetric matrix, with None on the diagonal."""
        rows: list[list[float | None]] = [[None] * size for _ in range(size)]
        for pair in self.found:
            rows[pair.first][pair.second] = rows[pair.second][pair.first] = value(pair)
        return rows


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Who measures together: in each round no rank twice, in all of them every pair once.

    Few ranks go pair by pair. Many play a tournament: one stays, the others go round it.

    Source: the circle method, as chess tournaments are drawn (Schurig's tables, 1886).
    """
    if size <= _ONE_BY_ONE:
        return [[(i, j)] for i in range(size) for j in range(i + 1, size)]
    seats: list[int | None] = list(range(size))
    if size % 2:
        seats.append(None)  # who meets it, rests
    drawn = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = [(a, b) for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)]
        drawn.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return drawn


def kinds(pairs: Pairs, machines: Sequence[str]) -> dict[str, list[Pair]]:
    """The pairs within a host, and those between hosts: each are compared among themselves."""
    near = [pair for pair in pairs.found if machines[pair.first] == machines[pair.second]]
    far = [pair for pair in pairs.found if machines[pair.first] != machines[pair.second]]
    return {name: some for name, some in (("in a host", near), ("between hosts", far)) if some}


def standing_out(some: Sequence[Pair], badness: Callable[[Pair], float]) -> list[Pair]:
    """Those that are several times as bad as the median, worst first."""
    usual = statistics.median(badness(pair) for pair in some)
    return sorted((pair for pair in some if badness(pair) > _FACTOR * usual), key=badness, reverse=True)
