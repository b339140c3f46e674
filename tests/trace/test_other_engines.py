"""Recording of calls, above all on engines outside the core, with gloo as the example. tests/engines covers mpi."""

import contextlib
import mmap
import os
import time

import pytest
import torch

import allranks as dist
from allranks._engines.by_device import ByDevice
from allranks._group.process_group import ProcessGroup
from allranks._trace import memory
from allranks._trace.reader import TraceError, TraceReader
from allranks.testing import run_ranks


def gloo(timeout=30):
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timeout)


def recorded(name="world"):
    """Return the calls of the group, and the group."""
    reader = memory.reader()
    group = [g for g in reader.groups().values() if g.name == name][-1]
    return [call for call in reader.calls() if call.group == group.index and not call.purpose], group


def test_collectives_and_messages_are_recorded():
    def body():
        gloo()
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(4), 1)
        dist.all_to_all([torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)])
        dist.barrier()
        work = dist.isend(torch.ones(7), 1, tag=5) if rank == 0 else dist.irecv(torch.ones(7), 0, tag=5)
        work.wait()
        with pytest.raises(dist.UsageError):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))  # raises before it begins: not recorded
        return recorded()

    for rank, (calls, group) in enumerate(run_ranks(2, body)):
        assert (group.engine, group.rank, group.number) == ("gloo", rank, 4)
        found = [(c.title, c.dtype, c.op, c.count, c.peer, c.async_op, c.outcome) for c in calls]
        assert found == [
            ("all_reduce #1", "float32", "MAX", 6, -1, False, ""),
            ("broadcast #2", "float32", "", 4, 1, False, ""),
            ("all_to_all #3", "float32", "", 0, -1, False, ""),
            ("barrier #4", "uint8", "", 0, -1, False, ""),
            (("send to 1", "recv from 0")[rank], "float32", "", 7, 1 - rank, True, ""),
        ]
        assert calls[4].tag == 5
        assert "test_other_engines.py" in calls[4].site
        assert all(c.returned_ns > c.entered_ns for c in calls)
        assert group.totals["all_reduce"].bytes == 24


def test_unawaited_calls_are_recorded_as_ended():
    def body():
        gloo()
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(5)]
        time.sleep(0.3)
        dist.barrier()  # detects that the calls have ended
        ended = [c.returned_ns > 0 for c in recorded()[0]]
        del works
        dist.all_reduce(torch.ones(2), async_op=True)
        dist.destroy_process_group()  # no later call can detect that it has ended
        return ended, recorded()[0][-1]

    for ended, last in run_ranks(2, body):
        assert ended == [True] * 6
        assert last.returned_ns > 0
        assert last.outcome == "closed"


def test_waiting_rank_is_visible_with_its_call_site():
    fd = memory.create_memory(2)
    path = f"/proc/{os.getpid()}/fd/{fd}"

    def body():
        if os.environ["RANK"] == "0":
            os.environ[memory.MEMORY] = path
        dist.init_process_group("gloo", timeout=30)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
            return None
        view = mmap.mmap(os.open(path, os.O_RDWR), 0)
        found, deadline = [], time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
            with contextlib.suppress(TraceError):  # rank 0 has not started recording
                found = [call for call in TraceReader(bytes(view)).open_calls() if call.awaited]
        dist.all_reduce(torch.ones(2))
        return found

    (call,) = run_ranks(2, body, init=False)[1]
    assert (call.title, call.async_op, call.awaited) == ("all_reduce #1", False, True)
    assert "test_other_engines.py" in call.site
    os.close(fd)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_call_is_no_longer_awaited_after_its_wait_has_timed_out(backend):
    def body():
        dist.destroy_process_group()
        dist.init_process_group(backend, timeout=30)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
            dist.send(torch.ones(2), 0)
            dist.all_reduce(torch.ones(2))
            return None
        works = [dist.irecv(torch.ones(2), 1), dist.all_reduce(torch.ones(2), async_op=True)]
        for work in works:
            with pytest.raises(dist.TimeoutError):
                work.wait(0.3)
        found = [(call.verb, call.awaited) for call in memory.reader().open_calls()]
        dist.send(torch.ones(1), 1)
        for work in works:
            work.wait()
        return found

    assert run_ranks(2, body)[0] == [("recv", False), ("all_reduce", False)]


def test_failed_call_is_recorded():
    def body():
        gloo(timeout=1)
        if dist.get_rank() == 0:
            with pytest.raises(dist.TimeoutError):
                dist.all_reduce(torch.ones(2))
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert work.exception() is not None or not work.is_success()
        else:
            time.sleep(2)
        return [c.outcome for c in recorded()[0]]

    assert run_ranks(2, body)[0][0] == "failed"


def test_group_on_two_engines_is_recorded_as_two_groups():
    def body():
        world = dist.group.WORLD
        gloo = dist.new_group(backend="gloo")._engine
        engine = ByDevice("cpu:native,cuda:nccl", {"cpu": world._engine, "cuda": gloo}, "both")
        both = ProcessGroup(engine, "both", world.rank(), world.members, 20.0)
        both.all_reduce(torch.ones(2))
        gloo.all_reduce(torch.ones(2), dist.ReduceOp.SUM, False)  # the engine that a CUDA tensor would use
        return [[c.verb for c in recorded(name)[0]] for name in ("both", "both on cuda")]

    assert run_ranks(2, body) == [[["all_reduce"], ["all_reduce"]]] * 2


def test_internal_calls_are_marked_with_their_purpose():
    def body():
        gloo()
        dist.new_group([0, 1], backend="gloo")
        return {c.purpose for c in memory.reader().calls()}

    assert all("new_group" in purposes for purposes in run_ranks(2, body))


def test_calls_of_killed_rank_are_readable():
    fd = memory.create_memory(2)
    path = f"/proc/{os.getpid()}/fd/{fd}"

    def body():
        if os.environ["RANK"] == "0":
            os.environ[memory.MEMORY] = path
        dist.init_process_group("gloo", timeout=30)
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 0:
            os.kill(os.getpid(), 9)

    run_ranks(2, body, init=False, may_die=(0,))
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        calls = [c.title for c in TraceReader(bytes(view)).calls() if not c.purpose]
    assert calls == ["all_reduce #1"]
    os.close(fd)
