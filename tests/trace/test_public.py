"""``allranks.trace``: calls that a program reads about itself."""

import os
import time

import pytest
import torch
import torch.distributed

import allranks as dist
from allranks.testing import run_ranks


def test_last_calls_describe_recent_calls():
    assert run_ranks(1, lambda: dist.trace.last_calls(), init=False) == [[]]

    def body():
        rank = dist.get_rank()
        group = dist.new_group([1, 0])
        dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)
        time.sleep(0.1 * (rank == 1))
        dist.broadcast(torch.ones(5, dtype=torch.int64), 1, group=group)
        dist.send(torch.ones(7), 1, tag=5) if rank == 0 else dist.recv(torch.ones(7), 0, tag=5)
        work = dist.irecv(torch.ones(1), 1 - rank)
        calls = dist.trace.last_calls(4)
        dist.barrier()  # calls from here on are later than the four that were read
        dist.send(torch.ones(1), 1 - rank)
        work.wait()
        with pytest.raises(dist.UsageError, match="n=-1 is out of range"):
            dist.trace.last_calls(-1)
        return calls, len(dist.trace.last_calls(0)), len(dist.trace.last_calls(3)), str(calls[1]), str(calls[3])

    for rank, (calls, none, three, text, waiting) in enumerate(run_ranks(2, body)):
        assert (none, three) == (0, 3)
        reduce, broadcast, message, under_way = calls
        assert (reduce.title[:12], reduce.dtype, reduce.op, reduce.count) == ("all_reduce #", "float32", "MAX", 6)
        assert (broadcast.title, broadcast.dtype, broadcast.peer, broadcast.last) == ("broadcast #1", "int64", 1, 1)
        assert broadcast.group != "world"
        assert (message.title, message.tag) == (("send to rank 1", "recv from rank 0")[rank], 5)
        assert [c.under_way for c in calls] == [False, False, False, True]
        assert under_way.async_op
        assert all(c.seconds >= (c.waited or 0) >= 0 for c in calls)
        assert text.startswith(f"broadcast #1(5 x int64) on '{broadcast.group}'")
        assert "until rank 1 arrived last" in text
        assert waiting.startswith(f"recv from rank {1 - rank}(1 x float32), ")
        assert "under way for " in waiting


def test_stragglers_name_the_late_rank():
    def body():
        for _ in range(20):
            time.sleep(0.01 * (dist.get_rank() == 2))
            dist.barrier()
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            with pytest.raises(dist.UsageError, match="not a member"):
                dist.trace.stragglers(group)
            return None
        return dist.trace.stragglers(), dist.trace.stragglers(group)

    for result in run_ranks(3, body)[::2]:
        found, empty = result
        assert (found.group, len(found)) == ("world", 3)
        assert found.compared >= 20
        worst = found.ranks[0]
        assert worst.rank == 2
        assert worst.times >= 15
        assert worst.share == worst.times / found.compared
        assert worst.seconds > 0.003
        assert (worst.recent_times, worst.recent_seconds) == (worst.times, worst.seconds)
        assert sum(each.times for each in found) == found.compared
        assert str(found).startswith(f"group 'world': ranks that arrived last in {found.compared} calls (in the last ")
        assert "\n  rank 2: " in str(found)
        assert (len(empty), empty.compared) == (0, 0)
        assert str(empty) == f"group '{empty.group}': the rank that arrived last is not known for any call"


def test_torch_distributed_calls_are_recorded(tmp_path):
    def body():
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group("allranks", f"file://{tmp_path}/meet", rank=rank, world_size=2)
        for _ in range(5):
            torch.distributed.all_reduce(torch.ones(2))
        found = dist.trace.stragglers(), [c.verb for c in dist.trace.last_calls(5)]
        torch.distributed.destroy_process_group()
        return found

    for found, verbs in run_ranks(2, body, init=False):
        assert found.compared >= 5
        assert verbs == ["all_reduce"] * 5


def test_stragglers_without_group_raises():
    with pytest.raises(dist.NotInitializedError):
        dist.trace.stragglers()
