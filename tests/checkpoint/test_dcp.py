"""torch's distributed checkpoint over our form, by real ranks on allranks and on gloo; and FSDP2 with our own calls.

What one layout saves, all others must load, to the bit: FSDP2 on other numbers of ranks, plain models, one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks import checkpoint
from allranks.testing import run_ranks
from support.worlds import world

Numbers = dict[str, torch.Tensor]


def trained(seed: int, sharded: bool, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose shapes four ranks cannot divide, and its optimizer; the same gradients on all ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(steps):
        model(torch.ones(3, 6) * seed).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """All tensors, whole."""
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
    """What each rank returns of a function that uses torch.distributed."""
    meeting = folder / f"meeting-{ranks}-{len(list(folder.glob('meeting-*')))}"

    def on_rank() -> Any:
        warnings.simplefilter("ignore")  # torch's, about its own names
        torch.set_num_threads(1)
        with world(backend, meeting):
            return act()

    return run_ranks(ranks, on_rank, init=False, timeout_s=300, **options)


def dcp_save(folder: Path, step: int, sharded: bool, extra: dict[str, Any]) -> Numbers:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained(step, sharded)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, **extra}
    dcp.save(state, storage_writer=checkpoint.StorageWriter(folder, step=step))
    return numbers(model, optimizer)


def dcp_load(folder: Path, step: int | None, sharded: bool, extra: dict[str, Any]) -> Numbers:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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
def test_four_ranks_save_others_load(backend: str, tmp_path: Path) -> None:
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
        assert not any(b"PK\x03\x04" in path.read_bytes() for path in info.path.iterdir())  # as torch.save writes
    for got, extra in in_world(2, backend, loaded, tmp_path):
        for number, each in enumerate(got):
            assert_same(each, expected[number // 2])
        assert str(extra) == str(VALUES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it is alone
        assert_same(dcp_load(folder, 1, False, {}), expected[0])
        assert_same(dcp_load(folder, None, False, {}), expected[1])
    state = checkpoint.load(folder)
    assert_same(state["model"], {key: value for key, value in expected[1].items() if key in state["model"]})
    assert str({key: state[key] for key in VALUES}) == str(VALUES)


def test_each_loads_what_the_other_has_written(tmp_path: Path) -> None:
    """checkpoint.save and dcp.load, dcp.save and checkpoint.load; optimizers by their own state_dict."""
    import torch.distributed.checkpoint as dcp

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
            optimizer.param_groups[0]["lr"] = 0.1  # not in what was loaded
            found.append((numbers(model, optimizer), state["step"]))
        return found

    expected = in_world(4, "allranks", saved, tmp_path)[0]
    for found in in_world(3, "allranks", loaded, tmp_path):
        for got, step in found:
            assert_same(got, expected)
            assert step == 3
