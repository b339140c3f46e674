"""The loop of `State`: undone steps, redistributed samples, and refused programs.

Without a launcher, the job continues with fewer ranks. test_elastic.py tests the replacement of ranks.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allranks as dist
from allranks.data import DistributedSampler
from allranks.testing import run_ranks


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Forwards(nn.Module):
    """Module that counts its forward calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), _Forwards(), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("moment", ["forward", "backward", "commit", "after"])
def test_remaining_ranks_share_the_rest_of_the_epoch(moment: str) -> None:
    size, batch = 96, 2

    def main() -> Any:
        torch.set_num_threads(1)
        model = dist.nn.parallel.DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = DistributedSampler(range(size), seed=5)
        loader = DataLoader(range(size), batch_size=batch, sampler=sampler)  # type: ignore[arg-type]
        seen: list[list[int]] = []
        state = dist.resilience.State(
            model=model, optimizer=optimizer, counts={"steps": 0, "log": [[]]}, local=["seen"]
        )
        first = dist.get_rank()
        counts = state.parts["counts"]
        for epoch in state.epochs(2):
            sampler.set_epoch(epoch)
            seen.append([])
            for step in state.steps(loader):
                with step:
                    counts["steps"] += 1
                    counts["log"][0].append(step.index)
                    doomed = first == 1 and epoch == 0 and step.index == 5
                    if doomed and moment == "forward":
                        _die()
                    optimizer.zero_grad()
                    x = torch.stack([step.batch.float() + k for k in range(4)], 1) / size
                    if doomed and moment == "backward":
                        x.requires_grad_().register_hook(lambda _: _die())
                    F.cross_entropy(model(x), step.batch % 2).backward()
                    if doomed and moment == "commit":
                        _die()
                    optimizer.step()
                    if doomed and moment == "after":
                        _die()
                if step.committed:
                    seen[-1] += step.batch.tolist()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert len(counts["log"][0]) == counts["steps"]
        forwards = state.parts["model"][1].count.item()
        return seen, dist.get_world_size(), state.steps_done, counts["steps"], weights.tolist(), state.lost, forwards

    results = run_ranks(3, main, may_die=[1])
    left = [results[0], results[2]]
    assert [each[1] for each in left] == [2, 2]
    assert left[0][4] == left[1][4]
    assert {each[5] for each in left} == {1}
    # The number of complete steps of the dead rank. If it dies right before its vote, its gradients may have reached
    # every rank: then the step counts.
    steps = {"after": (6,), "commit": (5, 6)}.get(moment, (5,))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(5)).tolist()
    of_dead = [[order[i * 3 * batch + 1 + 3 * k] for i in range(n) for k in range(batch)] for n in steps]
    assert list(range(size)) in [sorted(left[0][0][0] + left[1][0][0] + each) for each in of_dead]
    assert sorted(left[0][0][1] + left[1][0][1]) == list(range(size))
    for each in left:
        # Undoing a step also undoes its counts.
        assert each[3] == each[6] == each[2]


def test_manual_updates_after_an_explicit_commit_are_applied_once() -> None:
    def main() -> Any:
        weight = torch.zeros(1)
        state = dist.resilience.State(weight=weight)
        pick = random.Random(1)
        for step in state.steps(20):
            with step:
                gradient = torch.tensor([float(step.index)])
                if dist.get_rank() == 2 and dist.get_world_size() == 3 and step.index == 7:
                    _die()
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
                step.commit()
                weight += gradient
                pick.random()
        return weight.item()

    found = run_ranks(3, main, may_die=[2])
    assert found[0] == found[1] == sum(range(20))


def test_a_step_after_which_the_program_leaves_the_loop_is_counted() -> None:
    def main() -> list[int]:
        state = dist.resilience.State(weight=torch.zeros(1))
        counted = []
        for within in (False, True):
            for step in state.steps(10):
                with step:
                    if within and step.index == 3:
                        break
                if step.index == 3:
                    break
            counted.append(state.steps_done)
        return counted

    assert run_ranks(2, main) == [[4, 8]] * 2


def test_unprotected_steps_and_immutable_values_are_refused() -> None:
    def main() -> None:
        with pytest.raises(dist.UsageError, match=r"State: x is a int, which cannot be changed in place"):
            dist.resilience.State(x=1)
        state = dist.resilience.State()
        with pytest.raises(dist.UsageError, match="Write `with step:` around its body"):
            for _ in state.steps(2):
                pass
        for step in dist.resilience.State().steps(1):
            with pytest.raises(ZeroDivisionError), step:
                raise ZeroDivisionError
            break

    run_ranks(1, main)


def test_repeated_step_draws_the_same_random_numbers() -> None:
    def main() -> Any:
        state = dist.resilience.State(local=["drawn"])
        drawn = []
        for step in state.steps(6):
            with step:
                drawn.append((step.index, torch.rand(1).item(), random.random()))
                if dist.get_rank() == 1 and dist.get_world_size() == 3 and step.index == 3:
                    _die()
                dist.barrier()
        return drawn

    drawn = run_ranks(3, main, may_die=[1])[0]
    assert [index for index, _, _ in drawn] == [0, 1, 2, 3, 3, 4, 5]
    assert drawn[3] == drawn[4]
    assert len({value for _, value, _ in drawn}) == 6


def test_rank_that_receives_a_leave_signal_finishes_its_step() -> None:
    def main() -> Any:
        first, sums = dist.get_rank(), []
        state = dist.resilience.State(leave_on=[signal.SIGTERM], local=["sums"])
        try:
            for step in state.steps(12):
                with step:
                    if first == 1 and step.index == 4:
                        os.kill(os.getpid(), signal.SIGTERM)
                    tensor = torch.tensor([10.0**first])
                    dist.all_reduce(tensor)
                    sums.append(tensor.item())
        except SystemExit as end:
            assert state.leaving
            assert not dist.is_initialized()
            return end.code, sums
        return dist.get_world_size(), sums

    first, second, third = run_ranks(3, main)
    assert second == (0, [111.0] * 5)
    assert first == third == (2, [111.0] * 5 + [101.0] * 7)
