"""``allranks bench trace``: the cost of recording calls, and whether the record finds a late rank.

The same all_reduce is called in pairs of groups of the same ranks, in alternating blocks. One group of each pair is not
recorded. Then the last rank joins a number of steps 2 ms late, and the record reports which rank was late, and by how
much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch

import allranks
from allranks._trace import memory
from allranks.tools.bench.measure import BlockPlan, seconds_per_call
from allranks.tools.bench.report import Recorded, Straggling

__all__ = ["measure_recorded", "measure_straggling"]

_SIZES = (4, 4096)
_CALLS = 2000
_PAIRS = 8  # several pairs, because the memory address of a group also changes the time
_ROUNDS = (20, 400)
_STEPS = 100
_STEP_S = 0.003
_LATE_S = 0.002


def measure_recorded(plan: BlockPlan) -> Iterator[Recorded]:
    """Measure each size. Every rank calls it."""
    pairs = []
    for _ in range(_PAIRS):
        recorded = allranks.new_group()
        with memory.switched_off():
            pairs.append({True: recorded, False: allranks.new_group()})
    for nbytes in _SIZES:
        calls = [
            {on: partial(allranks.all_reduce, torch.zeros(nbytes // 4), group=group) for on, group in pair.items()}
            for pair in pairs
        ]
        samples: dict[bool, list[float]] = {True: [], False: []}
        least, most = _ROUNDS
        rounds = torch.tensor(0)
        for turn in range(most):
            for on in (True, False) if turn // _PAIRS % 2 else (False, True):
                allranks.barrier()
                samples[on].append(seconds_per_call(calls[turn % _PAIRS][on], _CALLS))
            rounds.fill_(turn + 1 >= least and sum(map(sum, samples.values())) * _CALLS >= plan.budget_s)
            allranks.broadcast(rounds, 0)  # all stop after the same round
            if rounds:
                break
        on_s, off_s = (statistics.median(samples[on]) for on in (True, False))
        paired_s = statistics.median(a - b for a, b in zip(samples[True], samples[False], strict=True))
        yield Recorded(nbytes, on_s, off_s, paired_s, len(samples[True]))
    for pair in pairs:
        for group in pair.values():
            allranks.destroy_process_group(group)


def measure_straggling(plan: BlockPlan) -> Straggling:
    """Measure whether the record finds the late rank. Every rank calls it."""
    group = allranks.new_group()
    tensor = torch.zeros(1)
    late = plan.ranks - 1
    for _ in range(_STEPS):
        time.sleep(_STEP_S + _LATE_S * (plan.rank == late))
        allranks.all_reduce(tensor, group=group)
    found = allranks.trace.stragglers(group)
    worst = found.ranks[0]
    allranks.destroy_process_group(group)
    return Straggling(late, _LATE_S, worst.rank, worst.share, worst.seconds, found.compared)
