"""Groups that a program creates with torch's internal function, beside the world or before it.

Trainers that feed inference engines (OpenRLHF, verl, TRL) have ranks of two worlds in such a group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from allranks.testing import run_ranks

LIMIT = timedelta(seconds=30)


def _group(folder: Path, backend: str, name: str, rank: int, size: int) -> Any:
    store = c10d.PrefixStore(name, distributed.FileStore(str(folder / name), size))
    made, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), store, group_name=name, timeout=LIMIT
    )
    c10d._world.pg_group_ranks[made] = {number: number for number in range(size)}
    return made


def _sum(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    distributed.all_reduce(tensor, group=group)
    return tensor.item()


def _choose(backend: str) -> str:
    """Return the name of the backend for torch; let allranks replace gloo if requested."""
    if backend == "instead of gloo":
        from allranks._plugin.gloo import stand_in

        stand_in()
        return "gloo"
    return "allranks"


@pytest.mark.parametrize("backend", ["allranks", "instead of gloo"])
def test_groups_created_before_and_beside_the_world_give_correct_sums(tmp_path: Path, backend: str) -> None:
    def body() -> list[float]:
        rank, name = int(os.environ["RANK"]), _choose(backend)
        found = []
        first = _group(tmp_path, name, "first", rank, 2)
        found.append(_sum(first, rank + 1.0))
        distributed.init_process_group(
            name, init_method=f"file://{tmp_path}/world", rank=rank, world_size=2, timeout=LIMIT
        )
        second = _group(tmp_path, name, "second", 1 - rank, 2)  # with the ranks in reverse order
        sub = distributed.new_group([0, 1])
        found += [_sum(group, rank + 1.0) for group in (None, first, second, sub)]
        distributed.destroy_process_group(second)
        found += [_sum(None, 1.0), _sum(first, 2.0)]
        distributed.destroy_process_group()
        return found

    assert run_ranks(2, body, init=False) == [[3.0] * 5 + [2.0, 4.0]] * 2


def test_one_group_can_contain_the_ranks_of_two_worlds(tmp_path: Path) -> None:
    def body() -> tuple[float, float]:
        rank, name = int(os.environ["RANK"]), _choose("allranks")
        place, size = (rank, 2) if rank < 2 else (0, 1)
        store = f"file://{tmp_path}/world of {size}"
        distributed.init_process_group(name, init_method=store, rank=place, world_size=size, timeout=LIMIT)
        everybody = _group(tmp_path, name, "weights", rank, 3)
        result = _sum(None, rank + 1.0), _sum(everybody, rank + 1.0)
        distributed.destroy_process_group()
        return result

    assert run_ranks(3, body, init=False) == [(3.0, 6.0), (3.0, 6.0), (3.0, 6.0)]
