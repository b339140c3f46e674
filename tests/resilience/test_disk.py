"""`State` with checkpoints: a restarted training ends with the same bits as an uninterrupted training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allranks as dist
from allranks import checkpoint
from allranks.data import DistributedSampler
from allranks.resilience import Checkpoints, State
from allranks.testing import run_ranks
from support import warm

IMAGES = 48


class _Stop(Exception):
    """Raised to stop the program in the middle of the training."""


def _train(
    folder: Path | None,
    epochs: int = 3,
    every: int | None = 4,
    stop_at: int = -1,
    reseed: bool = True,
    in_step: Callable[[int], None] | None = None,
    **more: Any,
) -> tuple[list[torch.Tensor], dict[str, Any], list[list[int]]]:
    """Train, and return weights and running means, the record, and the samples of this rank in each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    images = torch.randn(IMAGES, 4)
    data = TensorDataset(images, (images.sum(1) > 0).long(), torch.arange(IMAGES))
    sampler = DistributedSampler(data, drop_last=True, seed=2)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    forward = dist.nn.parallel.DistributedDataParallel(net)
    total, record = torch.zeros(1, dtype=torch.float64), {"losses": []}
    kept = None if folder is None else Checkpoints(folder, every=every, **more)
    state = State(
        net=forward,
        optimizer=optimizer,
        scheduler=scheduler,
        record=record,
        own=[total],
        checkpoints=kept,
        reseed=reseed,
        local=["seen", "told"],  # observations of the test
    )
    seen: list[list[int]] = []
    for epoch in state.epochs(epochs):
        sampler.set_epoch(epoch)
        seen.append([])
        for step in state.steps(loader):
            with step:
                if in_step is not None:
                    in_step(state.steps_done)
                if state.steps_done == stop_at:
                    raise _Stop
                x, y, numbers = step.batch
                optimizer.zero_grad()
                loss = F.cross_entropy(forward(x), y)
                loss.backward()
                total += loss.detach()
                seen[-1] += numbers.tolist()
                optimizer.step()
                scheduler.step()
        for step in state.steps(1):
            with step:
                mean = total.clone()
                total.zero_()
                dist.all_reduce(mean)
                record["losses"] = [*record["losses"], mean.item()]
    return [tensor.clone() for tensor in net.state_dict().values()], record, seen


def _stopped(folder: Path, stop_at: int, **more: Any) -> str:
    """Run a job in which all ranks stop in the same step."""
    with pytest.raises(_Stop):
        _train(folder, stop_at=stop_at, **more)
    return "stopped"


def _same(a: Any, b: Any) -> None:
    for (mine, record, _), (others, other_record, _) in zip(a, b, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)
        assert record == other_record


@pytest.mark.parametrize("reseed", [True, False])
def test_a_job_that_is_started_again_ends_with_the_same_bits(tmp_path: Path, reseed: bool) -> None:
    straight = run_ranks(2, partial(_train, reseed=reseed), None)
    for stop_at in (2, 9, 11, 17):  # before the first checkpoint, in an epoch, ...
        folder = tmp_path / str(stop_at)
        folder.mkdir()
        assert run_ranks(2, partial(_stopped, reseed=reseed), folder, stop_at) == ["stopped"] * 2
        steps = [info.step for info in checkpoint.list(folder)]
        assert steps == [step for step in (16, 12, 8, 4) if step <= stop_at][:2]
        _same(run_ranks(2, partial(_train, reseed=reseed), folder), straight)
    _same(run_ranks(2, partial(_train, reseed=reseed), folder), straight)  # no steps remain
    longer = run_ranks(2, partial(_train, epochs=4, reseed=reseed), folder)
    _same(longer, run_ranks(2, partial(_train, epochs=4, reseed=reseed), None))


def test_restart_with_fewer_ranks_processes_the_rest_of_the_epoch(tmp_path: Path) -> None:
    """Process 24 of the 48 samples of an epoch on 3 ranks, and the other 24 samples on 2 ranks."""
    assert run_ranks(3, partial(_stopped, every=1, keep=None), tmp_path, 2) == ["stopped"] * 3
    steps = {info.step: info.path for info in checkpoint.list(tmp_path)}
    assert sorted(steps) == [1, 2]
    two = run_ranks(2, partial(_train, epochs=1, every=None), tmp_path)
    seen = sorted(number for _, _, ((*numbers,),) in two for number in numbers)
    assert len(seen) == len(set(seen)) == 24
    whole = run_ranks(3, partial(_train, epochs=1), None)
    first = {number for _, _, (numbers,) in whole for number in numbers[:8]}
    assert first.isdisjoint(seen)
    assert len(first) == 24


def test_own_tensors_are_restored_only_on_ranks_that_saved_them(tmp_path: Path) -> None:
    def main() -> tuple[list[float], int]:
        own = torch.tensor([0.0])
        state = State(own=[own], checkpoints=Checkpoints(tmp_path, every=1))
        for step in state.steps(3):
            with step:
                own += 10.0 ** dist.get_rank()
            if step.index == 1 and dist.get_world_size() == 2:
                break
        return own.tolist(), state.steps_done

    run_ranks(2, main)
    ended = run_ranks(3, main)
    assert [own for own, _ in ended] == [[3.0], [30.0], [200.0]], ended


def test_checkpoint_of_another_model_is_refused_with_advice_about_the_state(tmp_path: Path) -> None:
    def train(size: int) -> None:
        state = State(weight=torch.zeros(size), checkpoints=Checkpoints(tmp_path, every=1))
        for step in state.steps(2):
            with step:
                pass

    def body() -> None:
        train(2)
        with pytest.raises(dist.CheckpointError, match=r"has shape \[2\] in .*, but \[3\] in") as caught:
            train(3)
        text = str(caught.value)
        assert "into=" not in text
        assert "\n  Pass State the objects of the saved training, or Checkpoints an empty folder" in text

    run_ranks(1, body)


def test_checkpoint_is_written_before_all_ranks_leave(tmp_path: Path) -> None:
    def main() -> tuple[Any, int, float]:
        weight = torch.zeros(1)
        state = State(weight=weight, leave_on=[signal.SIGUSR1], checkpoints=Checkpoints(tmp_path))
        try:
            for step in state.steps(10):
                with step:
                    if step.index == 3 and state.steps_done == 3 and not list(tmp_path.iterdir()):
                        os.kill(os.getpid(), signal.SIGUSR1)
                    gradient = torch.tensor([step.index + 1.0])
                    dist.all_reduce(gradient)
                    step.commit()
                    weight += gradient
        except SystemExit as end:
            return end.code, state.steps_done, weight.item()
        return "end", state.steps_done, weight.item()

    assert run_ranks(3, main) == [(0, 4, 30.0)] * 3
    assert [info.step for info in checkpoint.list(tmp_path)] == [4]
    assert run_ranks(3, main) == [("end", 10, 165.0)] * 3


def test_training_continues_if_epochs_is_called_with_a_later_end(tmp_path: Path) -> None:
    """Call ``epochs`` again with a later end, in the same process and in another one."""

    def main(*ends: int) -> tuple[float, int, list[int]]:
        weight, seen = torch.zeros(1), []
        state = State(weight=weight, checkpoints=Checkpoints(tmp_path))
        for end in ends:
            for epoch in state.epochs(end):
                seen.append(epoch)
                for step in state.steps(3):
                    with step:
                        gradient = torch.tensor([10.0**epoch])
                        dist.all_reduce(gradient)
                        step.commit()
                        weight += gradient
        return weight.item(), state.steps_done, seen

    assert run_ranks(2, main, 1, 2) == [(66.0, 6, [0, 1])] * 2
    assert [info.step for info in checkpoint.list(tmp_path)] == [6, 3]
    assert run_ranks(2, main, 2, 3) == [(666.0, 9, [2])] * 2


def _cannot_be_written(folder: Path, on_error: str) -> Any:
    """Train, but replace the checkpoint folder by a file in step 5.

    Returns:
        The error of the training, or the weights and the warnings about checkpoints.
    """

    def spoil(step: int) -> None:
        if step == 5 and dist.get_rank() == 0:
            for thread in threading.enumerate():  # a checkpoint has its final name before it is durable
                if thread.name == "allranks-checkpoint-4":
                    thread.join()
            folder.rename(folder.with_name("before"))
            folder.write_text("")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            weights, _, _ = _train(folder, in_step=spoil, on_error=on_error)
        except dist.CheckpointError as error:
            return str(error)
    return weights, [str(each.message) for each in told if "checkpoint" in str(each.message)]


def test_failed_checkpoint_write_stops_the_training_on_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(2, _cannot_be_written, tmp_path / "kept", "raise"):
        assert "step 8 was not saved" in said, said
        assert "rank 0" in said
    assert [info.step for info in checkpoint.list(tmp_path / "before")] == [4]


def test_on_error_warn_continues_the_training_after_a_failed_write(tmp_path: Path) -> None:
    straight = run_ranks(2, _train, None)
    (first, told), (second, quiet) = run_ranks(2, _cannot_be_written, tmp_path / "kept", "warn")
    torch.testing.assert_close([first, second], [straight[0][0], straight[1][0]], rtol=0, atol=0)
    assert len(told) >= 2
    assert "continues without this checkpoint" in told[0]
    assert "step 8" in told[0]
    assert quiet == []


def test_restart_raises_on_all_ranks_if_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    run_ranks(2, _stopped, tmp_path, 9)
    for saved in checkpoint.list(tmp_path):
        part = sorted(saved.path.glob("part-*"))[-1]
        data = bytearray(part.read_bytes())
        data[-3] ^= 4
        part.write_bytes(data)

    def main() -> str:
        with pytest.raises(dist.CheckpointError) as error:
            _train(tmp_path)
        return str(error.value)

    for said in run_ranks(2, main):
        assert "cannot continue from a checkpoint" in said
        assert part.name in said


def test_value_that_no_checkpoint_can_hold_is_refused_at_construction(tmp_path: Path) -> None:
    def main() -> str:
        with pytest.raises(dist.UsageError) as error:
            State(record={"file": object()}, checkpoints=Checkpoints(tmp_path))
        return str(error.value)

    (said,) = run_ranks(1, main)
    assert "record.file" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"every": 0}, "every=0"), ({"keep": 1.5}, "keep=1.5"), ({"on_error": "cry"}, "on_error='cry'")],
)
def test_wrong_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(dist.UsageError, match=says):
        Checkpoints("folder", **arguments)


DEATH = """
import os, signal, sys
import torch
import allranks as dist

dist.init_process_group(timeout=30)
weight = torch.zeros(1 << 20)
state = dist.resilience.State(weight=weight, checkpoints=dist.resilience.Checkpoints(sys.argv[1], every=5))
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
begun = None
for step in state.steps(30):
    with step:
        begun = step.index if begun is None else begun
        if first and step.index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.full_like(weight, step.index * (1.0 + dist.get_rank()))
        dist.all_reduce(gradient)
        step.commit()
        weight += gradient
print("end", dist.get_rank(), begun, weight[0].item(), flush=True)
"""


@pytest.mark.parametrize("options", [[], ["--elastic", "2"]])
def test_job_whose_ranks_all_die_continues_from_the_checkpoint(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "program.py"
    script.write_text(DEATH)
    words = [sys.executable, "-m", "allranks", "run", "-n", "3", "--restarts", "1", *options, script, tmp_path / "kept"]
    done = warm.run(words, timeout=100)
    assert done.returncode == 0, done
    lines = sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)
    assert lines in [[f"{rank} {begun} {6.0 * sum(range(30))}" for rank in range(3)] for begun in (10, 15)], done
