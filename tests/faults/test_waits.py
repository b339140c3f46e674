"""Waits for messages that never arrive: the error names the waiting ranks and other available messages."""

import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

ENGINES = pytest.mark.parametrize("engine", ["native", "tcp"])


@ENGINES
def test_two_ranks_that_both_receive_first_are_named(engine: str) -> None:
    def body() -> tuple[str, tuple[int, ...]]:
        dist.init_process_group(engine)
        group = dist.new_group(timeout=2.0)
        with pytest.raises(dist.TimeoutError) as caught:
            dist.recv(torch.zeros(1), 1 - dist.get_rank(), group)
        dist.destroy_process_group()
        return str(caught.value), caught.value.ranks

    for rank, (text, ranks) in enumerate(run_ranks(2, body, init=False)):
        other = 1 - rank
        assert "ranks 0-1 have waited for each other" in text
        assert f"rank {rank} waits for rank {other} (recv, {__file__}:" in text
        assert f", which waits for rank {rank} (recv, {__file__}:" in text
        assert "no data from" not in text
        assert sorted(ranks) == [0, 1]


@ENGINES
def test_cycle_of_send_recv_and_wait_is_named_with_the_rank_that_waits_for_it(engine: str) -> None:
    def body() -> str:
        dist.init_process_group(engine)
        group = dist.new_group(timeout=2.0)
        me = dist.get_rank()
        large = torch.zeros(2_500_000)
        call = {
            0: lambda: dist.send(large, 1, group),
            1: lambda: dist.irecv(large, 2, group).wait(),
            2: lambda: dist.recv(large, 0, group),
            3: lambda: dist.recv(large, 1, group),
        }[me]
        with pytest.raises(dist.TimeoutError) as caught:
            call()
        dist.destroy_process_group()
        return str(caught.value)

    texts = run_ranks(4, body, init=False)
    for text in texts:
        assert "ranks 0-2 have waited for each other" in text
    here = rf"{__file__}:"
    assert "rank 3 waits for rank 1 (recv" in texts[3]
    first, second, third = texts[0].split("rank 0 waits for rank 1")[1].split(", which waits for rank ")
    assert first.startswith(f" (send, {here}")
    assert second.startswith(f"2 (recv, {here}")
    assert third.startswith(f"0 (recv, {here}")


def test_chain_of_waits_ends_at_the_rank_that_does_not_wait() -> None:
    def body() -> str:
        dist.init_process_group()
        group = dist.new_group(timeout=1.5)
        me = dist.get_rank()
        if me == 2:
            time.sleep(2.5)
            return ""
        with pytest.raises(dist.TimeoutError) as caught:
            dist.recv(torch.zeros(1), me + 1, group)
        return str(caught.value)

    texts = run_ranks(3, body, init=False)
    assert "rank 0 waits for rank 1 (recv" in texts[0]
    assert "which waits for rank 2 (recv" in texts[0]
    assert "waited for each other" not in texts[0] + texts[1]


def test_recv_timeout_lists_available_messages_with_other_tags() -> None:
    def body() -> str:
        me = dist.get_rank()
        if me == 0:
            dist.send(torch.zeros(4), 1, tag=5)
            dist.send(torch.zeros(3, dtype=torch.int64), 1, tag=5)
            dist.send(torch.zeros(2), 1, tag=7)
            dist.barrier()
            dist.barrier()
            dist.send(torch.ones(2), 1, tag=6)
            return ""
        dist.barrier()
        tensor = torch.zeros(2)
        work = dist.irecv(tensor, 0, tag=6)
        with pytest.raises(dist.TimeoutError) as caught:
            work.wait(0.2)
        dist.barrier()
        work.wait()
        for other, tag in ((torch.zeros(4), 5), (torch.zeros(3, dtype=torch.int64), 5), (tensor, 7)):
            dist.recv(other, 0, tag=tag)
        return str(caught.value)

    text = run_ranks(2, body)[1]
    assert "from rank 0 with tag 5: 4 x float32 and 1 more; from rank 0 with tag 7: 2 x float32" in text
