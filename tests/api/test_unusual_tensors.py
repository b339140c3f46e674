"""Tensors under torch.func, sparse tensors without dimensions, and waits with a timeout argument."""

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def _doubled_and_summed(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    dist.all_reduce(doubled)
    return doubled.sum()


def test_calls_in_functions_under_torch_func_grad() -> None:
    """Check that a call changes the value, but is not differentiated, as in torch.distributed."""

    def body() -> None:
        x = torch.ones(3) * (dist.get_rank() + 1)
        gradient, value = torch.func.grad_and_value(_doubled_and_summed)(x)
        assert gradient.tolist() == [2, 2, 2]
        assert value == 18

        def others(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            pieces = [torch.empty(3) for _ in range(2)]
            dist.all_gather(pieces, doubled)
            dist.broadcast(doubled, 0)
            work = dist.all_reduce(doubled, async_op=True)
            assert work is not None
            work.wait()
            return doubled.sum() + sum(piece.sum() for piece in pieces)

        assert torch.func.grad_and_value(others)(x)[1] == 12 + 18
        second = torch.func.grad(lambda x: torch.func.grad(_doubled_and_summed)(x).sum() + _doubled_and_summed(x))
        assert second(x).tolist() == [2, 2, 2]
        with pytest.raises(dist.UsageError, match=r"all_reduce: cannot be called within torch\.func\.vmap"):
            torch.func.vmap(_doubled_and_summed)(torch.ones(2, 3))

    run_ranks(2, body)


def test_sparse_tensor_without_dimensions_is_reduced() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for there in ((0, 1), (1,), ()):  # the ranks on which the tensor has an element
            count = int(rank in there)
            sparse = torch.sparse_coo_tensor(
                torch.empty(0, count, dtype=torch.long), torch.full((count,), rank + 1.0), ()
            )
            dist.all_reduce(sparse)
            assert sparse.to_dense() == sum(each + 1 for each in there)

    run_ranks(2, body)


def test_error_of_a_wait_with_a_timeout_advises_to_wait_again() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            received = torch.zeros(1)
            work = dist.irecv(received, 1)
            assert work is not None
            with pytest.raises(dist.TimeoutError, match=r"(?s)rank 1 .*Call wait\(\) again") as error:
                work.wait(0.2)
            assert "init_process_group(timeout=" not in str(error.value)
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)
        else:
            work.wait()
            assert received == 1

    run_ranks(2, body)
