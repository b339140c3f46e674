"""The measured verbs: the buffers of each, and the expected result, of which every element is compared.

Sizes are those of nccl-tests (its PERFORMANCE.md and common.cu). *count* is the number of elements of one rank's chunk.
*bytes* is the larger of a rank's input and output (for ``gather`` and ``scatter``: of the root). An ``all_gather`` of 1
MB therefore leaves 1 MB on each rank and takes 1/P MB from each. ``algbw = bytes / time`` is the bandwidth that the
program observes. ``busbw = algbw * link`` is the bandwidth that the busiest link must carry. ``link`` is the last
column of the table, for P ranks.

===============  ==================  ===================  =============
verb             input of a rank     output of a rank     link
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

The time of ``send`` is half of a round trip between ranks 0 and 1. The root is rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks._base import verbs
from allranks._base.verbs import Verb

if TYPE_CHECKING:
    import torch

__all__ = ["ROOT", "VERBS", "BenchVerb", "Data", "expected", "left_early"]

ROOT = 0
_STAGGER_S = 0.005  # delay of rank 0 in `left_early`


@dataclass(frozen=True)
class BenchVerb:
    """One row of the table above.

    Attributes:
        facts: Its entry in the table of collectives. For ``send``: of a message there and back.
        link: busbw / algbw for P ranks.
        halves: Timed calls are round trips.
    """

    facts: Verb
    link: Callable[[int], float]
    halves: bool = False

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def in_place(self) -> bool:
        return self.facts.in_place or self.facts.given < 0

    @property
    def reduces(self) -> bool:
        return self.facts.reduces

    def pieces(self, ranks: int) -> tuple[int, int]:
        """Return the numbers of chunks of input and of output."""
        return abs(self.facts.given) or ranks, abs(self.facts.results) or ranks

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a chunk for about ``nbytes`` bytes: rounded down, but at least one."""
        return 0 if self.name == "barrier" else max(1, nbytes // (itemsize * max(self.pieces(ranks))))


def _link(verb: Verb) -> Callable[[int], float]:
    if verb.name == "all_reduce":
        return lambda ranks: 2 * (ranks - 1) / ranks
    return (lambda ranks: (ranks - 1) / ranks) if 0 in (verb.given, verb.results) else (lambda ranks: 1.0)


VERBS = {
    name: BenchVerb(verbs.VERBS[name], _link(verbs.VERBS[name]), halves=name == "send")
    for name in sorted(verbs.VERBS, key=lambda name: name == "barrier")  # last, because it moves no bytes
    if name != "recv"
}


class Data:
    """Inputs of the ranks: small integers, exact in every dtype and order of summation, that any rank can recompute.

    The elements of each rank are a separate sequence with a period of 1021, a prime. A chunk that arrives at a wrong
    position or from a wrong rank is therefore detected.
    """

    _PERIOD = 1021

    def __init__(self, ranks: int, dtype: torch.dtype, reduces: bool) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        top = 3 if reduces else 100
        self._dtype = dtype
        self._periods = torch.randint(top, (ranks, self._PERIOD), generator=generator)

    def of(self, rank: int, count: int, start: int = 0) -> torch.Tensor:
        """Return elements start .. start + count of a rank's input."""
        return self._tile(self._periods[rank].to(self._dtype), count, start)

    def reduced(self, op: str, count: int, start: int = 0) -> torch.Tensor:
        """Return the same elements, reduced over all ranks."""
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
    """Return the expected output of ``rank`` after the call; None if the verb defines no output there."""
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
    """Return 1 if a barrier released this rank before the last rank entered it.

    Rank 0 enters late. The ranks of a host share a clock.
    """
    if rank == ROOT:
        # Without the delay, all ranks enter at about the same time, and an early release would go unnoticed.
        time.sleep(_STAGGER_S)
    entered_at = time.clock_gettime(time.CLOCK_MONOTONIC)
    call()
    left_at = time.clock_gettime(time.CLOCK_MONOTONIC)
    return int(left_at < latest(entered_at))
