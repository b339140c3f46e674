"""Many simultaneous groups: the cost of each group, and small and large calls that share its memory."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.device_mesh import init_device_mesh

import allranks as dist
from allranks.testing import run_ranks


def _memory() -> int:
    """Return the memory of this process in bytes, with its share of the pages that several processes map."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(found[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


def test_group_with_small_calls_uses_little_memory() -> None:
    """Check that the rings of a group reuse little memory, independent of the number of calls."""
    groups, calls = 60, 100

    def main() -> tuple[int, int]:
        torch.set_num_threads(1)
        everybody = list(range(dist.get_world_size()))
        tensor = torch.ones(500)
        dist.all_reduce(tensor)
        dist.barrier()
        gc.collect()  # a later collection would write to pages that processes share, and count as growth
        memory, descriptors = _memory(), len(os.listdir("/proc/self/fd"))
        made = [dist.new_group(everybody) for _ in range(groups)]
        for _ in range(calls):
            for group in made:
                tensor.fill_(1)
                dist.all_reduce(tensor, group=group)
                assert tensor[-1] == len(everybody)
        dist.barrier()
        grown = _memory() - memory
        dist.barrier()
        return grown, len(os.listdir("/proc/self/fd")) - descriptors

    found = run_ranks(4, main)
    assert all(descriptors == 0 for _, descriptors in found), found
    assert sum(grown for grown, _ in found) / groups < 512 << 10, found


def _sums_along(mesh: Any, rank: int) -> None:
    """Check that the groups of each dimension match the coordinates of the mesh."""
    numbers = mesh.mesh
    where = (numbers == rank).nonzero()[0].tolist()
    for dim in range(numbers.ndim):
        rest = tuple(slice(None) if d == dim else at for d, at in enumerate(where))
        tensor = torch.tensor([2.0**rank])
        td.all_reduce(tensor, group=mesh.get_group(dim))
        assert tensor.item() == sum(2.0**other for other in numbers[rest].tolist())


def test_16_ranks_can_have_many_groups_and_four_dimensional_meshes(tmp_path: Path) -> None:
    """Check the cost of a group of 16 ranks: at most 1 MiB and no descriptor. Use meshes of allranks and of torch."""
    groups = 30

    def main() -> tuple[int, int]:
        torch.set_num_threads(1)
        rank, everybody = dist.get_rank(), list(range(dist.get_world_size()))
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.barrier()
        gc.collect()  # a later collection would write to pages that processes share, and count as growth
        memory, descriptors = _memory(), len(os.listdir("/proc/self/fd"))
        made = [dist.new_group(everybody) for _ in range(groups)]
        for group in made:
            tensor.fill_(1)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == len(everybody)
        dist.barrier()
        grown = _memory() - memory, len(os.listdir("/proc/self/fd")) - descriptors
        dist.barrier()
        names = ("pipe", "data", "shard", "tensor")
        _sums_along(dist.init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names), rank)
        dist.destroy_process_group()
        size = len(everybody)
        td.init_process_group("allranks", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=size)
        _sums_along(init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names), rank)
        td.destroy_process_group()
        return grown

    found = run_ranks(16, main)
    assert all(descriptors == 0 for _, descriptors in found), found
    assert sum(grown for grown, _ in found) / groups < 1 << 20, found


def test_small_and_large_calls_mix_in_any_order() -> None:
    def main() -> None:
        torch.set_num_threads(1)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        pick = random.Random(7)
        sizes = [1, 12, 100, 500, 512, 513, 3000, 5000, 40_000, 300_000]
        for number in range(400):
            verb, n, root = pick.choice(["reduce", "broadcast", "gather", "scatter"]), pick.choice(sizes), 0
            mine = torch.full((n,), float(number + rank))
            if verb == "reduce":
                dist.all_reduce(mine)
                assert (mine == ranks * number + sum(range(ranks))).all(), (number, verb, n)
            elif verb == "broadcast":
                root = number % ranks
                dist.broadcast(mine, root)
                assert (mine == number + root).all(), (number, verb, n)
            elif verb == "gather":
                whole = torch.empty(ranks * n)
                dist.all_gather_into_tensor(whole, mine)
                assert (whole.view(ranks, n) == number + torch.arange(ranks).view(-1, 1)).all(), (number, verb, n)
            else:
                parts = [torch.full((n,), float(number * r)) for r in range(ranks)] if rank == 0 else None
                dist.scatter(mine, parts)
                assert (mine == number * rank).all(), (number, verb, n)

    run_ranks(3, main)
