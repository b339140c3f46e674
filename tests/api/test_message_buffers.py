"""Buffers for messages without a posted recv: amount, order, and a shortage of memory."""

import resource
import time
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks._engines.native import engine as native
from allranks.testing import run_ranks

MIB = 1 << 20
ENGINES = pytest.mark.parametrize("engine", ["native", "tcp"])


def _pages(which: int) -> int:
    """Return bytes of this process: virtual size for which=0, resident memory for which=1."""
    return int(Path("/proc/self/statm").read_text().split()[which]) * resource.getpagesize()


@ENGINES
def test_rank_buffers_at_most_the_bound_and_receives_later_messages(engine: str) -> None:
    def body() -> None:
        me, many = dist.get_rank(), 30
        one = torch.zeros(2)
        dist.barrier()
        if me == 0:
            large = [torch.full((MIB // 4,), float(k)) for k in range(many)]
            works = [dist.isend(tensor, 1, tag=1) for tensor in large]
            dist.send(one, 1, tag=2)
            dist.recv(one, 1, tag=2)  # rank 1 has received it
            done = sum(work.is_completed() for work in works)
            assert done <= 4, done
            dist.send(one, 1, tag=3)
            for work in works:
                work.wait()
        elif me == 1:
            early = dist.irecv(torch.zeros(2), 2)
            tensor = torch.ones(MIB // 4)
            before = _pages(1)
            dist.recv(one, 0, tag=2)
            assert _pages(1) - before < 12 * MIB
            dist.send(one, 0, tag=2)
            dist.recv(one, 0, tag=3)
            for k in range(many):
                dist.recv(tensor, 0, tag=1)
                assert bool((tensor == k).all())
            dist.send(one, 2)
            early.wait()
        else:
            dist.recv(one, 1)
            dist.send(one, 1)

    run_ranks(3, body, env={"ALLRANKS_BACKEND": engine, "ALLRANKS_MESSAGE_BUFFER": "4"})


@ENGINES
def test_both_ranks_may_send_first_within_the_bound(engine: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        mine, theirs = torch.full((MIB // 4,), float(me)), torch.zeros(MIB // 4)
        for _ in range(4):
            for _ in range(6):
                dist.send(mine, 1 - me)
            for _ in range(6):
                dist.recv(theirs, 1 - me)
                assert bool((theirs == 1 - me).all())

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine})


def test_without_a_buffer_each_send_waits_for_its_recv() -> None:
    def body() -> None:
        me = dist.get_rank()
        works = [dist.isend(torch.tensor([k]), 1 - me, tag=k % 2) for k in range(10)]
        time.sleep(0.1)
        dist.barrier()
        assert not any(work.is_completed() for work in works)
        dist.barrier()
        one = torch.tensor([-1])
        for tag in (1, 0):
            for k in range(tag, 10, 2):
                dist.recv(one, 1 - me, tag=tag)
                assert one.item() == k
        for work in works:
            work.wait()

    run_ranks(2, body, env={"ALLRANKS_MESSAGE_BUFFER": "0"})


@ENGINES
def test_message_that_exceeds_memory_is_not_lost(engine: str) -> None:
    def body() -> None:
        me, count = dist.get_rank(), 128 * MIB // 4
        tensor = torch.full((count,), 7.0) if me == 0 else torch.zeros(count)
        small = torch.ones(1)
        dist.barrier()
        if me == 0:
            works = [dist.isend(tensor, 1, tag=1), dist.isend(small, 1, tag=2)]
            for work in works:
                work.wait()
        else:
            small[0] = 0
            limit = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (_pages(0) + 48 * MIB, limit[1]))
            try:
                for source in (0, None):
                    with pytest.raises(MemoryError, match=r"134217728 bytes with tag 1 from rank 0.* is not lost"):
                        dist.recv(small, source, tag=2)
                dist.recv(tensor, 0, tag=1)
                dist.recv(small, 0, tag=2)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limit)
            assert bool((tensor == 7).all())
            assert small.item() == 1

    run_ranks(2, body, env={"ALLRANKS_BACKEND": engine, "ALLRANKS_MESSAGE_BUFFER": "256"})


def test_a_call_polls_only_a_few_pending_works() -> None:
    def body() -> None:
        me, many = dist.get_rank(), 3000
        looked = 0
        done = native.NativeWork.done

        def counted(work: native.NativeWork) -> bool:
            nonlocal looked
            looked += 1
            return done(work)

        native.NativeWork.done = counted  # type: ignore[method-assign]
        tensor = torch.zeros(many)
        if me == 0:
            works = [dist.irecv(tensor[k : k + 1], 1 if k % 3 else None, tag=k % 7) for k in range(many)]
            assert looked < 4 * many
            dist.barrier()
            for work in reversed(works):
                work.wait()
            assert bool((tensor > 0).all())
        else:
            dist.barrier()
            for k in range(many):
                dist.send(torch.tensor([k + 1.0]), 0, tag=k % 7)
        looked = 0
        works = [dist.all_reduce(tensor[:1], async_op=True) for _ in range(many)]
        assert looked < 4 * many
        for work in works:
            work.wait()

    run_ranks(2, body)
