"""Groups of some of the ranks."""

import copy
import os
import pickle
import resource
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_group_of_some_ranks_translates_rank_numbers() -> None:
    def body() -> None:
        me = dist.get_rank()
        pair = dist.new_group([2, 0])
        if me == 1:
            assert pair == dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(pair) == dist.get_world_size(pair) == -1
            tensor = torch.ones(1)
            with pytest.warns(UserWarning, match="not in the given process group"):
                assert dist.all_reduce(tensor, group=pair) is None
            assert tensor.item() == 1
        else:
            assert (dist.get_rank(pair), dist.get_world_size(pair)) == (me // 2, 2)
            assert dist.get_process_group_ranks(pair) == [0, 2]
            assert dist.get_group_rank(pair, 2) == 1
            assert dist.get_global_rank(pair, 1) == 2
            tensor = torch.tensor([float(me + 1)])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == 4
            tensor = torch.tensor([float(me)])
            dist.broadcast(tensor, 2, group=pair)  # src is a rank of the world
            assert tensor.item() == 2
            tensor = torch.tensor([float(me)])
            dist.broadcast(tensor, group=pair, group_src=0)
            assert tensor.item() == 0
            with pytest.raises(dist.UsageError, match="is not in group 'group 1'"):
                dist.broadcast(tensor, 1, group=pair)
            other = 2 - me
            received = torch.zeros(1)
            dist.send(torch.tensor([float(me)]), other, group=pair)
            assert dist.recv(received, group=pair) == other
            assert received.item() == other
            outs = [torch.zeros(1), torch.zeros(1)]
            dist.gather(torch.tensor([float(me)]), outs if me == 2 else None, dst=2, group=pair)
            assert me != 2 or [t.item() for t in outs] == [0, 2]
        dist.barrier()
        turned = dist.new_group([2, 0, 1], sort_ranks=False)
        assert dist.get_process_group_ranks(turned) == [2, 0, 1]
        assert dist.get_rank(turned) == [1, 2, 0][me]
        alone = dist.new_group([me], use_local_synchronization=True)
        dist.barrier(alone)
        dist.all_reduce(torch.ones(3), group=alone)

    run_ranks(3, body)


def test_subgroups_and_split_groups_have_the_requested_members() -> None:
    def body() -> None:
        me = dist.get_rank()
        mine, groups = dist.new_subgroups(2)
        assert len(groups) == 2
        assert dist.get_process_group_ranks(mine) == [me // 2 * 2, me // 2 * 2 + 1]
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        tensor = torch.tensor([me])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == 3
        part = dist.split_group(mine, [[0], [1]])
        assert part.size() == 1
        three = dist.split_group(None, [[3, 1, 2]])
        assert (three is None) == (me == 0)
        if three is not None:
            assert three.ranks == (3, 1, 2)
            assert three.rank() == (None, 1, 2, 0)[me]
            dist.barrier(three)
        with pytest.raises(dist.UsageError, match="does not divide"):
            dist.new_subgroups(3)
        with pytest.raises(dist.UsageError, match="more than one"):
            dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])

    run_ranks(4, body)


def test_merged_group_has_the_ranks_of_all_groups() -> None:
    def body() -> None:
        me = dist.get_rank()
        server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False) if me == 0 else None
        port = [None if server is None else server.port]
        dist.broadcast_object_list(port)
        store = server or dist.TCPStore("127.0.0.1", port[0], 1, False)
        part = dist.split_group(None, [[0, 1], [2, 3]])
        made = dist.merge_remote_group(dist.PrefixStore("merge 1", store), 3, group=part) if me != 1 else None
        if made is not None:
            tensor = torch.tensor([10.0**me])
            dist.all_reduce(tensor, group=made)
            assert tensor.item() == 1101
            assert made.size() == 3
            dist.destroy_process_group(made)
        dist.barrier()
        if me == 1:  # the merge is complete
            with pytest.raises(dist.UsageError, match="4 ranks have arrived at the store, more than size=3"):
                dist.merge_remote_group(dist.PrefixStore("merge 1", store), 3)
            with pytest.raises(dist.TimeoutError):
                dist.merge_remote_group(dist.PrefixStore("merge 2", store), 2, timeout=0.5)
            with pytest.raises(dist.UsageError, match="at least 1"):
                dist.merge_remote_group(store, 0)
        dist.barrier()

    run_ranks(4, body)


def test_local_synchronization_needs_only_the_members() -> None:
    def body() -> None:
        me = dist.get_rank()
        if me != 1:
            pair = dist.new_group([0, 2], use_local_synchronization=True)
            tensor = torch.tensor([me])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == 2
        dist.barrier()

    run_ranks(3, body)


def test_disagreement_about_members_is_an_error_on_every_rank() -> None:
    def body() -> None:
        with pytest.raises(dist.MismatchError, match="rank 2 requested other members or another engine than rank 0"):
            dist.new_group([0, 1] if dist.get_rank() < 2 else [0, 2])
        dist.barrier()
        for ranks, words in (([0, 3], "3 is not a rank"), ([0, 0], "listed more than once"), ([], "at least one")):
            with pytest.raises(dist.UsageError, match=words):
                dist.new_group(ranks)
        dist.barrier()

    run_ranks(3, body)


def test_overlapping_groups_work_concurrently_in_several_threads() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group() for _ in range(3)]
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        works = []
        tensors = []
        for _ in range(20):
            for made in (*groups, *pairs):
                if made == dist.GroupMember.NON_GROUP_MEMBER:
                    continue
                tensors.append((torch.ones(1000), dist.get_world_size(made)))
                works.append(dist.all_reduce(tensors[-1][0], group=made, async_op=True))
        for work in reversed(works):
            work.wait()
        assert all(bool((tensor == n).all()) for tensor, n in tensors)

        errors = []

        def use(made: dist.ProcessGroup, value: float) -> None:
            try:
                for _ in range(50):
                    tensor = torch.full((3000,), value)
                    dist.all_reduce(tensor, group=made)
                    assert bool((tensor == size * value).all())
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                errors.append(error)

        threads = [threading.Thread(target=use, args=(made, float(i))) for i, made in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert me in range(size)

    run_ranks(3, body)


def test_creating_and_destroying_100_groups_leaks_nothing() -> None:
    def body() -> tuple[int, int, int]:
        def held() -> tuple[int, int]:
            with open("/proc/self/maps") as maps:
                return len(os.listdir("/proc/self/fd")), sum(1 for line in maps if "memfd:allranks" in line)

        before = held()
        for _ in range(100):
            made = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.all_reduce(torch.ones(1), group=made)
                dist.destroy_process_group(made)
                with pytest.raises(dist.NotInitializedError, match="was destroyed"):
                    dist.barrier(made)
        dist.barrier()
        after = held()
        return after[0] - before[0], after[1] - before[1], before[1]

    for more_descriptors, more_mappings, mapped in run_ranks(3, body):
        assert more_descriptors == more_mappings == 0
        assert mapped == 3 + 2  # one segment per rank; the recording of this rank, mapped for writing and for reading


def test_death_of_a_rank_fails_only_the_groups_of_that_rank() -> None:
    def body() -> None:
        without = dist.new_group([0, 1])
        with_it = dist.new_group([0, 2])
        if dist.get_rank() == 2:
            os.kill(os.getpid(), 9)
        if dist.get_rank() == 0:
            with pytest.raises(dist.PeerLostError, match=r"rank 1 \(.*\) died"):  # its rank in the group
                dist.barrier(with_it)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(10):
                dist.barrier(without)

    run_ranks(3, body, may_die={2})


def test_world_group_has_several_spellings() -> None:
    def body() -> None:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=0)  # the world in THD
        dist.all_reduce(tensor, group=dist.group.WORLD)
        dist.all_reduce(tensor, group=dist.GroupMember.WORLD)
        assert tensor.item() == 8
        assert dist.get_process_group_ranks(None) == [0, 1]
        assert dist.get_node_local_rank() == dist.get_rank()
        dist.monitored_barrier()

    run_ranks(2, body)


def test_variables_that_are_not_numbers_are_named() -> None:
    def body() -> None:
        os.environ["LOCAL_RANK"] = os.environ["LOCAL_WORLD_SIZE"] = "two"
        with pytest.raises(dist.ConfigError, match="LOCAL_RANK='two' is not a number"):
            dist.get_node_local_rank()
        with pytest.raises(dist.ConfigError, match="LOCAL_WORLD_SIZE='two' is not a number"):
            dist.new_subgroups()

    run_ranks(1, body)


def asynchronous_barrier(timeout: Any) -> None:
    dist.barrier(async_op=True, timeout=timeout).wait()


@pytest.mark.parametrize("barrier", [dist.monitored_barrier, dist.barrier, asynchronous_barrier])
@pytest.mark.parametrize("timeout", [timedelta(seconds=0.3), 0.3])
def test_a_missing_rank_is_named_by_a_barrier_with_a_timeout(barrier: Any, timeout: timedelta | float) -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            time.sleep(1)
            return ""
        with pytest.raises(dist.TimeoutError) as caught:
            barrier(timeout=timeout)
        return str(caught.value)

    assert "rank 1 (" in run_ranks(3, body)[0]


@pytest.mark.parametrize("barrier", [dist.monitored_barrier, dist.barrier, asynchronous_barrier])
@pytest.mark.parametrize("timeout", ["soon", float("nan")])
def test_invalid_timeout_is_refused_before_the_barrier_starts(barrier: Any, timeout: Any) -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match="timeout must be a timedelta or a number of seconds, not"):
            barrier(timeout=timeout)
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == 2

    run_ranks(2, body)


@pytest.mark.parametrize("barrier", [dist.monitored_barrier, dist.barrier, asynchronous_barrier])
@pytest.mark.parametrize("timeout", [0, timedelta(0), -5])
def test_zero_or_negative_timeout_expires_immediately(barrier: Any, timeout: timedelta | float) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)
            dist.barrier()
            return
        with pytest.raises(dist.TimeoutError):
            barrier(timeout=timeout)
        dist.send(torch.zeros(1), 1)

    run_ranks(2, body)


def test_thd_functions_and_backend_queries_are_available() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_num_processes()
        mine = torch.tensor([me])
        if me == 1:
            gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.gather_recv(gathered, mine)
            assert [int(t) for t in gathered] == [0, 1, 2]
            dist.scatter_send([t * 10 for t in gathered], mine)
        else:
            dist.gather_send(mine, 1)
            dist.scatter_recv(mine, 1)
        assert mine.item() == 10 * me
        assert dist.get_backend_config() == "cpu:native"

    run_ranks(3, body)
    assert dist.is_backend_available("native")
    assert not dist.is_ucc_available()
    assert dist.supports_complex(dist.ReduceOp.SUM)
    assert not dist.supports_complex(dist.ReduceOp.MAX)
    assert dist.get_default_backend_for_device("cpu:0") == "native"
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    with pytest.raises(dist.ConfigError, match=r"no engine of the default backend \(.*\) supports tensors on gpu"):
        dist.get_default_backend_for_device("gpu")


def test_only_the_members_of_a_group_divide_it_into_subgroups() -> None:
    def body() -> None:
        me = dist.get_rank()
        mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        alone, parts = dist.new_subgroups(1, group=mine)  # the parts differ between ranks 0, 2 and ranks 1, 3
        assert dist.get_process_group_ranks(alone) == [me]
        assert [part == alone for part in parts] == [me < 2, me >= 2]
        dist.barrier(alone)

    run_ranks(4, body)


def test_pickling_or_copying_groups_and_works_is_refused() -> None:
    def body() -> None:
        group = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(1), async_op=True)
        for each in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"Pass its ranks, \[0, 1\], and call new_group"):
                each({"group": group}) if each is pickle.dumps else each(group)
            with pytest.raises(TypeError, match="Wait for it, and pass its result"):
                each(work)
        work.wait()

    run_ranks(2, body)


def mapped_kib(field: str = "Rss:") -> int:
    """Return the KiB of group memory that this process maps."""
    ours, found = False, 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith(field):
                found += int(line.split()[1]) if ours else 0
            elif "-" in line.split(maxsplit=1)[0]:
                ours = "memfd:allranks" in line
    return found


def test_groups_allocate_memory_on_first_use() -> None:
    def body() -> None:
        groups = [dist.new_group() for _ in range(10)]
        dist.barrier()
        before = mapped_kib()
        assert before < 1500  # of 85 MiB
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)
        assert mapped_kib() == before
        large = torch.ones(1 << 20)
        dist.all_reduce(large, group=groups[0])
        assert (large == 2).all()
        peer = 1 - dist.get_rank()
        for group in groups[1:3]:
            sent = dist.isend(large, peer, group)
            dist.recv(torch.empty_like(large), peer, group)
            assert sent is not None
            sent.wait()
        dist.barrier()
        assert before + 4000 < mapped_kib() < before + 20_000

    run_ranks(2, body)


def test_200_groups_of_16_ranks_need_no_descriptors_and_little_memory() -> None:
    def body() -> tuple[int, int]:
        def held() -> list[int]:
            return [int(fd) for fd in os.listdir("/proc/self/fd")]

        before = held()
        # Creating a group needs a few descriptors temporarily. The group itself keeps none.
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 3 * dist.get_world_size(), limits[1]))
        groups = [dist.new_group() for _ in range(200)]
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for group in groups[::20]:
            total = torch.ones(4)
            dist.all_reduce(total, group=group)
            assert (total == 16).all()
        dist.barrier()
        found = len(held()) - len(before), mapped_kib("Pss:")
        dist.barrier()
        return found

    found = run_ranks(16, body)
    assert all(result is not None and result[0] == 0 for result in found)
    assert sum(result[1] for result in found if result is not None) < 256 << 10
