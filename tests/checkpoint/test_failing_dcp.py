"""Saves and loads of torch's distributed checkpoint in the allranks format on a failing disk.

If one rank fails, all ranks raise an error that names the rank, the folder and the cause. The previous checkpoint
stays, and no other files remain.
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
    """State of which each rank writes a part."""
    return {"x": distribute_tensor(torch.arange(3000.0) + step, init_device_mesh("cpu", (RANKS,)), [Shard(0)])}


def save(folder: Path, step: int) -> None:
    dcp.save(state(step), storage_writer=checkpoint.StorageWriter(folder, step=step))


def left_in(folder: Path) -> list[str]:
    """Return the file names in a folder after all ranks have deleted their writers."""
    gc.collect()
    td.barrier()
    names = sorted(os.listdir(folder))
    td.barrier()
    return names


def test_failed_call_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
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
def test_unreadable_file_leaves_the_state_unchanged(tmp_path: Path, how: str) -> None:
    """Check all ranks, although only one of them needs the file."""
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
