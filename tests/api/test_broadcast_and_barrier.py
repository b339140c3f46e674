"""broadcast and barrier: values, roots, dtypes, order."""

import time

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_broadcast_copies_the_tensor_of_the_root_to_every_rank() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
            for count in (0, 1, 20, 3000, 200_000):
                for root in range(size):
                    data = ((torch.arange(count) * 7 + root) % 5).to(dtype)
                    tensor = data.clone() if rank == root else torch.zeros(count, dtype=dtype)
                    dist.broadcast(tensor, root)
                    assert torch.equal(tensor.view(torch.uint8), data.view(torch.uint8))
        grid = torch.arange(6.0).reshape(2, 3).t() * (rank == 1)
        dist.broadcast(grid, src=1)
        assert torch.equal(grid, torch.arange(6.0).reshape(2, 3).t())
        tensors = [torch.full((n,), float(rank)) for n in (1, 100, 100_000)]
        works = [dist.broadcast(tensor, 2, async_op=True) for tensor in tensors]
        assert all(work.wait() for work in works)
        assert all(tensor.eq(2).all() for tensor in tensors)

    run_ranks(3, body)


def test_barrier_blocks_until_every_rank_has_entered() -> None:
    def body() -> tuple[float, float]:
        if dist.get_rank() == 1:
            time.sleep(0.3)
        entered = time.monotonic()
        dist.barrier()
        left = time.monotonic()
        dist.barrier(async_op=True).wait()
        return entered, left

    times = run_ranks(4, body)
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


def test_missing_or_invalid_source_ranks_are_refused() -> None:
    def body() -> None:
        for src in (-1, 2):
            with pytest.raises(dist.UsageError, match="is not a rank of group 'world': expected 0 to 1"):
                dist.broadcast(torch.ones(1), src)
        with pytest.raises(dist.UsageError, match="src or group_src must be passed"):
            dist.broadcast(torch.ones(1))
        with pytest.raises(dist.UsageError, match="not both"):
            dist.broadcast(torch.ones(1), 0, group_src=0)

    run_ranks(2, body)
