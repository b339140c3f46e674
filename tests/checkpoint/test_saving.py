"""Saves and loads on several ranks: which rank writes which tensor, and how other numbers of ranks load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import allranks as dist
from allranks import CheckpointError, UsageError, checkpoint
from allranks.testing import run_ranks
from support import warm

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.contiguous()
    return bytes(plain.view(torch.uint8).flatten().tolist()) if plain.dim() else bytes_of(plain.reshape(1))


def whole_state(rank: int, ranks: int) -> dict[str, Any]:
    """Return values of every kind. Each rank has its own running means, generators and shard."""
    model, optimizer = model_and_optimizer(1)
    model[1].running_mean += rank  # type: ignore[index, operator]
    torch.manual_seed(100 + rank)
    return {
        "model": model,
        "optimizer": optimizer,
        "random": checkpoint.RandomState(),
        "epoch": 7,
        "of_rank": {"number": rank},
        "tensors": {str(dtype): torch.arange(6).reshape(2, 3).to(dtype).t() for dtype in DTYPES},
        "empty": [torch.empty(0, 3), torch.tensor(2.5)],
        "shard": checkpoint.Shard(torch.arange(6.0).reshape(2, 3) + 6 * rank, (2 * rank, 0), (2 * ranks, 3)),
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a rank without the values that depend on the number of ranks."""
    return {
        "model": state["model"].state_dict(),
        "optimizer": state["optimizer"].state_dict(),
        "epoch": state["epoch"],
        "tensors": state["tensors"],
        "empty": state["empty"],
    }


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("there", [1, 2, 3, 8])
def test_any_number_of_ranks_loads(tmp_path: Path, how: str, there: int) -> None:
    def saves() -> None:
        rank = dist.get_rank()
        state = whole_state(rank, 4)
        if how == "save":
            path = checkpoint.save(state, tmp_path, step=3)
        else:
            saving = checkpoint.save_async(state, tmp_path, step=3)
            for parameter in state["model"].parameters():  # parameters may change as soon as save_async returns
                parameter.data.fill_(-1)
            path = saving.wait(60)
        assert path == tmp_path / "step-0000000003"

    def loads() -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model, optimizer = model_and_optimizer(2)
        rows = 8 // ranks if 8 % ranks == 0 else 3
        mine = max(0, min(rows, 8 - rows * rank))
        into = {
            **whole_state(rank % 4, 4),
            "model": model,
            "optimizer": optimizer,
            "epoch": 0,
            "of_rank": {"number": -1},
            "shard": checkpoint.Shard(torch.zeros(mine, 3), (min(rows * rank, 8), 0), (8, 3)),
        }
        for tensor in into["tensors"].values():
            tensor.zero_()
        assert checkpoint.load(tmp_path, into=into) is into
        saved_by = rank if rank < 4 else 0
        drawn = torch.rand(3)
        right = whole_state(saved_by, 4)
        assert torch.equal(drawn, torch.rand(3))
        assert same(plain(into), plain(right))
        assert into["of_rank"] == {"number": saved_by}
        begin = min(rows * rank, 8)
        assert torch.equal(into["shard"].tensor, torch.arange(24.0).reshape(8, 3)[begin : begin + mine])

    run_ranks(4, saves)
    run_ranks(there, loads)
    assert checkpoint.verify(tmp_path) == []
    alone = checkpoint.load(tmp_path)  # without ranks
    assert torch.equal(alone["shard"], torch.arange(24.0).reshape(8, 3))
    assert same(alone["tensors"], whole_state(0, 4)["tensors"])


def test_equal_tensors_are_written_once(tmp_path: Path) -> None:
    """Check also that safetensors can read the parts."""

    def saves() -> None:
        tensors = {f"t{n}": torch.full((1000,), float(n)) for n in range(10)}
        checkpoint.save({"same": tensors, "mine": torch.full((4,), float(dist.get_rank()))}, tmp_path, step=0)

    run_ranks(2, saves)
    parts = sorted((tmp_path / "step-0000000000").glob("*.safetensors"))
    found = [safetensors.torch.load_file(part) for part in parts]
    names = [name for part in found for name in part]
    assert sorted(names) == sorted([*(f"same.t{n}" for n in range(10)), "mine#0", "mine#1"])
    assert [len(part) for part in found] == [6, 6]
    assert all(
        torch.equal(part[f"same.t{n}"], torch.full((1000,), float(n)))
        for part in found
        for n in range(10)
        if f"same.t{n}" in part
    )


def test_tensors_of_a_multiple_of_64_bytes_are_aligned(tmp_path: Path) -> None:
    """Alignment with any neighboring tensors and any length of the header."""
    for step in range(20):
        state = {"a": torch.ones(10), "b" * (step + 1): torch.ones(16), "c": torch.ones(64, 3)}
        checkpoint.save(state, tmp_path, step=step)
        (part,) = (tmp_path / f"step-{step:010}").glob("*.safetensors")
        length = int.from_bytes(part.read_bytes()[:8], "little")
        head = json.loads(part.read_bytes()[8 : 8 + length])
        begins = {name: 8 + length + head[name]["data_offsets"][0] for name in state}
        assert [begin % 64 for name, begin in begins.items() if name != "a"] == [0, 0]


def test_large_tensors_that_differ_are_written_by_each_rank(tmp_path: Path) -> None:
    def saves() -> Any:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        state = {name: torch.zeros(50_000) for name in ("differs", "in one element", "own", "same", "alike")}
        state["differs"].normal_()
        state["in one element"][33_333] = state["alike"][33_333] = rank
        checkpoint.save(state, tmp_path, step=0, own=["own"], alike=["alike"])
        into = {name: torch.empty(50_000) for name in state}
        checkpoint.load(tmp_path, into=into)
        values: list[Any] = [None, None]
        dist.all_gather_object(values, into.pop("alike")[33_333].item())
        assert values[0] == values[1]  # the difference is not in a sample, so only one rank's value was written
        state.pop("alike")
        assert same(into, state)

    run_ranks(2, saves)
    assert sum(path.stat().st_size for path in (tmp_path / "step-0000000000").glob("*.safetensors")) // 200_000 == 8


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": layer, "b": layer})
    checkpoint.save({"model": model}, tmp_path, step=0)
    (part,) = (tmp_path / "step-0000000000").glob("*.safetensors")
    assert sorted(safetensors.torch.load_file(part)) == ["model.a.bias", "model.a.weight"]
    found = checkpoint.load(tmp_path)
    assert found["model"]["a.weight"] is found["model"]["b.weight"]


def test_keep_and_keep_every_select_the_checkpoints_to_keep(tmp_path: Path) -> None:
    for step in range(1, 13):
        checkpoint.save({"step": step}, tmp_path, step=step, keep=2, keep_every=5)
    assert [info.step for info in checkpoint.list(tmp_path)] == [12, 11, 10, 5]
    assert checkpoint.load(tmp_path, step=5) == {"step": 5}
    with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
        checkpoint.load(tmp_path, step=4)
    assert sorted(os.listdir(tmp_path)) == [".job", ".lock", *(f"step-{n:010}" for n in (5, 10, 11, 12))]


def test_save_of_an_existing_step_replaces_it(tmp_path: Path) -> None:
    first = checkpoint.save({"x": 1}, tmp_path, step=1)
    second = checkpoint.save({"x": 2}, tmp_path, step=1)
    third = checkpoint.save({"x": 3}, tmp_path, step=1)
    assert (first, second, third) == tuple(tmp_path / f"step-0000000001{end}" for end in ("", "-2", "-3"))
    assert [info.path for info in checkpoint.list(tmp_path)] == [third]
    assert checkpoint.load(tmp_path) == {"x": 3}


def test_part_of_a_state_is_loaded(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(1)
    checkpoint.save({"model": model, "optimizer": optimizer, "epoch": 3}, tmp_path, step=0)
    other, _ = model_and_optimizer(2)
    checkpoint.load(tmp_path, into={"model": other})
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"other": 1}, "the checkpoint has no 'other'; it has 'model', 'tensor', 'pair'"),
        ({"model": nn.Linear(2, 3)}, "tensor 'model.weight' has shape [3, 3]"),
        ({"model": nn.Sequential(nn.Linear(3, 3))}, "the checkpoint has no '0.weight', '0.bias' at 'model'"),
        ({"tensor": torch.zeros(4)}, "tensor 'tensor' has shape [3]"),
        ({"tensor": {"a": 1}}, "'tensor' is a dict in the state to fill, but not in the checkpoint"),
        ({"pair": (1, 2, 3)}, "'pair' has 3 items in the state to fill, but 2 in the checkpoint"),
        ({"model": torch.zeros(1)}, "'model' is a tensor in the state to fill"),
    ],
)
def test_state_that_does_not_match_the_checkpoint_is_refused(tmp_path: Path, into: Any, words: str) -> None:
    checkpoint.save({"model": nn.Linear(3, 3), "tensor": torch.zeros(3), "pair": (1, 2)}, tmp_path, step=0)
    with pytest.raises(UsageError) as caught:
        checkpoint.load(tmp_path, into=into)
    assert words in str(caught.value)


def test_empty_and_missing_folders_have_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        checkpoint.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint.load(tmp_path / "none")


def test_invalid_arguments_are_refused() -> None:
    for words, call in (
        ("step=-1: expected an integer", lambda: checkpoint.save({}, "x", step=-1)),
        ("keep=0: expected an integer that is at least 1", lambda: checkpoint.save({}, "x", step=1, keep=0)),
        ("keep=True: expected an integer that is at least 1", lambda: checkpoint.save({}, "x", step=1, keep=True)),
        ("apply only to checkpoints of all ranks.\n  Pass step=N", lambda: checkpoint.save({}, "x", keep=1)),
        (
            "the path has type dict; expected a string or a path object.\n  Pass the arguments",
            lambda: checkpoint.save("x", {}),
        ),
        ("in this order: save_async(state, path)", lambda: checkpoint.save_async("x", {}, step=1)),
        ("only dense tensors", lambda: checkpoint.save({"a": torch.zeros(2).to_sparse()}, "x", step=1)),
        ("only dense tensors", lambda: checkpoint.save({"a": torch.zeros(2, device="meta")}, "x", step=1)),
        ("is not inside a tensor of shape", lambda: checkpoint.Shard(torch.zeros(2), (1,), (2,))),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert words in str(caught.value)
    assert not os.path.exists("x")


def test_save_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    def saves() -> list[str]:
        rank = dist.get_rank()
        checkpoint.save({"x": torch.ones(3)}, tmp_path, step=1)
        messages = []
        for state in ({"x": object() if rank == 1 else 1}, {"x": checkpoint.Shard(torch.ones(1), (0,), (2,))}):
            for save in (checkpoint.save, checkpoint.save_async):
                with pytest.raises(UsageError) as caught:
                    save(state, tmp_path, step=2)
                messages.append(str(caught.value))
        checkpoint.save({"x": torch.ones(3)}, tmp_path, step=3)
        return messages

    first, second = run_ranks(2, saves)
    assert first == second
    assert first is not None
    assert re.match(r"checkpoint.save: rank 1 \(.*, pid \d+\): 'x' is a object", first[0])
    assert "the shards of tensor 'x' do not cover" in first[2]
    assert [info.step for info in checkpoint.list(tmp_path)] == [3, 1]


def test_full_disk_fails_the_save_and_the_next_save_succeeds(tmp_path: Path) -> None:
    """A separate small file system. The next save is smaller and succeeds."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a file system requires root")
    try:

        def saves() -> None:
            small, large = {"x": torch.ones(1000)}, {"x": torch.ones(2_000_000), "y": torch.ones(10)}
            checkpoint.save(small, tmp_path, step=1)
            with pytest.raises(
                CheckpointError, match=r"step 2 was not saved into .*: ranks? [01].*: No space left on device"
            ):
                checkpoint.save(large, tmp_path, step=2)
            saving = checkpoint.save_async(large, tmp_path, step=2)
            with pytest.raises(CheckpointError, match="No space left on device"):
                saving.wait(60)
            checkpoint.save_async(large, tmp_path, step=2)
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpoint.save_async(small, tmp_path, step=3)  # the latest call that can report the failure
            checkpoint.save_async(small, tmp_path, step=3).wait(60)

        run_ranks(2, saves)
        assert [info.step for info in checkpoint.list(tmp_path)] == [3, 1]
        assert sorted(os.listdir(tmp_path)) == [".job", ".lock", "step-0000000001", "step-0000000003"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"File exists|Not a directory"):
        checkpoint.save({"x": 1}, tmp_path / "file", step=1)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a file system requires root")
    try:
        with pytest.raises(CheckpointError, match="Read-only file system"):
            checkpoint.save({"x": 1}, tmp_path / "folder", step=1)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


HOLDS = """
import sys, time
from pathlib import Path
from allranks.checkpoint.folders import hold_folder
with hold_folder(Path(sys.argv[1]), "the other"):
    print("held", flush=True)
    time.sleep(100)
"""


def test_second_job_in_a_folder_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError) as caught:
            checkpoint.save({"x": 1}, tmp_path, step=1)
        assert f"pid {other.pid}, run 'the other', since 20" in str(caught.value)
        assert f"saves into {tmp_path} until its processes have exited" in str(caught.value)
        (tmp_path / ".step-0000000009.0011aabb.partial").mkdir()
        other.kill()
    checkpoint.save({"x": 1}, tmp_path, step=1)
    assert sorted(os.listdir(tmp_path)) == [".job", ".lock", "step-0000000001"]


def test_background_save_does_not_interfere_with_collectives(tmp_path: Path) -> None:
    def saves() -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(5):
            saving = checkpoint.save_async({"x": torch.full((300_000,), float(step))}, tmp_path, step=step, keep=2)
            for _ in range(50):
                tensor = torch.full((100,), float(rank))
                dist.all_reduce(tensor)
                assert tensor[0] == ranks * (ranks - 1) / 2
            assert f"<Saving of step {step} into {tmp_path}: " in repr(saving)
        saving.wait(60)
        assert saving.done()

    run_ranks(3, saves)
    assert [info.step for info in checkpoint.list(tmp_path)] == [4, 3]
    assert checkpoint.load(tmp_path)["x"][0] == 4


def test_process_exits_after_its_background_save_is_complete(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from allranks import checkpoint;"
        " checkpoint.save_async({'x': torch.ones(5_000_000)}, sys.argv[1], step=1)"
    )
    warm.run([sys.executable, "-c", program, tmp_path], check=True)
    assert checkpoint.verify(tmp_path) == []


def test_save_and_load_in_a_subgroup(tmp_path: Path) -> None:
    def saves() -> None:
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        if rank:
            checkpoint.save({"x": torch.tensor(rank)}, tmp_path, step=1, group=group)
            into = {"x": torch.tensor(0)}
            checkpoint.load(tmp_path, into=into, group=group)
            assert into["x"] == rank
        dist.barrier()

    run_ranks(3, saves)
    (info,) = checkpoint.list(tmp_path)
    assert info.ranks == 2


def test_background_thread_exits_after_the_save(tmp_path: Path) -> None:
    before = threading.active_count()
    checkpoint.save_async({"x": torch.ones(3)}, tmp_path, step=1).wait(60)
    for _ in range(1000):
        if threading.active_count() == before:
            return
        threading.Event().wait(0.005)
    raise AssertionError("a thread still runs")
