"""all_reduce of sparse tensors, compared with gloo."""

import socket
import warnings

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]  # gloo lacks float16


def sparse(rank: int, dtype: torch.dtype, shape: tuple[int, ...], sparse_dims: int, count: int) -> torch.Tensor:
    """Return a tensor of ``count`` elements that is not coalesced and differs between ranks."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.stack([torch.randint(0, size, (count,), generator=generator) for size in shape[:sparse_dims]])
    values = torch.randint(-3, 4, (count, *shape[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(places, values, shape)


@pytest.mark.parametrize("ranks", [1, 3])
def test_sparse_all_reduce_equals_gloo(ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body() -> int:
        import torch.distributed as peer

        warnings.simplefilter("ignore")
        rank = dist.get_rank()
        peer.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        compared = 0
        for dtype in DTYPES:
            for shape, sparse_dims in (((6,), 1), ((4, 3), 2), ((5, 2, 3), 1)):
                for count in (0, 4 * (rank > 0), 3 + rank):  # no rank has elements; every rank except 0; every rank
                    theirs, ours = (sparse(rank, dtype, shape, sparse_dims, count) for _ in range(2))
                    peer.all_reduce(theirs)
                    dist.all_reduce(ours)
                    assert ours.is_coalesced()
                    assert ours.dtype == dtype
                    assert torch.equal(ours.to_dense(), theirs.to_dense())
                    compared += 1
        peer.destroy_process_group()
        return compared

    assert run_ranks(ranks, body) == [36] * ranks


def test_sums_in_rank_order_are_bitwise_equal_on_every_rank() -> None:
    def body() -> torch.Tensor:
        rank = dist.get_rank()
        tensor = torch.sparse_coo_tensor([[0, 1]], [[1e8, 1.0, -1e8][rank], 0.1 * rank], (2,))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait()
        assert work.is_success()
        assert work.result()[0] is tensor
        return tensor.to_dense()

    first, *others = run_ranks(3, body)
    expected = (torch.tensor([1e8, 0.0]) + torch.tensor([1.0, 0.1])) + torch.tensor([-1e8, 0.2])
    assert torch.equal(first, expected)
    assert all(torch.equal(first, other) for other in others)


def test_float16_values_are_summed_in_float32() -> None:
    def body() -> list[float]:
        value = [2048.0, 1.0, 1.0][dist.get_rank()]
        tensor = torch.sparse_coo_tensor([[0]], torch.tensor([value], dtype=torch.float16), (1,))
        dist.all_reduce(tensor)
        return tensor.to_dense().tolist()

    assert run_ranks(3, body) == [[2050.0]] * 3


def test_all_reduce_accepts_a_leaf_that_requires_a_gradient() -> None:
    def body() -> float:
        tensor = torch.ones(2).to_sparse().requires_grad_()
        dist.all_reduce(tensor)
        return tensor.to_dense().sum().item()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_errors() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(dist.MismatchError, match=r"of rank 1 differ in shape .* from rank 0's, shape \(2,\)"):
            dist.all_reduce(torch.ones(2 + rank).to_sparse())
        with pytest.raises(dist.MismatchError, match="all_gather"):
            dist.all_reduce(torch.ones(*[2] * (1 + rank)).to_sparse())
        with pytest.raises(dist.UsageError, match="MAX of sparse tensors is not supported"):
            dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX)
        with pytest.raises(
            dist.UsageError, match=r"a tensor of torch\.float32 with layout torch\.sparse_coo is not supported"
        ):
            dist.broadcast(torch.ones(2).to_sparse(), 0)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # the group works after an error
        assert tensor.item() == 2

    run_ranks(2, body)
