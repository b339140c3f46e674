"""Saves and loads of torch's distributed checkpoint over our form, on a disk that fails.

A failure of one rank is one of all, which names the rank, the folder and the cause. The older checkpoint stays, and
nothing else does.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from allranks import checkpoint
from allranks.testing import run_ranks
from support.failing_calls import FAILURES
from support.worlds import world

RANKS = 2


def in_world(meeting: Path, act: Any) -> list[Any]:
    def on_rank() -> Any:
        torch.set_num_threads(1)
        with world("allranks", meeting):
            return act()

    return run_ranks(RANKS, on_rank, init=False, timeout_s=300)


def state(step: int) -> dict[str, Any]:
    """What each rank writes a part of."""
    return {"x": distribute_tensor(torch.arange(3000.0) + step, init_device_mesh("cpu", (RANKS,)), [Shard(0)])}


def save(folder: Path, step: int) -> None:
    dcp.save(state(step), storage_writer=checkpoint.StorageWriter(folder, step=step))


def left_in(folder: Path) -> list[str]:
    """What is there when all ranks have dropped their writers."""
    gc.collect()
    td.barrier()
    names = sorted(os.listdir(folder))
    td.barrier()
    return names


def test_a_call_that_fails_on_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def saves() -> dict[str, str]:
        rank, said = td.get_rank(), {}
        save(folder, 1)
        for name, failure in FAILURES.items():
            for victim in range(1 if failure.is_of_the_first else RANKS):
                with contextlib.ExitStack() as stack:
                    if rank == victim:
                        stack.enter_context(failure.inject())
                    with pytest.raises(CheckpointException) as caught:
                        save(folder, 2)
                said[f"{name} {victim}"] = str(caught.value)
                told = f"checkpoint.StorageWriter: step 2 was not saved into {folder}: rank {victim} ("
                for part in (told, os.strerror(failure.error), "Earlier checkpoints are unchanged"):
                    assert part in str(caught.value), (name, victim, part, str(caught.value))
                del caught
                assert left_in(folder) == [".job", ".lock", "step-0000000001"], (name, victim)
        found = state(9)
        dcp.load(found, storage_reader=checkpoint.StorageReader(folder))
        assert torch.equal(found["x"].full_tensor(), torch.arange(3000.0) + 1)
        save(folder, 3)
        return said

    first, second = in_world(tmp_path / "meeting", saves)
    assert first == second
    assert [info.step for info in checkpoint.list(folder)] == [3, 1]
    assert checkpoint.verify(folder) == []


@pytest.mark.parametrize("how", ["missing", "shorter"])
def test_a_file_that_cannot_be_read_leaves_the_state_as_it_was(tmp_path: Path, how: str) -> None:
    """On all ranks, whichever of them needs it."""
    folder = tmp_path / "checkpoints"

    def loads() -> tuple[str, bool]:
        save(folder, 1)
        td.barrier()
        part = folder / "step-0000000001" / "part-00001.safetensors"
        if td.get_rank() == 0:
            part.unlink() if how == "missing" else os.truncate(part, 100)
        td.barrier()
        found, reader = state(7), checkpoint.StorageReader(folder / "step-0000000001")
        with pytest.raises(CheckpointException) as caught:
            dcp.load(found, storage_reader=reader)
        return str(caught.value), torch.equal(found["x"].full_tensor(), torch.arange(3000.0) + 7)

    for said, is_as_it_was in in_world(tmp_path / "meeting", loads):
        assert "part-00001.safetensors" in said
        assert {"missing": "is missing; rank 1 wrote it", "shorter": "100 bytes"}[how] in said
        assert is_as_it_was
