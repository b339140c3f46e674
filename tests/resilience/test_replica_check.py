"""``State(check_every=...)``: ranks that differ return to a step in which they were equal, and repeat the steps."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import allranks as dist
from allranks.data import DistributedSampler
from allranks.testing import run_ranks
from support import warm

SAMPLES = 96


class _Net(nn.Module):
    """A module with a buffer that is equal on all ranks, and batch statistics, which differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> Any:
        self.average.mul_(0.5).add_(1)
        return self.last(self.norm(self.first(x)).relu())


def _flip(tensor: torch.Tensor, element: int = 0, bit: int = 28) -> None:
    tensor.data.view(-1).view(torch.int32)[element] ^= 1 << bit


def _train(damage: Any, epochs: int = 2, every: int | None = 4, **parts: Any) -> tuple[dict[str, Any], list[str]]:
    """Train, and return the final values and the warnings of this rank.

    Args:
        damage: Called at three moments of each step with the epoch, the step's index, the moment, the model and the
            optimizer.
        epochs: Number of epochs of 8 steps on 3 ranks.
        every: ``check_every``.
        parts: Further arguments of the State.
    """
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = _Net()
    wrapper = dist.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data = [(torch.full((4,), n / SAMPLES) + torch.randn(4), n % 3) for n in range(SAMPLES)]
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    own = torch.zeros(1)
    reports: list[str] = []
    state = dist.resilience.State(
        model=wrapper, optimizer=optimizer, own=[own], check_every=every, local=["reports", "damage"], **parts
    )
    total = 0.0
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: reports.append(str(message))
        for epoch in state.epochs(epochs):
            sampler.set_epoch(epoch)
            for step in state.steps(loader):
                with step:
                    x, y = step.batch
                    damage(epoch, step.index, 0, model, optimizer)
                    optimizer.zero_grad()
                    loss = F.cross_entropy(wrapper(x), y)
                    damage(epoch, step.index, 1, model, optimizer)
                    loss.backward()
                    damage(epoch, step.index, 2, model, optimizer)
                    own += loss.detach()
                    optimizer.step()
                    total += loss.item()
    values = {f"{k}": v.clone() for k, v in model.state_dict().items()}
    values["own"], values["total"], values["steps"] = own, torch.tensor(total), torch.tensor(state.steps_done)
    return values, [text for text in reports if "ranks differ" in text]


def _none(*_: Any) -> None:
    pass


class _Once:
    """Damage at one moment, on one rank."""

    def __init__(self, rank: int, epoch: int, index: int, moment: int, flip: Any) -> None:
        self._when, self._flip = [(epoch, index, moment)], flip
        self._rank = rank

    def __call__(self, epoch: int, index: int, moment: int, model: _Net, optimizer: Any) -> None:
        if (epoch, index, moment) in self._when:
            self._when.clear()
            if dist.get_rank() == self._rank:
                self._flip(model, optimizer)


FLIPS = {
    "parameter": (lambda model, _: _flip(model.first.weight, 9), r"model\.first\.weight\[2, 1\]"),
    "momentum": (lambda model, opt: _flip(opt.state[model.last.bias]["exp_avg"], 1), r"model\.last\.bias\[1\]"),
    "buffer": (lambda model, _: _flip(model.average, 3), r"model\.average\[3\]"),
    "infinite": (lambda model, _: _flip(model.first.weight, 9, 30), ""),
}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", FLIPS)
def test_a_flipped_bit_is_reported_and_has_no_effect_on_the_result(kind: str, every: int) -> None:
    flip, place = FLIPS[kind]

    def body() -> list[str]:
        expected, reports = _train(_none, every=every)
        assert reports == []
        found = []
        # The first step of an epoch, the last one, and moments in between.
        for epoch, index, moment in ((0, 5, 0), (0, 7, 2), (1, 0, 1), (1, 7, 1)):
            values, reports = _train(_Once(1, epoch, index, moment, flip), every=every)
            assert {k: v for k, v in values.items() if not torch.equal(v, expected[k])} == {}, (epoch, index, moment)
            found += reports
        return found

    texts = run_ranks(3, body, timeout_s=120)[0]
    assert texts is not None
    assert len(texts) == 4
    for text in texts:
        assert re.search(place + " is .* on rank 1" if place else "differ|not finite", text), text
        assert "All ranks return to step" in text


def test_two_ranks_return_although_none_has_a_majority() -> None:
    def body() -> tuple[bool, list[str]]:
        expected, _ = _train(_none)
        values, reports = _train(_Once(1, 0, 9, 1, FLIPS["parameter"][0]))
        return all(torch.equal(value, expected[name]) for name, value in values.items()), reports

    (equal, reports), other = run_ranks(2, body)  # type: ignore[misc]
    assert equal
    assert other == (True, [])
    assert "on rank 0, but" in reports[0]


def test_a_difference_that_the_program_causes_ends_the_training_on_every_rank() -> None:
    def body() -> str:
        def damage(epoch: int, index: int, moment: int, model: _Net, optimizer: Any) -> None:
            if index == 3 and moment == 0:
                with torch.no_grad():
                    model.first.bias += dist.get_rank()

        with pytest.raises(dist.StateLostError) as caught:
            _train(damage)
        return str(caught.value)

    for text in run_ranks(3, body):
        assert text is not None
        assert "the ranks differ at step 4: model.first.bias[0] is" in text
        assert "They differ again after the steps were repeated 2 times. The program causes this." in text


def test_default_ends_the_training_and_names_the_element() -> None:
    def body() -> str:
        with pytest.raises(dist.StateLostError) as caught:
            _train(_Once(2, 0, 3, 1, FLIPS["parameter"][0]), epochs=40, every=None)
        return str(caught.value)

    for text in run_ranks(3, body):
        assert text is not None
        assert re.search(r"the ranks differ at step \d+: model\.first\.weight\[2, 1\] is .* on rank 2", text), text
        assert "memory fault" in text


def test_a_checkpoint_contains_no_damaged_value(tmp_path: Path) -> None:
    def body() -> bool:
        settings = dist.resilience.Checkpoints(tmp_path, every=5)
        expected, _ = _train(_none, epochs=1)
        values, reports = _train(_Once(0, 0, 4, 1, FLIPS["parameter"][0]), epochs=1, every=100, checkpoints=settings)
        assert len(reports) == (dist.get_rank() == 0)
        return all(torch.equal(value, expected[name]) for name, value in values.items())

    assert run_ranks(3, body) == [True] * 3


PROGRAM = """
import os, signal, sys
import torch
import allranks as dist

dist.init_process_group(timeout=30)
first = os.environ["ALLRANKS_START"] == "0"
weight, own = torch.zeros(3), torch.zeros(1)
visits = [0] * 30
state = dist.resilience.State(weight=weight, own=[own], check_every=10, local=["visits"])
flips, (index, visit) = "flip" in sys.argv, map(int, sys.argv[1:3])
total = 0.0
for step in state.steps(30):
    with step:
        rank = dist.get_rank()
        visits[step.index] += 1
        if flips and first and rank == 1 and step.index == 16 and visits[16] == 1:
            weight.data.view(torch.int32)[1] ^= 1 << 28
        if flips and first and rank == 2 and (step.index, visits[step.index]) == (index, visit):
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.full((3,), step.index * (1.0 + rank)) + weight / 100
        dist.all_reduce(gradient)
        own += gradient[0] * (1 + rank)
        total += float(gradient[1])
        step.commit()
        weight += gradient / 8
print("end", dist.get_rank(), weight.tolist(), own.item(), total, state.replaced, flush=True)
"""


@pytest.mark.parametrize(("index", "visit"), [(11, 1), (12, 2), (25, 1)], ids=["before", "repeated", "after"])
def test_a_rank_can_be_lost_before_and_after_the_ranks_return(tmp_path: Path, index: int, visit: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def results(*options: str) -> tuple[list[str], str]:
        words = [sys.executable, "-m", "allranks", "run", "-n", "3", "--elastic", "2", script, str(index), str(visit)]
        done = warm.run([*words, *options], timeout=100)
        assert done.returncode == 0, done
        ends = [line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line]
        return sorted(ends), done.stderr

    undisturbed, _ = results()
    found, stderr = results("flip")
    assert "was killed by SIGKILL; restarted" in stderr
    assert "All ranks return to step" in stderr
    assert [line[:-1] for line in found] == [line[:-1] for line in undisturbed], stderr
    assert {line[-1] for line in found} == {"1"}
