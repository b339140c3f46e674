"""Asynchronous calls: wait immediately, wait later, wait in another thread, or no wait."""

import gc
import threading
import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_immediate_wait_completes_the_call() -> None:
    """Wait immediately, also with more ranks than cores and after pauses that put the progress thread to sleep."""

    def body() -> None:
        tensor, right = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
        for turn in range(300):
            if turn % 100 == 0:
                time.sleep(0.01)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX if turn % 3 else dist.ReduceOp.SUM, async_op=True)
            right *= 1 if turn % 3 else dist.get_world_size()
            assert work.wait() is True
            assert torch.equal(tensor, right)
            assert work.is_completed()
            assert work.result()[0] is tensor
            if turn % 12 == 0:
                tensor.fill_(1)
                right.fill_(1)

    run_ranks(2, body)
    run_ranks(4, body)


def test_call_without_a_wait_completes() -> None:
    """Poll for completion after pauses of different lengths, without a call of wait."""

    def body() -> None:
        for pause_s in (0.0, 0.0, 0.02, 0.0, 0.02):
            time.sleep(pause_s)
            for nbytes in (4, 4 << 20):
                tensor = torch.ones(nbytes // 4)
                work = dist.all_reduce(tensor, async_op=True)
                while not work.is_completed():
                    time.sleep(1e-4)
                assert work.is_success()
                assert torch.all(tensor == dist.get_world_size())

    run_ranks(2, body)


def test_asynchronous_verbs_return_their_result_tensors() -> None:
    def body() -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = torch.full((2,), float(rank))
        whole = torch.arange(ranks, dtype=torch.float32).repeat_interleave(2)
        root = rank == 1

        def check(work: dist.Work, results: list[torch.Tensor], right: torch.Tensor) -> None:
            work.wait()
            got = work.result()
            assert [each.data_ptr() for each in got] == [each.data_ptr() for each in results]
            if results:
                assert torch.equal(torch.cat([each.flatten() for each in got]), right)

        one = mine.clone()
        check(dist.reduce(one, 1, async_op=True), [one], torch.full((2,), float(sum(range(ranks)))) if root else mine)
        one = mine.clone()
        check(dist.broadcast(one, 1, async_op=True), [one], torch.ones(2))
        listed = [torch.empty(2) for _ in range(ranks)]
        check(dist.all_gather(listed, mine, async_op=True), listed, whole)
        out = torch.empty(2 * ranks)
        check(dist.all_gather_single(out, mine, async_op=True), list(out.chunk(ranks)), whole)
        listed = [torch.empty(2) for _ in range(ranks)] if root else []
        check(dist.gather(mine, listed or None, 1, async_op=True), listed, whole)
        one = torch.empty(2)
        check(dist.scatter(one, list(whole.chunk(ranks)) if root else None, 1, async_op=True), [one], mine)
        one = torch.empty(2)
        check(dist.reduce_scatter_single(one, whole, async_op=True), [one], mine * ranks)
        check(dist.reduce_scatter(one, list(whole.chunk(ranks)), async_op=True), [one], mine * ranks)
        out = torch.empty(2 * ranks)
        check(dist.all_to_all_single(out, mine.repeat(ranks), async_op=True), [out], whole)
        dist.barrier(async_op=True).wait()

    run_ranks(2, body)
    run_ranks(3, body)


def test_pending_work_keeps_its_tensors_alive() -> None:
    """Drop every other reference to the tensors, and clear the list of outputs, while the other rank is late."""

    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.1)
        outputs = [torch.zeros(1000) for _ in range(2)]
        seen = [*outputs]
        works = [dist.all_gather(outputs, torch.full((1000,), float(dist.get_rank())), async_op=True)]
        outputs.clear()
        for _ in range(20):
            dist.all_reduce(torch.ones(1000), async_op=True)
        gc.collect()
        noise = [torch.full((1000,), 9.0) for _ in range(30)]  # reuses the memory if it was freed
        works[0].wait()
        assert [each[999].item() for each in seen] == [0.0, 1.0]
        dist.barrier()
        assert all(each.eq(9.0).all() for each in noise)

    run_ranks(2, body)


def test_blocking_and_asynchronous_calls_of_several_threads_complete() -> None:
    """Make identical calls, so that their order does not matter. Each thread waits by another method."""

    def body() -> None:
        errors: list[BaseException] = []

        def run(way: int) -> None:
            try:
                for _ in range(200):
                    tensor = torch.ones(5)
                    if way == 0:
                        dist.all_reduce(tensor)
                    else:
                        work = dist.all_reduce(tensor, async_op=True)
                        if way == 1:
                            work.wait()
                        elif way == 2:
                            work.wait(timeout=30)
                        else:
                            while not work.is_completed():
                                time.sleep(1e-5)
                    assert tensor[4] == 2
            except BaseException as error:  # noqa: BLE001 - shown below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(way,)) for way in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    run_ranks(2, body)


def test_errors() -> None:
    def body() -> None:
        tensor = torch.ones(1 + dist.get_rank())
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(2):
            with pytest.raises(dist.MismatchError, match=r"(?s)all_reduce.*test_async\.py"):
                work.wait()
        assert isinstance(work.exception(), dist.MismatchError)
        with pytest.raises(dist.UsageError, match="SUM of"):
            dist.all_reduce(torch.zeros(1, dtype=torch.float8_e5m2), async_op=True)
        made = dist.new_group()
        pending = made.all_reduce(tensor, async_op=True) if dist.get_rank() == 0 else None
        dist.barrier()
        dist.destroy_process_group(made)
        with pytest.raises(dist.NotInitializedError):
            made.all_reduce(tensor, async_op=True)
        if pending is not None:
            with pytest.raises(dist.AllranksError):
                pending.wait()

    run_ranks(2, body)
