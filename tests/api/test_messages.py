"""isend, irecv and batches: order, overlap, any source, timeouts."""

import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_ring_of_large_messages_completes_in_any_order() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        following, previous = (me + 1) % size, (me - 1) % size
        outgoing = [torch.full((300_000,), float(10 * me + k)) for k in range(4)]
        incoming = [torch.zeros(300_000) for _ in range(4)]
        works = []
        for k in range(4):
            works.append(dist.isend(outgoing[k], following, tag=k))
            works.append(dist.irecv(incoming[3 - k], previous, tag=3 - k))
        assert all(work.wait() for work in reversed(works))
        for k in range(4):
            assert bool((incoming[k] == 10 * previous + k).all())
        assert works[1].source_rank() == previous

    run_ranks(4, body)


def test_batch_isend_irecv_exchanges_messages_with_every_rank() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        others = [r for r in range(size) if r != me]
        outs = {r: torch.tensor([me, r]) for r in others}
        ins = {r: torch.zeros(2, dtype=torch.int64) for r in others}
        ops = [dist.P2POp(dist.irecv, ins[r], r) for r in others]
        ops += [dist.P2POp(dist.isend, outs[r], r) for r in reversed(others)]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == len(ops)
        assert all(work.wait() for work in works)
        assert all(ins[r].tolist() == [r, me] for r in others)
        with pytest.raises(dist.UsageError, match="isend or irecv"):
            dist.P2POp(dist.broadcast, outs[others[0]], others[0])
        with pytest.raises(dist.UsageError, match="a list of P2POp"):
            dist.batch_isend_irecv([1])

    run_ranks(3, body)


def test_messages_progress_without_a_wait() -> None:
    def body() -> float:
        me = dist.get_rank()
        tensor = torch.full((2_000_000,), float(me))
        work = dist.isend(tensor, 1) if me == 0 else dist.irecv(tensor, 0)
        deadline = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert work.is_completed()
        dist.barrier()
        return tensor[-1].item()

    assert run_ranks(2, body) == [0.0, 0.0]


def test_early_recv_from_any_source_times_out_and_completes_later() -> None:
    def body() -> None:
        me = dist.get_rank()
        if me == 0:
            tensor = torch.zeros(3).view(1, 3).expand(1, 3).clone().t()
            work = dist.irecv(tensor)
            with pytest.raises(dist.TimeoutError, match="no data from any rank"):
                work.wait(0.05)
            assert not work.is_completed()
            dist.barrier()
            work.wait()
            assert work.source_rank() == 2
            assert tensor.flatten().tolist() == [2.0, 2.0, 2.0]
        else:
            dist.barrier()
            if me == 2:
                dist.send(torch.full((3, 1), 2.0), 0)
        dist.barrier()

    run_ranks(3, body)


def test_message_of_wrong_size_is_an_error_of_the_recv() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(5), 1).wait()
            dist.send(torch.ones(4), 1)
        else:
            tensor = torch.zeros(4)
            work = dist.irecv(tensor, 0)
            with pytest.raises(dist.MismatchError, match="sent 5 x float32"):
                work.wait()
            assert isinstance(work.exception(), dist.MismatchError)
            assert not work.is_success()
            assert dist.recv(tensor, 0) == 0
            assert tensor.sum() == 4

    run_ranks(2, body)


def test_sends_complete_after_their_works_are_dropped() -> None:
    def body() -> None:
        me = dist.get_rank()
        for k in range(30):
            if me == 0:
                dist.isend(torch.full((50_000,), float(k)), 1)
        if me == 1:
            tensor = torch.zeros(50_000)
            for k in range(30):
                dist.recv(tensor, 0)
                assert bool((tensor == k).all())
        dist.barrier()

    run_ranks(2, body)
