"""``allranks bench small``: the cost of a small all_reduce, by the way in which it is called.

============================  =========================================================================================
blocking, async, plan         ``allranks.all_reduce``; with ``async_op=True`` and an immediate ``wait``; ``group.plan``
torch, torch async            ``torch.distributed.all_reduce`` on the allranks backend, in the same two ways
torch, nothing                torch's Python code on a backend that does nothing: a ProcessGroup of torch, written in
                              Python, whose ``allreduce`` returns the same complete Work each time
torch async, nothing          the same, and a ``wait``
torch async, nothing, new     the same, but each call returns a new Work, as a backend with asynchronous calls must
torch, fake                   the same calls on torch's backend "fake", which does nothing and is written in C++, like
torch async, fake             gloo and nccl
mpi, mpi persistent           with ``--against mpi``: ``Allreduce``; ``Allreduce_init``, then ``Start`` and ``Wait``
============================  =========================================================================================

All ways take turns in the same processes, in blocks of back-to-back calls. Figures are medians over the blocks.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import allranks
from allranks.tools.bench.engines import BenchEngine, Mpi
from allranks.tools.bench.measure import BlockPlan, seconds_per_call
from allranks.tools.bench.report import Small

__all__ = ["measure_small"]

_CALLS = 1000  # per block
_ROUNDS = (20, 400)  # least and most blocks of each way
_NOTHING = ("nothing", "fake")  # the names of ways that do nothing contain one of these


def measure_small(engines: Sequence[BenchEngine], sizes: Sequence[int], plan: BlockPlan) -> Iterator[Small]:
    """Measure each size. Every rank calls it."""
    world = allranks.group.WORLD
    assert world is not None
    torchs = allranks.torch_group()
    for nbytes in sizes:
        tensor = torch.zeros(max(1, nbytes // plan.dtype.itemsize), dtype=plan.dtype)
        ways = _allranks_calls(world, tensor, plan.op) | _torch_calls(torchs, tensor, plan.op)
        for engine in engines:
            if isinstance(engine, Mpi):
                ways |= _mpi_calls(engine, tensor, plan.op)
        wrong = _check(ways, engines, tensor, plan)
        samples = _sample(ways, engines, plan)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        fastest = {name: min(times) for name, times in samples.items()}
        yield Small(tensor.nbytes, medians, fastest, len(samples["blocking"]), wrong)


def _check(
    ways: dict[str, tuple[bool, Callable[[], object]]],
    engines: Sequence[BenchEngine],
    tensor: torch.Tensor,
    plan: BlockPlan,
) -> int:
    """Return the number of wrong elements of one call in each way, over all ranks.

    Leaves zeros in the tensor, which repeated reductions do not change.
    """
    total = torch.tensor(0)
    for name, (by_mpi, call) in ways.items():
        if any(word in name for word in _NOTHING):
            continue
        tensor.fill_(1)
        engines[-1 if by_mpi else 0].enter(plan.cpus)
        call()
        total += int((tensor != (plan.ranks if plan.op == "SUM" else 1)).sum())
    tensor.zero_()
    allranks.all_reduce(total)
    return int(total)


def _sample(
    ways: dict[str, tuple[bool, Callable[[], object]]], engines: Sequence[BenchEngine], plan: BlockPlan
) -> dict[str, list[float]]:
    """Return the seconds per call of the blocks, by way. Each round has another order."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    least, most = _ROUNDS
    rounds = torch.tensor(0)
    names = list(ways)
    for turn in range(most):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            by_mpi, call = ways[name]
            engines[-1 if by_mpi else 0].enter(plan.cpus)
            samples[name].append(seconds_per_call(call, _CALLS))
        spent = sum(map(sum, samples.values())) * _CALLS
        rounds.fill_(turn + 1 >= least and spent >= plan.budget_s * len(ways))
        allranks.broadcast(rounds, 0)  # all stop after the same round
        if rounds:
            break
    return samples


def _allranks_calls(world: allranks.ProcessGroup, tensor: torch.Tensor, op_name: str) -> dict[str, tuple[bool, Any]]:
    op = getattr(allranks.ReduceOp, op_name)
    return {
        "blocking": (False, lambda: allranks.all_reduce(tensor, op)),
        "async": (False, lambda: allranks.all_reduce(tensor, op, async_op=True).wait()),
        "plan": (False, world.plan("all_reduce", tensor, op)),
    }


def _torch_calls(group: Any, tensor: torch.Tensor, op_name: str) -> dict[str, tuple[bool, Any]]:
    dist: Any = torch.distributed
    op = getattr(dist.ReduceOp, op_name)
    all_reduce = dist.all_reduce

    class Nothing(dist.ProcessGroup):  # type: ignore[misc]
        def __init__(self, made: Callable[[], Any]) -> None:
            super().__init__(group.rank(), group.size())
            self.made = made

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return self.made()

    class SmallDone(dist.Work):  # type: ignore[misc]
        def wait(self, timeout: Any = None) -> bool:
            return True

    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend in torch
    fake = dist.new_group(backend="fake")
    done = SmallDone()
    nothing, new = Nothing(lambda: done), Nothing(SmallDone)
    return {
        "torch": (False, lambda: all_reduce(tensor, op, group)),
        "torch async": (False, lambda: all_reduce(tensor, op, group, async_op=True).wait()),
        "torch, nothing": (False, lambda: all_reduce(tensor, op, nothing)),
        "torch async, nothing": (False, lambda: all_reduce(tensor, op, nothing, async_op=True).wait()),
        "torch async, nothing, new": (False, lambda: all_reduce(tensor, op, new, async_op=True).wait()),
        "torch, fake": (False, lambda: all_reduce(tensor, op, fake)),
        "torch async, fake": (False, lambda: all_reduce(tensor, op, fake, async_op=True).wait()),
    }


def _mpi_calls(engine: Mpi, tensor: torch.Tensor, op_name: str) -> dict[str, tuple[bool, Any]]:
    return {
        "mpi": (True, engine.call("all_reduce", tensor, tensor, op_name)),
        "mpi persistent": (True, engine.prepared(tensor, op_name)),
    }
