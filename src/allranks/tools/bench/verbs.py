"""What is measured: the verbs, the buffers each needs, and the right answer, of which every element is compared.

Sizes are nccl-tests' (its PERFORMANCE.md and common.cu): *count* is the elements of one rank's piece, *bytes* the
larger of what a rank gives and what a rank gets (for ``gather`` and ``scatter``: of the root). So an ``all_gather`` of
1 MB leaves 1 MB on each rank and takes 1/P MB from each. ``algbw = bytes / time`` is what the program sees,
``busbw = algbw * link`` what the busiest link must carry; ``link`` is the table's last column, for P ranks.

===============  ==================  ===================  =============
verb             a rank gives        a rank gets          link
===============  ==================  ===================  =============
all_reduce       count               count (in place)     2 (P - 1) / P
reduce           count               root: count          1
broadcast        root: count         count                1
all_gather       count               P count              (P - 1) / P
gather           count               root: P count        (P - 1) / P
scatter          root: P count       count                (P - 1) / P
reduce_scatter   P count             count                (P - 1) / P
all_to_all       P count             P count              (P - 1) / P
send             count, rank 0 to 1  count, and back      1
barrier          nothing             nothing              no bytes
===============  ==================  ===================  =============

``send``'s time is half of a round trip between ranks 0 and 1. Roots are rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["ROOT", "VERBS", "Data", "Verb", "expected", "left_early"]

ROOT = 0
_STAGGER_S = 0.005


@dataclass(frozen=True)
class Verb:
    """One row of the table above.

    Attributes:
        name: as in the public API.
        gives: pieces that a rank's input has: 1, or 0 for one per rank.
        gets: the same of its output.
        in_place: input and output are one tensor.
        reduces: it computes, and so takes a reduce op.
        link: busbw / algbw for P ranks.
        halves: timed calls are round trips.
    """

    name: str
    gives: int
    gets: int
    in_place: bool
    reduces: bool
    link: Callable[[int], float]
    halves: bool = False

    def pieces(self, ranks: int) -> tuple[int, int]:
        """Pieces of input and of output."""
        return self.gives or ranks, self.gets or ranks

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Elements of a piece for about ``nbytes`` bytes: rounded down, but at least one."""
        return 0 if self.name == "barrier" else max(1, nbytes // (itemsize * max(self.pieces(ranks))))


def _half(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", 1, 1, True, True, lambda ranks: 2 * (ranks - 1) / ranks),
        Verb("reduce", 1, 1, True, True, _one),
        Verb("broadcast", 1, 1, True, False, _one),
        Verb("all_gather", 1, 0, False, False, _half),
        Verb("gather", 1, 0, False, False, _half),
        Verb("scatter", 0, 1, False, False, _half),
        Verb("reduce_scatter", 0, 1, False, True, _half),
        Verb("all_to_all", 0, 0, False, False, _half),
        Verb("send", 1, 1, False, False, _one, halves=True),
        Verb("barrier", 1, 1, True, False, _one),
    )
}


class Data:
    """What the ranks put in: small integers, exact in every dtype and order of summation, that any rank can recompute.

    Rank r's elements are a sequence of its own with a period of 1021, a prime: a piece that lands in a wrong place,
    or from a wrong rank, shows.
    """

    _PERIOD = 1021

    def __init__(self, ranks: int, dtype: torch.dtype, reduces: bool) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        top = 3 if reduces else 100
        self._dtype = dtype
        self._periods = torch.randint(top, (ranks, self._PERIOD), generator=generator)

    def of(self, rank: int, count: int, start: int = 0) -> torch.Tensor:
        """Elements start .. start + count of what a rank puts in."""
        return self._tile(self._periods[rank].to(self._dtype), count, start)

    def reduced(self, op: str, count: int, start: int = 0) -> torch.Tensor:
        """The same elements, reduced over all ranks."""
        import torch

        whole = self._periods if not self._dtype.is_floating_point else self._periods.to(torch.float64)
        result = {
            "SUM": lambda: whole.sum(0),
            "AVG": lambda: whole.mean(0) if whole.is_floating_point() else whole.sum(0) // len(whole),
            "PRODUCT": lambda: whole.prod(0),
            "MIN": lambda: whole.amin(0),
            "MAX": lambda: whole.amax(0),
        }[op]()
        return self._tile(result.to(self._dtype), count, start)

    def _tile(self, period: torch.Tensor, count: int, start: int) -> torch.Tensor:
        first = start % self._PERIOD
        return period.repeat((first + count) // self._PERIOD + 1)[first : first + count]


def expected(verb: str, data: Data, op: str, rank: int, ranks: int, count: int) -> torch.Tensor | None:
    """What ``rank``'s output must hold after the call; None if the verb promises nothing there."""
    import torch

    if verb == "all_reduce":
        return data.reduced(op, count)
    if verb == "reduce":
        return data.reduced(op, count) if rank == ROOT else None
    if verb == "broadcast":
        return data.of(ROOT, count)
    if verb == "all_gather" or (verb == "gather" and rank == ROOT):
        return torch.cat([data.of(r, count) for r in range(ranks)])
    if verb == "scatter":
        return data.of(ROOT, count, rank * count)
    if verb == "reduce_scatter":
        return data.reduced(op, count, rank * count)
    if verb == "all_to_all":
        return torch.cat([data.of(r, count, rank * count) for r in range(ranks)])
    if verb == "send" and rank < 2:
        return data.of(1 - rank, count)
    return None


def left_early(call: Callable[[], object], rank: int, latest: Callable[[float], float]) -> int:
    """1 if a barrier let this rank go before the last one came. Rank 0 comes late; the host's ranks share a clock."""
    if rank == ROOT:
        time.sleep(_STAGGER_S)
    came = time.clock_gettime(time.CLOCK_MONOTONIC)
    call()
    left = time.clock_gettime(time.CLOCK_MONOTONIC)
    return int(left < latest(came))
