"""``allranks bench python``: Python's share of a blocking 4-byte ``all_reduce``.

The same call is entered at three depths, in alternating blocks: through the public function, through the group, and
through the binding of the core. The time above the binding is Python's share. With one rank (the default) the call
waits for no peer. The figure of the binding is then the minimum time of the core, which includes reading the tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import allranks
from allranks.tools.bench.measure import BlockPlan, seconds_per_call
from allranks.tools.bench.report import BenchShare

__all__ = ["measure_python"]

_CALLS = 2000  # per block
_ROUNDS = (20, 400)  # least and most blocks of each depth


def measure_python(plan: BlockPlan) -> BenchShare:
    """Measure Python's share. Every rank calls it."""
    tensor = torch.zeros(1)
    op = allranks.ReduceOp.SUM
    group: Any = allranks.group.WORLD
    engine = group._engine
    depths: dict[str, Callable[[], object]] = {
        "allranks.all_reduce(tensor)": lambda: allranks.all_reduce(tensor),
        "ProcessGroup.all_reduce": lambda: group.all_reduce(tensor, op, False),
        "the binding": lambda: engine.now("all_reduce", tensor, None, op),
    }
    samples: dict[str, list[float]] = {name: [] for name in depths}
    spent = 0.0
    least, most = _ROUNDS
    for turn in range(most):
        if turn >= least and spent >= plan.budget_s:
            break
        # The order alternates, so that no depth always follows the same other depth.
        for name in depths if turn % 2 else reversed(depths):
            samples[name].append(seconds_per_call(depths[name], _CALLS))
            spent += samples[name][-1] * _CALLS
    medians = {name: statistics.median(times) for name, times in samples.items()}
    outermost, *_, binding_s = medians.values()
    return BenchShare(medians, outermost - binding_s, len(samples["the binding"]))
