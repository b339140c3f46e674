"""torch's DistributedDataParallel on allranks: hooks that wait for futures, and a program that replaces the class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as td
from torch import nn

from allranks.testing import run_ranks


def _by_reducer(model: Any, bucket: Any) -> None:
    model.reducer._run_allreduce_hook(bucket).wait()


def _by_collect_all(model: Any, bucket: Any) -> None:
    torch.futures.collect_all([td.all_reduce(bucket.buffer(), async_op=True).get_future()]).wait()


def _by_wait_all(model: Any, bucket: Any) -> None:
    torch.futures.wait_all([td.all_reduce(bucket.buffer(), async_op=True).get_future()])


@pytest.mark.parametrize("reduce", [_by_reducer, _by_collect_all, _by_wait_all])
def test_hook_can_wait_for_a_future_that_torch_derives(tmp_path: Any, reduce: Callable[[Any, Any], None]) -> None:
    def body() -> list[list[float]]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))

        def hook(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with its own
            reduce(model, bucket)
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer() / td.get_world_size())
            return done

        model.register_comm_hook(None, hook)
        model(torch.full((2, 3), td.get_rank() + 1.0)).sum().backward()
        return model.module.weight.grad.tolist()

    # The sum over two samples of x, averaged over ranks: (2 + 4) / 2.
    assert run_ranks(2, body) == [[[3.0, 3.0, 3.0]]] * 2


def test_state_works_if_the_program_replaces_the_class_of_torch() -> None:
    def body() -> None:
        real = nn.parallel.DistributedDataParallel
        nn.parallel.DistributedDataParallel = functools.partial(real)  # type: ignore[assignment, misc]
        from allranks.resilience import State

        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        model._register_builtin_comm_hook(td.BuiltinCommHookType.ALLREDUCE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in State(model=model, optimizer=optimizer).steps(3):
            with step:
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()

    run_ranks(2, body)
