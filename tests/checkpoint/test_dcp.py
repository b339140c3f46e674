"""torch's distributed checkpoint in the allranks format, on allranks and on gloo; FSDP2 with allranks calls.

A checkpoint of one layout must load bit for bit into every other layout: FSDP2 on another number of ranks, plain
models, one process.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from allranks import CheckpointError, UsageError, checkpoint
from allranks.checkpoint import folders
from allranks.testing import run_ranks
from support.worlds import world

Numbers = dict[str, torch.Tensor]


def trained(seed: int, sharded: bool, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model whose shapes four ranks cannot divide, and its optimizer; the gradients are equal on all ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(steps):
        model(torch.ones(3, 6) * seed).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """Return all tensors, unsharded."""
    found = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value for key, value in state.items()}
    found["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for key, value in found.items()
    }


def assert_same(got: Numbers, expected: Numbers) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


def in_world(ranks: int, backend: str, act: Callable[[], Any], folder: Path, **options: Any) -> list[Any]:
    """Run a function that uses torch.distributed on each rank. Return the results."""
    meeting = folder / f"meeting-{ranks}-{len(list(folder.glob('meeting-*')))}"

    def on_rank() -> Any:
        warnings.simplefilter("ignore")  # torch's warning about its own names
        torch.set_num_threads(1)
        with world(backend, meeting):
            return act()

    return run_ranks(ranks, on_rank, init=False, timeout_s=300, **options)


def dcp_save(folder: Path, step: int, sharded: bool, extra: dict[str, Any]) -> Numbers:
    model, optimizer = trained(step, sharded)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, **extra}
    dcp.save(state, storage_writer=checkpoint.StorageWriter(folder, step=step))
    return numbers(model, optimizer)


def dcp_load(folder: Path, step: int | None, sharded: bool, extra: dict[str, Any]) -> Numbers:
    model, optimizer = trained(9, sharded, steps=0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, **extra}
    dcp.load(state, storage_reader=checkpoint.StorageReader(folder, step=step))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    extra.update({key: state[key] for key in extra})
    return numbers(model, optimizer)


VALUES = {
    "progress": {"step": 3, "best": float("inf"), "name": "run", "nothing": None},
    "pairs": [(1, 2.5), (3, 4.5)],
    "tuple": (1, torch.arange(3)),
    "mixed": [torch.ones(2), {"deep": b"bytes"}],
    "dtype": torch.bfloat16,
}
EMPTY = {
    "progress": {"step": 0, "best": 0.0, "name": "", "nothing": 1},
    "pairs": None,
    "tuple": None,
    "mixed": [torch.zeros(2), {"deep": b""}],
    "dtype": None,
}


@pytest.mark.parametrize("backend", ["allranks", "gloo"])
def test_checkpoint_of_four_ranks_loads_on_two_ranks_and_on_one(backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def saved() -> list[Numbers]:
        return [dcp_save(folder, 1, True, VALUES), dcp_save(folder, 2, False, VALUES)]

    def loaded() -> tuple[list[Numbers], dict[str, Any]]:
        extra = dict(EMPTY)
        return [dcp_load(folder, step, sharded, extra) for step in (1, 2) for sharded in (True, False)], extra

    expected = in_world(4, backend, saved, tmp_path)[0]
    assert [info.step for info in checkpoint.list(folder)] == [2, 1]
    assert checkpoint.list(folder)[0].ranks == 4
    for info in checkpoint.list(folder):
        assert checkpoint.verify(info) == []
        # no ZIP archive, as torch.save writes
        assert not any(b"PK\x03\x04" in path.read_bytes() for path in info.path.iterdir())
    for got, extra in in_world(2, backend, loaded, tmp_path):
        for number, each in enumerate(got):
            assert_same(each, expected[number // 2])
        assert str(extra) == str(VALUES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning about a single process
        assert_same(dcp_load(folder, 1, False, {}), expected[0])
        assert_same(dcp_load(folder, None, False, {}), expected[1])
    state = checkpoint.load(folder)
    assert_same(state["model"], {key: value for key, value in expected[1].items() if key in state["model"]})
    assert str({key: state[key] for key in VALUES}) == str(VALUES)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_without_elements_are_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "array": numpy.zeros(0),
        "tensor": torch.zeros(0, 3),
        "nested": {"list": [1, numpy.zeros((0, 3), dtype=numpy.int32)]},
        "weights": torch.ones(3),
    }
    dcp.save(state, storage_writer=checkpoint.StorageWriter(tmp_path, step=1))
    into: dict[str, Any] = {
        "array": numpy.ones(2),
        "tensor": torch.zeros(0, 3),
        "nested": {"list": [2, numpy.ones((1, 3), dtype=numpy.int32)]},
        "weights": torch.zeros(3),
    }
    dcp.load(into, storage_reader=checkpoint.StorageReader(tmp_path))
    assert str(into) == str(state)
    assert checkpoint.load(tmp_path)["array"].shape == (0,)


def test_dcp_loads_checkpoint_save_and_checkpoint_load_reads_dcp(tmp_path: Path) -> None:
    """Both directions; optimizers are saved through their state_dict."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def saved() -> Numbers:
        model, optimizer = trained(1, True)
        state = {"model": model, "optimizer": optimizer, "step": 3}
        checkpoint.save(state, ours, step=5)
        dcp.save(state, storage_writer=checkpoint.StorageWriter(theirs, step=5))
        return numbers(model, optimizer)

    def loaded() -> list[tuple[Numbers, int]]:
        found = []
        for sharded in (True, False):
            model, optimizer = trained(7, sharded)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            checkpoint.load(theirs, into=state)
            found.append((numbers(model, optimizer), state["step"]))
            model, optimizer = trained(7, sharded)
            state = {"model": model.state_dict(), "moments": optimizer.state_dict()["state"], "step": 0}
            state["optimizer"] = {"state": state.pop("moments")}
            dcp.load(state, storage_reader=checkpoint.StorageReader(ours))
            optimizer.param_groups[0]["lr"] = 0.1  # the loaded state does not contain the learning rate
            found.append((numbers(model, optimizer), state["step"]))
        return found

    expected = in_world(4, "allranks", saved, tmp_path)[0]
    for found in in_world(3, "allranks", loaded, tmp_path):
        for got, step in found:
            assert_same(got, expected)
            assert step == 3


def test_fully_sharded_models_with_checkpoint_save_and_load(tmp_path: Path) -> None:
    """Checkpoints of FSDP2 on four ranks and of a plain model on two ranks.

    1, 2 and 3 ranks load both into both kinds of model, with new optimizers.
    """
    folder = tmp_path / "checkpoints"

    def saved(sharded: bool) -> Numbers:
        model, optimizer = trained(1 + sharded, sharded)
        checkpoint.save({"model": model, "optimizer": optimizer}, folder, step=1 + sharded)
        return numbers(model, optimizer)

    def loaded() -> list[Numbers]:
        found = []
        for step in (1, 2):
            for sharded in (True, False):
                model, optimizer = trained(9, sharded, steps=0)
                checkpoint.load(folder, into={"model": model, "optimizer": optimizer}, step=step)
                if sharded:
                    moments = [state["exp_avg"] for state in optimizer.state.values()]
                    assert all(isinstance(moment, DTensor) for moment in moments)
                found.append(numbers(model, optimizer))
                model(torch.ones(3, 6)).sum().backward()
                optimizer.step()  # the optimizer's state must match its parameters
        return found

    expected = [in_world(2, "allranks", lambda: saved(False), tmp_path)[0]]
    expected += [in_world(4, "allranks", lambda: saved(True), tmp_path)[0]]
    for ranks in (1, 2, 3):
        for found in in_world(ranks, "allranks", loaded, tmp_path):
            for number, got in enumerate(found):
                assert_same(got, expected[number // 2])


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_async_save_in_a_thread_or_process(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def saved() -> float:
        how = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}[kind]
        tensor = distribute_tensor(torch.arange(10.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        for step in (1, 2):
            writer = checkpoint.StorageWriter(folder, step=step, keep=1)
            future = dcp.async_save({"t": tensor, "n": step}, storage_writer=writer, async_checkpointer_type=how)
            tensor.to_local().add_(1)  # must not change the checkpoint: the save has a copy
            future.result()
        return float(tensor.full_tensor().sum())

    environment = {"MASTER_ADDR": "127.0.0.1"}
    assert in_world(2, "allranks", saved, tmp_path, env=environment) == [65.0, 65.0]
    (only,) = checkpoint.list(folder)
    assert checkpoint.verify(only) == []
    assert only.ranks == 2
    state = checkpoint.load(only)
    assert state["n"] == 2
    assert torch.equal(state["t"], torch.arange(10.0) + 1)


def test_flipped_bit_is_reported_with_file_and_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def saved() -> None:
        whole = torch.arange(4096.0)
        state = {"layer": {"weight": distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])}}
        dcp.save(state, storage_writer=checkpoint.StorageWriter(folder, step=1))

    in_world(2, "allranks", saved, tmp_path)
    part = folder / "step-0000000001" / "part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-100] ^= 4
    part.write_bytes(content)
    for path in (folder, part.parent):
        said = refusal_of_load({"layer": {"weight": torch.zeros(4096)}}, checkpoint.StorageReader(path))
        assert "part-00001.safetensors is damaged in bytes" in said
        assert "tensor 'layer.weight', written by rank 1" in said
    manifest = part.parent / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"weight", b"height"))
    assert "is damaged: its contents do not have the digest" in refusal_of_load(
        {"layer": {"weight": torch.zeros(4096)}}, checkpoint.StorageReader(part.parent)
    )


def refusal_of_load(state: dict[str, Any], reader: Any) -> str:
    with pytest.raises(CheckpointException) as raised:
        alone(dcp.load, state, storage_reader=reader)
    return str(raised.value)


def alone(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function without other ranks, and without torch's warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **options)


class Opaque:
    """Class whose instances can be pickled but not saved in a checkpoint."""


def test_unsupported_value_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    """Failures of either rank. The same process can save afterwards."""
    folder = tmp_path / "checkpoints"

    def saved() -> list[str]:
        said = []
        for bad in (0, 1):
            state = {"weight": torch.ones(3), f"of {bad}": {"strange": Opaque()} if td.get_rank() == bad else {}}
            try:
                dcp.save(state, storage_writer=checkpoint.StorageWriter(folder, step=1))
            except CheckpointException as error:
                said.append(str(error))
        dcp.save({"weight": torch.ones(3)}, storage_writer=checkpoint.StorageWriter(folder, step=2))
        return said

    for said in in_world(2, "allranks", saved, tmp_path):
        assert ["'of 0.strange' is a Opaque" in said[0], "'of 1.strange' is a Opaque" in said[1]] == [True, True]
    assert sorted(path.name for path in folder.iterdir()) == [".job", ".lock", "step-0000000002"]
    assert checkpoint.verify(folder) == []
    with pytest.raises(UsageError, match="step=-1"):
        checkpoint.StorageWriter(folder, step=-1)
    with pytest.raises(UsageError, match="use_collectives"):
        alone(
            dcp.save, {}, storage_writer=checkpoint.StorageWriter(folder, step=3), no_dist=True, use_collectives=False
        )
    unflattened = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(CheckpointException, match="'a' of the state is a dict"):
        alone(dcp.save, {"a": {"b": 1}}, storage_writer=checkpoint.StorageWriter(folder, step=3), planner=unflattened)


def test_planner_that_returns_only_pickled_values(tmp_path: Path) -> None:
    """Check that pickled values are saved if torch can load them without running code."""

    class Pickling(dcp.DefaultSavePlanner):
        lookup_object = None

        def resolve_data(self, write_item: Any) -> Any:
            return self.transform_object(write_item, self.state_dict[write_item.index.fqn])

    writer = checkpoint.StorageWriter(tmp_path, step=1)
    alone(dcp.save, {"a": {"n": (3, None)}, "t": torch.ones(2)}, storage_writer=writer, planner=Pickling())
    assert str(checkpoint.load(tmp_path)) == str({"a": {"n": (3, None)}, "t": torch.ones(2)})
    with pytest.raises(CheckpointException, match="'a' of the state was pickled by Pickling"):
        alone(dcp.save, {"a": Opaque()}, storage_writer=writer, planner=Pickling())


def test_concurrent_saves_into_a_folder_are_refused(tmp_path: Path) -> None:
    first, second = (checkpoint.StorageWriter(tmp_path, step=step) for step in (1, 2))
    begun, end = threading.Event(), threading.Event()

    def begin() -> None:
        first.prepare_global_plan([])
        begun.set()
        end.wait()

    thread = threading.Thread(target=begin)
    thread.start()
    begun.wait()
    with pytest.raises(UsageError, match="this process is already saving into"):
        second.prepare_global_plan([])
    end.set()
    thread.join()
    second.prepare_global_plan([])  # succeeds: no call ends the first save, so it counts as failed on another rank
    assert len(list(tmp_path.glob(".step-*.partial"))) == 1
    del second
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".job", ".lock"]


def test_writer_is_collected_while_another_save_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector can run at any allocation, also in the thread that holds the lock."""
    first, second = (checkpoint.StorageWriter(tmp_path / name, step=1) for name in ("first", "second"))
    first.prepare_global_plan([])
    first.itself = first  # a reference cycle, so that only the garbage collector deletes the writer
    ended, real = [], folders.new_partial

    def new_partial(*arguments: Any) -> Path:
        gc.collect()
        ended.append(not list((tmp_path / "first").glob(".step-*.partial")))
        return real(*arguments)

    monkeypatch.setattr(folders, "new_partial", new_partial)
    gc.disable()
    try:
        del first
        thread = threading.Thread(target=second.prepare_global_plan, args=([],), daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert ended == [True]
    assert len(list((tmp_path / "second").glob(".step-*.partial"))) == 1


def test_cached_plans_save_into_the_new_folder(tmp_path: Path) -> None:
    """A planner that caches its plans returns those of the first save, whose temporary folder no longer exists."""
    folder = tmp_path / "checkpoints"

    def saved() -> None:
        for step in (1, 2, 3):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {"t": torch.full((3,), step), "own": {f"of {td.get_rank()}": torch.full((2,), step)}}
            dcp.save(state, storage_writer=checkpoint.StorageWriter(folder, step=step), planner=planner)

    in_world(2, "allranks", saved, tmp_path)
    assert [info.step for info in checkpoint.list(folder)] == [3, 2, 1]
    for info in checkpoint.list(folder):
        assert checkpoint.verify(info) == []
        own = checkpoint.load(info)["own"]
        assert {key: value.tolist() for key, value in own.items()} == {f"of {n}": [info.step] * 2 for n in (0, 1)}


def test_ambiguous_names_are_saved_and_loaded(tmp_path: Path) -> None:
    """Tied weights, numbers as keys, tensors of one rank, and states that torch's names cannot distinguish."""
    tied = torch.arange(4.0)

    def saved() -> None:
        own = torch.tensor([float(td.get_rank())])
        state = {"a": tied, "b": {"c": tied}, "means": {0: own}, "n": numpy.arange(3), "list": [1, [2, torch.ones(1)]]}
        checkpoint.save(state, tmp_path / "many", step=1)

    def loaded() -> dict[str, Any]:
        state = {
            "a": torch.zeros(4), "b": {"c": torch.zeros(4)}, "means": {0: torch.zeros(1)}, "n": None,
            "list": [0, [0, torch.zeros(1)]],
        }  # fmt: skip
        dcp.load(state, storage_reader=checkpoint.StorageReader(tmp_path / "many"))
        return state

    in_world(2, "allranks", saved, tmp_path)
    for rank, state in enumerate(in_world(3, "allranks", loaded, tmp_path)):
        assert torch.equal(state["a"], tied)
        assert torch.equal(state["b"]["c"], tied)
        assert state["means"][0].item() == [0, 1, 0][rank]
        assert state["n"].tolist() == [0, 1, 2]
        assert state["list"] == [1, [2, torch.ones(1)]]
    checkpoint.save([torch.ones(1)], tmp_path / "list", step=1)
    assert "loads only dicts" in refusal_of_load({"a": 1}, checkpoint.StorageReader(tmp_path / "list"))
    checkpoint.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "twice", step=1)
    assert "has one name for" in refusal_of_load({"a": {"b": 1}}, checkpoint.StorageReader(tmp_path / "twice"))
    reader = checkpoint.StorageReader(tmp_path / "many")
    plans = [LoadPlan([], storage_data="step-0000000001"), LoadPlan([], storage_data="step-0000000002")]
    with pytest.raises(CheckpointError, match="rank 0: step-0000000001, rank 1: step-0000000002"):
        reader.prepare_global_plan(plans)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_as_default_replaces_the_format_of_torch(tmp_path: Path) -> None:
    """Programs that pass torch's classes or only a path, as Accelerate and Lightning do."""
    state = {"x": torch.arange(10.0), "step": 5}

    def loaded(**how: Any) -> Any:
        into = {"x": torch.zeros(10), "step": 0}
        dcp.load(into, **how)
        assert torch.equal(into["x"], state["x"])
        return into["step"]

    dcp.save(state, checkpoint_id=tmp_path / "torchs")
    plain = dcp.FileSystemWriter
    with checkpoint.as_default(step=7):
        dcp.save(state, checkpoint_id=tmp_path / "path")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "writer", thread_count=4))
        dcp.async_save(state, checkpoint_id=tmp_path / "async").result()
        for name in ("torchs", "path", "writer", "async"):
            assert loaded(checkpoint_id=tmp_path / name) == 5
            assert loaded(storage_reader=dcp.FileSystemReader(tmp_path / name)) == 5
        with pytest.raises(UsageError, match=r"FileSystemWriter\(\.\.\., overwrite=False\) is not supported"):
            dcp.FileSystemWriter(tmp_path, overwrite=False)
        with pytest.raises(UsageError, match=r"FileSystemWriter\(\.\.\., _extensions\) is not supported"):
            dcp.FileSystemWriter(tmp_path, _extensions=[])
        with pytest.raises(UsageError, match="step=-1"), checkpoint.as_default(step=-1):
            pass
    assert dcp.FileSystemWriter is plain
    for name in ("path", "writer", "async"):
        found = checkpoint.latest(tmp_path / name)
        assert found is not None
        assert found.path.name == "step-0000000007"
    assert loaded(checkpoint_id=tmp_path / "torchs") == 5
    dcp.save(state, checkpoint_id=tmp_path / "after")
    assert (tmp_path / "after" / ".metadata").exists()


def test_as_default_reports_an_incompatible_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.checkpoint._storage_utils.FileSystemReader")
    with pytest.raises(UsageError, match=r"has no torch\.distributed\.checkpoint\._storage_utils\.FileSystemReader"):
        with checkpoint.as_default():
            pass
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint._storage_utils", None)
    with pytest.raises(UsageError, match=r"has no torch\.distributed\.checkpoint\._storage_utils"):
        with checkpoint.as_default():
            pass


def test_checkpoint_moves_between_wrappers_and_back(tmp_path: Path) -> None:
    """DDP on 2 ranks, FSDP2 on 4, FSDP2 on 8, DDP again, and one process.

    The result depends neither on the wrapper nor on the number of ranks.
    """
    folders = [tmp_path / name for name in "abc"]

    def begins() -> Numbers:
        model, optimizer = trained(1, sharded=False)
        wrapped = nn.parallel.DistributedDataParallel(model)
        checkpoint.save({"model": wrapped, "optimizer": optimizer}, folders[0], step=1)
        checkpoint.save({"model": wrapped.state_dict(), "optimizer": optimizer}, folders[2], step=1)
        return numbers(model, optimizer)

    def shards() -> Numbers:
        model, optimizer = trained(2, sharded=True)
        checkpoint.load(folders[0], into={"model": model, "optimizer": optimizer})
        checkpoint.save({"model": model, "optimizer": optimizer}, folders[1], step=1)
        return numbers(model, optimizer)

    def ends() -> list[Numbers]:
        model, optimizer = trained(3, sharded=True)
        checkpoint.load(folders[1], into={"model": model, "optimizer": optimizer})
        found = [numbers(model, optimizer)]
        for folder in folders[1:]:  # the last folder has the wrapper's prefix in its names
            plain, optimizer = trained(4, sharded=False)
            wrapped = nn.parallel.DistributedDataParallel(plain)
            checkpoint.load(folder, into={"model": wrapped, "optimizer": optimizer})
            found.append(numbers(plain, optimizer))
        return found

    expected = in_world(2, "allranks", begins, tmp_path)[0]
    for got in in_world(4, "allranks", shards, tmp_path):
        assert_same(got, expected)
    for each in in_world(8, "allranks", ends, tmp_path):
        for got in each:
            assert_same(got, expected)
    model, optimizer = trained(5, sharded=False)
    checkpoint.load(folders[1], into={"model": torch.compile(model, backend="eager"), "optimizer": optimizer})
    assert_same(numbers(model, optimizer), expected)
