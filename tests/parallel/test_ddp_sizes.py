"""DistributedDataParallel on a group whose size changes in place: one rank that others join, and the reverse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.parallel.ddp import DistributedDataParallel
from allranks.testing import run_ranks
from support.handles import pass_on


class Net(nn.Module):
    """A model with a flat bucket, a parameter in a separate bucket, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.large = nn.Linear(4, 1 << 17, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x) * self.scale)


def me() -> int:
    return int(os.environ["RANK"])


def alone() -> dist.ProcessGroup:
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), timeout=20)
    found = dist.group.WORLD
    assert found is not None
    return found


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **options)


def reduced(model: DistributedDataParallel) -> bool:
    """Return whether a step gives the mean over the ranks of the current group."""
    model.zero_grad()
    size = dist.get_world_size()
    model(torch.full((2, 4), 2.0 ** dist.get_rank())).sum().backward()
    local = Net()
    local.load_state_dict(model.module.state_dict())
    local(torch.full((2, 4), (2.0**size - 1) / size)).sum().backward()  # gradients are affine functions of the input
    found, expected = ([p.grad for p in net.parameters() if p.grad is not None] for net in (model, local))
    return len(found) == 3 and all(torch.allclose(*pair, rtol=1e-4) for pair in zip(found, expected, strict=True))


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_single_rank_reduces_gradients_when_others_join(tmp_path: Path, options: dict[str, Any]) -> None:
    def body() -> None:
        group = alone()
        torch.set_num_threads(1 if me() else 64)  # the ranks see different numbers of free CPUs
        model = wrapped(**options)
        assert reduced(model)
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        group.reconfigure(1, handles)
        assert reduced(model)
        overlaps: list[object] = [None] * 3
        dist.all_gather_object(overlaps, model.overlap)
        assert overlaps == [False] * 3
        group.reconfigure(2 + me(), [handles[me()]])
        assert dist.get_world_size() == 1
        assert reduced(model)
        group.reconfigure(10, handles)
        assert reduced(model)
        dist.destroy_process_group()

    run_ranks(3, body, init=False)


def test_rank_joins_two_ranks_that_have_joined_before(tmp_path: Path) -> None:
    def body() -> None:
        group = alone()
        model = wrapped()
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        if me() < 2:
            group.reconfigure(1, handles[:2])
            assert reduced(model)
        group.reconfigure(2, handles)
        model.overlap = True
        assert reduced(model)
        dist.destroy_process_group()

    run_ranks(3, body, init=False)


def test_uneven_inputs_and_hook_of_a_model_that_was_wrapped_by_a_single_rank(tmp_path: Path) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        calls.append(bucket.index())
        return work.get_future().then(lambda future: future.value()[0])

    calls: list[int] = []

    def body() -> None:
        group = alone()
        hooked, model = wrapped(), wrapped()
        hooked.register_comm_hook(None, hook)
        group.reconfigure(1, pass_on(tmp_path, "all", group.reconfigure_handle(), 2))
        assert reduced(hooked)
        assert calls == [0, 1]
        with model.join():
            for _ in range(1 + me()):
                model(torch.ones(2, 4)).sum().backward()
        with model.no_sync():
            model(torch.full((2, 4), float(me()))).sum().backward()
        model(torch.full((2, 4), float(me()))).sum().backward()
        sums = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        total = sum(p.grad.double().sum() for p in model.parameters() if p.grad is not None)
        assert isinstance(total, torch.Tensor)
        dist.all_gather(sums, total.view(1))
        assert sums[0] == sums[1]
        dist.destroy_process_group()

    run_ranks(2, body, init=False)
