"""The pairs of ranks: the schedule of their measurements, and outliers. This module sends no messages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Pair", "Pairs", "kinds", "rounds", "outliers"]

_ONE_BY_ONE = 16  # up to this many ranks, pairs measure one at a time; with more, this would take minutes
_FACTOR = 4.0  # times the median: beyond this, a pair is an outlier


@dataclass(frozen=True)
class Pair:
    """The measurement of one pair of ranks. ``first`` is the lower rank."""

    first: int
    second: int
    latency_us: float
    bandwidth_gb_s: float


@dataclass(frozen=True)
class Pairs:
    """The measurements of all pairs.

    Attributes:
        found: Each pair.
        nbytes: Size of the messages that measured bandwidth.
        one_by_one: Whether the other ranks were idle during each measurement.
    """

    found: tuple[Pair, ...]
    nbytes: int
    one_by_one: bool

    def matrix(self, size: int, value: Callable[[Pair], float]) -> list[list[float | None]]:
        """Return one of the figures as a symmetric matrix, with None on the diagonal."""
        rows: list[list[float | None]] = [[None] * size for _ in range(size)]
        for pair in self.found:
            rows[pair.first][pair.second] = rows[pair.second][pair.first] = value(pair)
        return rows


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round: no rank twice in a round, and every pair once in all rounds.

    With few ranks, each round has one pair. With many, the rounds form a tournament: one rank stays, the others rotate.

    Source: the circle method, as chess tournaments are drawn (Schurig's tables, 1886).
    """
    if size <= _ONE_BY_ONE:
        return [[(i, j)] for i in range(size) for j in range(i + 1, size)]
    slots: list[int | None] = list(range(size))
    if size % 2:
        slots.append(None)  # a rank that is paired with None is idle
    drawn = []
    for _ in range(len(slots) - 1):
        half = len(slots) // 2
        met = [(a, b) for a, b in zip(slots[:half], reversed(slots[half:]), strict=True)]
        drawn.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return drawn


def kinds(pairs: Pairs, machines: Sequence[str]) -> dict[str, list[Pair]]:
    """Split the pairs into those within a host and those between hosts. Each kind is compared separately."""
    near = [pair for pair in pairs.found if machines[pair.first] == machines[pair.second]]
    far = [pair for pair in pairs.found if machines[pair.first] != machines[pair.second]]
    return {name: some for name, some in (("in a host", near), ("between hosts", far)) if some}


def outliers(some: Sequence[Pair], badness: Callable[[Pair], float]) -> list[Pair]:
    """Return the pairs that are more than `_FACTOR` times as bad as the median, worst first."""
    usual = statistics.median(badness(pair) for pair in some)
    return sorted((pair for pair in some if badness(pair) > _FACTOR * usual), key=badness, reverse=True)
