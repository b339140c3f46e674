"""torch's calls that create something from a group of the plugin: split_group, merge_remote_group and windows."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks

TIMEOUT = timedelta(seconds=30)


def init(folder: Path) -> tuple[int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = td.FileStore(str(folder / "store"), size)
    td.init_process_group("allranks", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return rank, size


def summed(group: object = None) -> float:
    tensor = torch.tensor([2.0 ** td.get_rank()])
    td.all_reduce(tensor, group=group)
    return tensor.item()


def test_split_groups_reduce_among_their_members(tmp_path: Path) -> None:
    def body() -> None:
        rank, _ = init(tmp_path)
        part = td.split_group(split_ranks=[[0, 2], [1]])
        assert summed(part) == (2 if rank == 1 else 5)
        assert td.get_process_group_ranks(part) == ([1] if rank == 1 else [0, 2])
        assert td.get_backend(part) == "allranks"
        outer = td.new_group([2, 1])
        if rank:
            one = td.split_group(outer, [[1]], timeout=TIMEOUT, group_desc="the last one")
            if rank == 2:
                assert summed(one) == 4
                assert td.get_rank(one) == 0
            else:
                assert one in (None, td.GroupMember.NON_GROUP_MEMBER)
        td.destroy_process_group(part)
        assert summed() == 7
        td.destroy_process_group()

    run_ranks(3, body, init=False)


def test_group_in_a_world_on_gloo_is_split(tmp_path: Path) -> None:
    def body() -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        td.init_process_group("gloo", store=td.FileStore(str(tmp_path / "store"), size), rank=rank, world_size=size)
        group = td.new_group([0, 1], backend="allranks")
        both, alone = td.split_group(group, [[0, 1]]), td.split_group(group, [[0], [1]])
        assert summed(both) == 3
        assert summed(alone) == 2.0**rank
        store = both.get_group_store()
        store.set(f"of rank {rank}", str(rank))
        assert store.get(f"of rank {1 - rank}") == str(1 - rank).encode()
        td.destroy_process_group()

    run_ranks(2, body, init=False)


def test_parts_that_overlap_are_an_error_on_every_rank(tmp_path: Path) -> None:
    def body() -> None:
        rank, _ = init(tmp_path)
        world = td.group.WORLD
        for mine in ([[0, 1], [0, 1], [1, 2]], [[0, 1], [1, 0], [2]], [[0, 1], [2], [2]]):
            with pytest.raises(dist.MismatchError, match=r"split_group on 'world'.*not all members"):
                world.split_group(mine[rank], group_name="part")
        for wrong in ([0, 0], [0, 7]):
            with pytest.raises(dist.UsageError, match="split_group"):
                world.split_group(wrong, group_name="part")
        part = world.split_group([[2, 0], [1], [2, 0]][rank], group_name="part")
        assert part.group_name == "part"
        assert (part.rank(), part.size()) == ((0, 1) if rank == 1 else (rank == 0, 2))
        td.destroy_process_group()

    run_ranks(3, body, init=False)


def test_groups_of_several_jobs_are_merged(tmp_path: Path) -> None:
    def body() -> None:
        rank = int(os.environ["RANK"])
        job, number = divmod(rank, 2)
        td.init_process_group(
            "allranks", store=td.FileStore(str(tmp_path / f"job {job}"), 2), rank=number, world_size=2, timeout=TIMEOUT
        )
        store = td.PrefixStore("first merge", td.FileStore(str(tmp_path / "merge"), 4))
        made = td.group.WORLD.merge_remote_group(store, 4, TIMEOUT, "both jobs")
        assert made.size() == 4
        assert made.group_name == "both jobs"
        tensor = torch.tensor([10.0**rank])
        made.allreduce([tensor]).wait()
        assert tensor.item() == 1111
        ranks = torch.zeros(4)
        ranks[made.rank()] = 1
        made.allreduce([ranks]).wait()
        assert ranks.tolist() == [1, 1, 1, 1]
        made.shutdown()
        assert summed() == 3
        td.destroy_process_group()

    run_ranks(4, body, init=False)


def test_windows_of_torch_hold_the_elements_that_other_ranks_have_put(tmp_path: Path) -> None:
    def body() -> None:
        rank, size = init(tmp_path)
        group, other = td.group.WORLD, 1 - rank
        assert group.supports_window
        assert group.supports_tensor_alloc(torch.device("cpu"))
        memory = group.allocate_tensor(8, dtype=torch.int32, device="cpu")
        given = group.allocate_tensor(4, dtype=torch.int32, device="cpu").fill_(rank + 1)
        window = group.new_window(memory)
        for async_op in (False, True):
            done = window.put(given, other, 4 * rank, async_op)
            assert (done is not None) is async_op
            waiting = window.wait_signal(other, async_op)
            if async_op:
                waiting.wait()
        window.get(given, other, 4 * rank, False)
        assert given.tolist() == [rank + 1] * 4
        assert window.map_remote_tensor(rank)[4 * other : 4 * other + 4].tolist() == [other + 1] * 4
        with pytest.raises(dist.UsageError, match="not in a registered segment"):
            window.put(torch.ones(1, dtype=torch.int32), other, 0, False)
        with pytest.raises(dist.UsageError, match="CPU memory"):
            group.allocate_tensor(8, dtype=torch.int32, device="cuda")
        if hasattr(td, "_new_window"):
            assert td._supports_window()
            attribute = window.get_attr(other).access_type
            assert attribute == torch._C._distributed_c10d.WindowAccessType.UNIFIED
        td.barrier()
        window.tensor_deregister()
        assert size == 2
        td.destroy_process_group()

    run_ranks(2, body, init=False)
