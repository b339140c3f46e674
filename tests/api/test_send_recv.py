"""send and recv: both ranks send first, tags, any source, sizes, refused arguments."""

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_send_and_recv_transfer_every_size_and_dtype() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        for dtype in (torch.float32, torch.uint8, torch.complex64):
            for count in (0, 1, 100, 5000):
                dist.send(
                    torch.full((count,), rank, dtype=dtype), following
                )  # every rank sends first: the messages are buffered
                tensor = torch.zeros(count, dtype=dtype)
                assert dist.recv(tensor, previous) == previous
                assert bool((tensor == previous).all())
        large = torch.arange(1_000_000, dtype=torch.float32)
        if rank == 0:
            for other in range(1, size):
                dist.send(large, dst=other)
        else:
            tensor = torch.zeros_like(large)
            dist.recv(tensor, src=0)
            assert torch.equal(tensor, large)
        grid = torch.zeros(3, 4).t()
        if rank == 0:
            dist.send(torch.arange(12.0).reshape(3, 4).t(), 1)
        elif rank == 1:
            dist.recv(grid, 0)
            assert torch.equal(grid, torch.arange(12.0).reshape(3, 4).t())

    run_ranks(3, body)


def test_recv_matches_tags_and_any_source() -> None:
    def body() -> None:
        rank = dist.get_rank()
        one = torch.zeros(1)
        if rank == 0:
            senders = []
            for _ in range(2):
                senders.append(dist.recv(one, tag=9))
                assert one.item() == 10 * senders[-1]
            assert sorted(senders) == [1, 2]
            for tag in (2, 1):  # buffered until this rank receives it
                dist.recv(one, 1, tag=tag)
                assert one.item() == tag
        else:
            if rank == 1:
                for tag in (1, 2):
                    dist.send(torch.tensor([float(tag)]), 0, tag=tag)
            dist.send(torch.tensor([10.0 * rank]), 0, tag=9)

    run_ranks(3, body)


def test_message_of_another_size_or_dtype_is_refused() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), 1)
            dist.send(torch.ones(4, dtype=torch.int32), 1)
            dist.send(torch.ones(200_000), 1)
            dist.send(torch.ones(4), 1)
        else:
            tensor = torch.zeros(4)
            for sent in ("1000 x float32", "4 x int32", "200000 x float32"):
                with pytest.raises(dist.MismatchError, match=rf"rank 0 \(.*\) sent {sent}.* holds 4 x float32"):
                    dist.recv(tensor, 0)
                assert not tensor.any()
            dist.recv(tensor, 0)
            assert bool((tensor == 1).all())

    run_ranks(2, body)


def test_invalid_peers_and_devices_are_refused() -> None:
    def body() -> None:
        me = dist.get_rank()
        with pytest.raises(dist.UsageError, match="is this rank itself"):
            dist.send(torch.ones(1), me)
        with pytest.raises(dist.UsageError, match="is this rank itself"):
            dist.recv(torch.ones(1), me)
        with pytest.raises(dist.UsageError, match="expected 0 to 1"):
            dist.send(torch.ones(1), 2)
        with pytest.raises(dist.UsageError, match="on meta"):
            dist.send(torch.ones(1, device="meta"), 1 - me)

    run_ranks(2, body)
