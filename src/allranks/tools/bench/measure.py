"""The method of measurement: engines take turns in the same processes, so that a drift of speed affects all alike.

A block is a call that is not timed, a barrier, and a run of back-to-back calls, as in nccl-tests. Its time is that of
the slowest rank. If the rooted calls of a library do not synchronize, the root runs ahead of the other ranks and
successive calls overlap. With ``apart``, an untimed barrier before each call prevents this, as in the OSU benchmarks.

A cell (a verb at a size) has a budget of seconds. Blocks of all engines use it in turn, each round in another order.
Figures are medians over the blocks. The budget is charged with the times of the blocks. All ranks have the same values,
so all stop after the same block. Results are compared twice, in the buffers that are timed: before the first block and
after the last. The CPU time of a block is the mean over the ranks and includes all their threads.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import allranks
from allranks.tools.bench.engines import BenchEngine
from allranks.tools.bench.report import BenchRow, Timing
from allranks.tools.bench.verbs import BenchVerb, Data, expected, left_early

__all__ = ["BlockPlan", "largest", "measure", "seconds_per_call"]

_BLOCK_S = 0.01  # seconds that the calls of a block take together, about
_MOST_CALLS = 5000
_BLOCKS = (5, 50)  # least and most blocks of each engine
# Untimed first calls of a cell: a library opens connections, and touches the memory that it cycles through.
_FIRST_CALLS = 30
_FIRST_BYTES = 2 << 20
_UNWRITTEN = 113  # a value that no data contains


@dataclass(frozen=True)
class BlockPlan:
    """Parameters that are the same for every cell."""

    rank: int
    ranks: int
    cpus: set[int]  # the CPUs of engines that do not bind processes
    dtype: torch.dtype
    op: str
    budget_s: float
    apart: bool = False  # a barrier before every call


@dataclass
class _Contender:
    engine: BenchEngine
    call: Callable[[], object]
    into: torch.Tensor
    out: torch.Tensor
    calls_per_block: int = 1
    wrong: int = 0


@dataclass
class _Block:
    seconds: float  # per call, of the slowest rank
    cpu_s: float  # per call, the mean of the ranks


def measure(engines: Sequence[BenchEngine], verb: BenchVerb, nbytes: int, plan: BlockPlan) -> BenchRow:
    """Measure one cell. Every rank calls it."""
    count = verb.count(nbytes, plan.dtype.itemsize, plan.ranks)
    gives, gets = (count * pieces for pieces in verb.pieces(plan.ranks))
    contenders = []
    for engine in engines:
        into = engine.empty(gives, plan.dtype)
        out = into if verb.in_place else engine.empty(gets, plan.dtype)
        contenders.append(_Contender(engine, engine.call(verb.name, into, out, plan.op), into, out))
    data = Data(plan.ranks, plan.dtype, verb.reduces)
    for each in contenders:
        _check(each, verb, count, data, plan)
    for each in contenders:
        each.into.zero_()  # repeated reductions in place must not overflow
        # Times of blocks are those of the slowest rank, equal on all ranks. All numbers of calls below therefore agree.
        first_s = _block(each, 2, plan).seconds
        more = min(_FIRST_CALLS, _FIRST_BYTES // max(nbytes, 1), int(plan.budget_s / first_s))
        if more > 0:
            _block(each, more, plan)
        each.calls_per_block = max(1, min(_MOST_CALLS, math.ceil(_BLOCK_S / _block(each, 3, plan).seconds)))
    samples = _sample(contenders, plan)
    for each in contenders:
        _check(each, verb, count, data, plan)
    return _row(contenders, samples, verb, count, plan)


def _sample(contenders: list[_Contender], plan: BlockPlan) -> list[list[_Block]]:
    samples: list[list[_Block]] = [[] for _ in contenders]
    spent = 0.0
    least, most = _BLOCKS
    for turn in range(most):
        if turn >= least and spent >= plan.budget_s:
            break
        order = list(range(len(contenders)))
        # Rotate and reverse the order, so that an engine does not always follow the same other engine.
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for i in order if turn // len(order) % 2 == 0 else reversed(order):
            samples[i].append(_block(contenders[i], contenders[i].calls_per_block, plan))
            spent += samples[i][-1].seconds * (contenders[i].calls_per_block + 1)  # 1: the call that is not timed
    return samples


def _block(contender: _Contender, n: int, plan: BlockPlan) -> _Block:
    contender.engine.enter(plan.cpus)
    seconds, cpu_s = (_time_with_barriers if plan.apart else _time_back_to_back)(contender.call, n)
    mean = torch.tensor([cpu_s / plan.ranks], dtype=torch.float64)
    allranks.all_reduce(mean)
    return _Block(largest(seconds), float(mean))


def seconds_per_call(call: Callable[[], object], n: int) -> float:
    """Return the seconds per call of a block of n back-to-back calls, of the slowest rank."""
    return largest(_time_back_to_back(call, n)[0])


def _time_back_to_back(call: Callable[[], object], n: int) -> tuple[float, float]:
    """Return the seconds per call and the CPU seconds per call of a block, of this rank."""
    call()  # the blocks of other engines have evicted the caches
    allranks.barrier()
    cpu_s = time.process_time()
    began = time.perf_counter()
    for _ in range(n):
        call()
    seconds = time.perf_counter() - began
    return seconds / n, (time.process_time() - cpu_s) / n


def _time_with_barriers(call: Callable[[], object], n: int) -> tuple[float, float]:
    """Like `_time_back_to_back`, with an untimed barrier before each call."""
    call()
    seconds = cpu_s = 0.0
    for _ in range(n):
        allranks.barrier()
        # Outside the wall-clock interval, because reading the CPU clock is a system call.
        cpu_s -= time.process_time()
        began = time.perf_counter()
        call()
        seconds += time.perf_counter() - began
        cpu_s += time.process_time()
    return seconds / n, cpu_s / n


def largest(value: float) -> float:
    """Return the largest of all ranks' values."""
    found = torch.tensor([value], dtype=torch.float64)
    allranks.all_reduce(found, allranks.ReduceOp.MAX)
    return float(found)


def _check(contender: _Contender, verb: BenchVerb, count: int, data: Data, plan: BlockPlan) -> None:
    """Add the number of wrong elements of one call, over all ranks."""
    wrong = 0
    contender.engine.enter(plan.cpus)
    allranks.barrier()
    if verb.name == "barrier":
        wrong = left_early(contender.call, plan.rank, largest)
    else:
        # An element that the call does not write must not be right by chance.
        contender.out.fill_(_UNWRITTEN)
        contender.into.copy_(data.of(plan.rank, contender.into.numel()))
        contender.call()
        right = expected(verb.name, data, plan.op, plan.rank, plan.ranks, count)
        if right is not None:
            wrong = int((contender.out != right).sum())
    total = torch.tensor([wrong])
    allranks.all_reduce(total)
    contender.wrong += int(total)


def _row(
    contenders: list[_Contender], samples: list[list[_Block]], verb: BenchVerb, count: int, plan: BlockPlan
) -> BenchRow:
    nbytes = count * max(verb.pieces(plan.ranks)) * plan.dtype.itemsize
    timings = {}
    # A message is timed as a round trip, and reported as half of it.
    part = 2 if verb.halves else 1
    for each, blocks in zip(contenders, samples, strict=True):
        seconds = [block.seconds / part for block in blocks]
        median = statistics.median(seconds)
        algbw = nbytes / median / 1e9
        timings[each.engine.name] = Timing(
            median,
            min(seconds),
            max(seconds),
            statistics.median(block.cpu_s / part for block in blocks),
            algbw,
            algbw * verb.link(plan.ranks),
            each.wrong,
            len(seconds),
            each.calls_per_block,
        )
    native = timings["native"]
    peers = {name: timing for name, timing in timings.items() if name != "native"}
    return BenchRow(
        nbytes,
        count,
        timings,
        {name: t.median_s / native.median_s for name, t in peers.items()},
        {name: t.fastest_s / native.fastest_s for name, t in peers.items()},
    )
