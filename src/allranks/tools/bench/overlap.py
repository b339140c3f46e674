"""``allranks bench overlap``: how much of a communication computation hides.

For each engine, every rank times three things in turn: a loop of matrix products in one thread, which takes about as
long as the communication; the communication alone, started and awaited; and both, with the loop between start and wait.
``hidden`` is the part of the communication that costs no time: 1 - (both - compute) / communication. 0% means that the
two run one after the other. 100% means that the communication is free. Moving the bytes needs a CPU. If there are as
many busy ranks as CPUs, no CPU is free, and only the waiting is hidden.

``exchange`` is an ``isend`` to the next rank and an ``irecv`` from the previous rank. ``late`` is an ``all_reduce``
that the last rank joins 10 ms after the others; it does not compute.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import allranks
from allranks.tools.bench.engines import BenchEngine
from allranks.tools.bench.measure import BlockPlan, largest
from allranks.tools.bench.report import Overlap
from allranks.tools.bench.verbs import Data

__all__ = ["STARTS", "measure_overlap"]

STARTS = ("all_reduce", "exchange", "late")
_SIDE = 192
_ROUNDS = (5, 40)  # least and most rounds
_LATE_S = 0.01


class _Compute:
    """A loop of matrix products of adjustable length."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        self._out = torch.empty(_SIDE, _SIDE)
        self.products = 100
        self()

    def fit(self, seconds: float) -> None:
        # The time of the slowest rank, so that all ranks compute the same number of products.
        took = statistics.median(largest(_timed(self)) for _ in range(5)) / self.products
        self.products = max(1, math.ceil(seconds / took))

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._out)


def measure_overlap(engines: Sequence[BenchEngine], call: str, nbytes: int, plan: BlockPlan) -> list[Overlap]:
    """Measure all engines at one size. Every rank calls it, with torch in one thread."""
    compute = _Compute()
    data = Data(plan.ranks, plan.dtype, call != "exchange")
    count = max(1, nbytes // plan.dtype.itemsize)
    last = plan.rank == plan.ranks - 1
    runs = []
    for engine in engines:
        engine.enter(plan.cpus)
        into = engine.empty(count, plan.dtype)
        out = engine.empty(count, plan.dtype) if call == "exchange" else into
        begin = engine.start("exchange" if call == "exchange" else "all_reduce", into, out, plan.op)
        if call == "late" and last:
            begin = partial(_late, begin)
        wrong = _wrong(begin, call, into, out, data, compute, plan)
        into.zero_()
        communication_s = statistics.median(largest(_timed(partial(_whole, begin))) for _ in range(3))
        runs.append((engine, begin, wrong, communication_s))
    found = []
    for engine, begin, wrong, communication_s in runs:
        engine.enter(plan.cpus)
        compute.fit(communication_s)
        part = _nothing if call == "late" and last else compute
        found.append(_run(engine.name, begin, part, call, count * plan.dtype.itemsize, wrong, plan))
    return found


def _run(
    name: str,
    begin: Callable[[], Callable[[], object]],
    compute: Callable[[], object],
    call: str,
    nbytes: int,
    wrong: int,
    plan: BlockPlan,
) -> Overlap:
    def both() -> None:
        wait = begin()
        compute()
        wait()

    parts: tuple[Callable[[], object], ...] = (compute, partial(_whole, begin), both)
    samples: list[list[float]] = [[] for _ in parts]
    spent = 0.0
    least, most = _ROUNDS
    for turn in range(most):
        if turn >= least and spent >= plan.budget_s:
            break
        for i in (turn % 3, (turn + 1) % 3, (turn + 2) % 3):
            samples[i].append(largest(_timed(parts[i])))
            spent += samples[i][-1]
    compute_s, communicate_s, both_s = (statistics.median(each) for each in samples)
    hidden = 1 - (both_s - compute_s) / communicate_s
    return Overlap(name, call, nbytes, compute_s, communicate_s, both_s, hidden, len(samples[0]), wrong)


def _nothing() -> None:
    pass


def _late(begin: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    time.sleep(_LATE_S)
    return begin()


def _whole(begin: Callable[[], Callable[[], object]]) -> None:
    begin()()


def _timed(part: Callable[[], object]) -> float:
    allranks.barrier()
    began = time.perf_counter()
    part()
    return time.perf_counter() - began


def _wrong(
    begin: Callable[[], Callable[[], object]],
    call: str,
    into: torch.Tensor,
    out: torch.Tensor,
    data: Data,
    compute: _Compute,
    plan: BlockPlan,
) -> int:
    """Return the number of wrong elements of one call that overlaps with computation, over all ranks."""
    count = into.numel()
    into.copy_(data.of(plan.rank, count))
    wait = begin()
    compute()
    wait()
    right = data.of((plan.rank - 1) % plan.ranks, count) if call == "exchange" else data.reduced(plan.op, count)
    wrong = torch.tensor([int((out != right).sum())])
    allranks.all_reduce(wrong)
    return int(wrong)
