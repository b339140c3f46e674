"""Futures of many pending calls: few threads, ordered callbacks, callbacks that wait or make calls, typed errors."""

import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks

SEEDS = range(int(os.environ.get("ALLRANKS_FUTURE_SEEDS", "2")))
MANY = 2000


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_threads_do_not_grow_with_pending_futures() -> None:
    def body() -> None:
        other = 1 - dist.get_rank()
        dist.irecv(torch.zeros(1), other, tag=1)  # starts the core's thread for messages
        dist.isend(torch.zeros(1), other, tag=1).wait()
        before = threads()
        received = [torch.zeros(1) for _ in range(MANY)]
        order: list[int] = []
        futures = []
        for i, tensor in enumerate(received):
            future = dist.irecv(tensor, other).get_future()
            futures.append(future.then(lambda done, i=i: order.append(i) or done.value()[0] * 2))
            future.add_done_callback(lambda _, i=i: order.append(MANY + i))
        assert threads() <= before + 3
        assert order == []
        dist.barrier()
        for i in range(MANY):
            dist.send(torch.tensor([float(i)]), other)
        assert [future.wait().item() for future in futures] == [2.0 * i for i in range(MANY)]
        dist.barrier()
        while len(order) < 2 * MANY:
            time.sleep(0.01)
        place = {number: i for i, number in enumerate(order)}
        assert all(place[i] < place[MANY + i] for i in range(MANY)), (
            "callbacks of a future must run in the order of their registration"
        )
        assert threads() <= before + 3

    run_ranks(2, body)


@pytest.mark.parametrize("engine", ["native", "tcp", "gloo"])
def test_callbacks_may_wait_and_make_calls(engine: str) -> None:
    """Block in more callbacks than there are threads: each waits for a future and for a work, and makes calls."""

    def body() -> None:
        dist.init_process_group(engine, timeout=30)
        rank, size = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group() for _ in range(4)]
        blocked = []
        for group in groups:
            other = dist.irecv(torch.zeros(1), 1 - rank, group=group).get_future()
            first = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()

            def then(done: torch.futures.Future, other: torch.futures.Future = other, group: object = group) -> float:
                # No rank has sent yet. Other callbacks send the message.
                total = done.value()[0]
                dist.all_reduce(total, group=group)
                return (other.wait()[0] + total).item()

            blocked.append(first.then(then))
        sent = dist.all_reduce(torch.ones(1), async_op=True).get_future()

        def send(_: torch.futures.Future) -> None:
            for group in groups:
                dist.isend(torch.tensor([10.0]), 1 - rank, group=group).wait()

        sent.then(send).wait()
        assert [future.wait() for future in blocked] == [10.0 + size * size] * 4
        deadline = time.monotonic() + 20
        while sum(thread.name == "allranks-callbacks" for thread in threading.enumerate()) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


@pytest.mark.parametrize("engine", ["native", "gloo"])
def test_future_has_its_value_after_work_wait(engine: str) -> None:
    def body() -> None:
        dist.init_process_group(engine, timeout=30)
        dist.torch_group()
        for i in range(200):
            ways = (dist.all_reduce, td.all_reduce)
            work = ways[i % 2](torch.full((2,), float(i)), async_op=True)
            assert work is not None
            future = work.get_future()
            work.wait()
            assert future.value()[0].tolist() == [2.0 * i] * 2
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


def test_errors_keep_their_type_in_futures() -> None:
    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group()
        pending = [dist.irecv(torch.zeros(1), 1 - rank, group=group).get_future() for _ in range(3)]
        said = [future.then(lambda done: done.value()) for future in pending]
        wrong = dist.all_reduce(torch.ones(1 + rank), async_op=True).get_future()
        with pytest.raises(dist.MismatchError):
            wrong.wait()
        dist.barrier()
        dist.destroy_process_group(group)
        for future in pending:
            with pytest.raises(dist.AllranksError, match="destroyed"):
                future.wait()
        for future in said:
            with pytest.raises(RuntimeError, match=r"recv on group .* destroyed"):  # raised by torch
                future.wait()
        child = os.fork()
        if child == 0:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            os._exit(future.wait()[0].item() != 1)
        assert os.waitpid(child, 0)[1] == 0

    run_ranks(2, body)


def test_futures_complete_in_any_order() -> None:
    """Complete messages and collectives in random order, each with callbacks. Some callbacks wait for later calls."""

    def body() -> None:
        rank = dist.get_rank()
        for seed in SEEDS:
            chance = random.Random(seed)
            tags = chance.sample(range(100), 60)
            futures: dict[int, torch.futures.Future] = {}
            waits = []
            for tag in tags:
                futures[tag] = dist.irecv(torch.zeros(1), 1 - rank, tag=tag).get_future()
            for tag in tags[::7]:  # waits for a message that arrives at another time
                on = chance.choice(tags)
                waits.append((on, futures[tag].then(lambda _, later=futures, on=on: later[on].wait()[0].item())))
            for tag in chance.sample(tags, len(tags)):
                if chance.random() < 0.3:
                    total = dist.all_reduce(torch.ones(1), async_op=True).get_future()
                    waits.append((2, total.then(lambda done: done.value()[0].item())))
                dist.isend(torch.tensor([float(tag)]), 1 - rank, tag=tag)
            assert [futures[tag].wait()[0].item() for tag in tags] == tags
            for expected, future in waits:
                assert future.wait() == expected
            dist.barrier()

    run_ranks(2, body)
