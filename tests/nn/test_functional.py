"""allranks.nn.functional: values and gradients, compared with torch on gloo and with numerical derivatives.

The gradient of a collective is the gradient of the sum of the losses of all ranks. The checks compute this sum, and
shift one element of one rank at a time.
"""

import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import allranks
from allranks.nn import functional
from allranks.testing import run_ranks

OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]


def pieces(x: Tensor, size: int) -> list[Tensor]:
    """Return one tensor per rank. All differ, and all depend on ``x``."""
    return [x * (1 + i / 4) - i / 5 for i in range(size)]


# Map names to functions that use the library ``f`` on a tensor of shape (size, 2). Every root is the last world rank.
def programs(f: Any, size: int, group: Any, op: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    last = size - 1
    uneven = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    rank = allranks.get_rank(group if isinstance(group, allranks.ProcessGroup) else None)

    def uneven_all_to_all(x: Tensor) -> Tensor:
        arriving = [uneven[sender][rank] for sender in range(size)]
        rows = x.repeat(3, 1)[: sum(uneven[rank])]
        return f.all_to_all_single(rows.new_empty(sum(arriving), 2), rows, arriving, uneven[rank], group=group)

    return {
        "broadcast": lambda x: f.broadcast(x, last, group=group),
        "reduce": lambda x: (
            f.reduce(x, last, op, group=group) * (rank == last)
        ),  # torch leaves the values on other ranks undefined
        "all_reduce": lambda x: f.all_reduce(x, op, group=group),
        "gather": lambda x: torch.stack(f.gather(x, last, group=group)),
        "scatter": lambda x: f.scatter(pieces(x, size), last, group=group),
        "all_gather": lambda x: torch.stack(f.all_gather(x, group=group)),
        "reduce_scatter": lambda x: f.reduce_scatter(torch.empty_like(x), pieces(x, size), op, group=group),
        "all_to_all": lambda x: torch.cat(
            f.all_to_all([torch.empty_like(x) for _ in range(size)], pieces(x, size), group=group)
        ),
        "all_to_all_single": lambda x: f.all_to_all_single(torch.empty_like(x), x * x, group=group),
        "uneven": uneven_all_to_all,
        "all_gather_base": lambda x: f._all_gather_base(x.new_empty(size * x.shape[0], 2), x, group=group),
        "transposed": lambda x: f.all_reduce(x.mT, op, group=group),
    }


def ours_only(size: int, op: allranks.ReduceOp) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "reduce_scatter_base": lambda x: functional._reduce_scatter_base(
            x.new_empty(x.shape), torch.cat(pieces(x, size)), op
        ),
    }


def joint(value: Tensor) -> Tensor:
    """Return the sum over the ranks, outside autograd."""
    total = value.detach().clone()
    allranks.all_reduce(total)
    return total


def weighted(output: Tensor) -> Tensor:
    """Return a nonlinear loss in which every element has another weight."""
    weights = torch.linspace(0.3, 1.7, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (weights * output.sin()).sum()


def check_derivative(loss: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare the gradient of the summed losses with central differences, for every element of every rank."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-6
    for rank in range(allranks.get_world_size()):
        for i in range(x.numel()):
            shift = torch.zeros_like(x)
            if rank == allranks.get_rank():
                shift.view(-1)[i] = step
            numerical = (joint(loss(x + shift)) - joint(loss(x - shift))) / (2 * step)
            if rank == allranks.get_rank():
                torch.testing.assert_close(gradient.flatten()[i], numerical, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_first_and_second_derivatives_equal_numerical_derivatives(ranks: int) -> None:
    def body() -> None:
        size, rank = allranks.get_world_size(), allranks.get_rank()
        for op in OPS:
            chosen = allranks.ReduceOp[op]
            for name, program in {
                **programs(functional, size, None, chosen),
                **ours_only(size, chosen),
            }.items():
                if op != "SUM" and "reduce" not in name:
                    continue
                x = torch.arange(size * 2, dtype=torch.float64).reshape(size, 2).cos() + rank / 7 + 0.1

                def loss(x: Tensor, program: Callable[[Tensor], Tensor] = program) -> Tensor:
                    return weighted(program(x))

                def slope(x: Tensor, loss: Callable[[Tensor], Tensor] = loss) -> Tensor:
                    leaf = x if x.requires_grad else x.clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
                    return weighted(gradient)

                check_derivative(loss, x)
                check_derivative(slope, x)

    run_ranks(ranks, body, timeout_s=100)


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_and_gradients_equal_torch_on_gloo(ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body() -> list[str]:
        import torch.distributed as peer
        import torch.distributed.nn.functional as theirs

        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own function names
        rank, size = allranks.get_rank(), allranks.get_world_size()
        peer.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        compared = []
        expected = programs(theirs, size, peer.group.WORLD, peer.ReduceOp.SUM)
        actual = programs(functional, size, None, allranks.ReduceOp.SUM)
        for name, program in actual.items():
            values, gradients = [], []
            if name == "all_gather_base":
                continue  # torch: "Backend not supported!" in the backward
            for run in (expected[name], program):
                x = (torch.arange(size * 2, dtype=torch.float64).reshape(size, 2) / 3 + rank).requires_grad_()
                output = run(x)
                weighted(output).backward()
                values.append(output.detach())
                gradients.append(x.grad)
            torch.testing.assert_close(values[1], values[0], msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(gradients[1], gradients[0], msg=lambda text, name=name: f"{name}: {text}")
            compared.append(name)
        peer.destroy_process_group()
        return compared

    assert len(run_ranks(ranks, body)[0]) == 11


def test_roots_in_a_group_are_world_ranks() -> None:
    def body() -> None:
        group = allranks.new_group([2, 1])
        if allranks.get_rank() == 0:
            with pytest.raises(allranks.UsageError, match="not a member"):
                functional.all_reduce(torch.ones(1), group=group)
            return
        me = float(allranks.get_rank())
        x = torch.tensor([me], requires_grad=True)
        received = functional.broadcast(x, 2, group)
        (received * me).sum().backward()
        assert received.item() == 2
        assert x.grad.item() == (3 if me == 2 else 0)
        gathered = functional.gather(x, 1, group)
        assert [g.item() for g in gathered] == ([1, 2] if me == 1 else [0, 0])
        with pytest.raises(allranks.UsageError, match="not in group"):
            functional.reduce(x, 0, group=group)

    run_ranks(3, body)


def test_ranks_with_equal_values_share_the_gradient_of_a_maximum() -> None:
    def body() -> list[float]:
        x = torch.tensor([1.0, float(allranks.get_rank())], requires_grad=True)
        functional.all_reduce(x, allranks.ReduceOp.MAX).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(2, body) == [[1.0, 0.0], [1.0, 2.0]]


def test_gradient_of_a_product_with_zeros_is_correct() -> None:
    def body() -> list[float]:
        x = torch.tensor([0.0, 2.0] if allranks.get_rank() else [3.0, 0.0], requires_grad=True)
        functional.all_reduce(x, allranks.ReduceOp.PRODUCT).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(2, body) == [[0.0, 4.0], [6.0, 0.0]]


def test_inputs_are_unchanged_and_outputs_are_written() -> None:
    def body() -> None:
        rank, size = allranks.get_rank(), allranks.get_world_size()
        x = torch.full((2,), float(rank + 1))
        for name in ("all_reduce", "all_gather"):
            getattr(functional, name)(x)
        functional.broadcast(x, 1)
        functional.reduce(x, 1)
        assert x.tolist() == [rank + 1] * 2
        for op, expected in (("SUM", 3), ("MAX", 2)):
            written = torch.zeros(2)
            returned = functional.reduce_scatter(written, [x] * size, allranks.ReduceOp[op])
            assert written.tolist() == returned.tolist() == [expected] * 2, op
        chunks = torch.zeros(2 * size)
        functional.all_to_all(list(chunks.chunk(size)), [x.requires_grad_() * 1] * size)
        assert chunks.tolist() == [1, 1, 2, 2]

    run_ranks(2, body)


def test_overwriting_an_output_that_backward_needs_raises() -> None:
    """Write into an output twice before backward, and expect an error.

    Without the error, the first backward would use the values of the second call and give wrong gradients.
    """

    def body() -> None:
        rank, size = allranks.get_rank(), allranks.get_world_size()
        row, rows = torch.zeros(2), torch.zeros(2 * size)
        lists = list(torch.zeros(size, 2).unbind())
        into: dict[str, Callable[[Tensor], Tensor]] = {
            "reduce_scatter": lambda x: functional.reduce_scatter(row, [x] * size),
            "reduce_scatter_base": lambda x: functional._reduce_scatter_base(row, torch.cat([x] * size)),
            "all_gather_base": lambda x: functional._all_gather_base(rows, x),
            "all_to_all": lambda x: functional.all_to_all([t.detach() for t in lists], [x] * size)[rank],
            "all_to_all_single": lambda x: functional.all_to_all_single(rows, torch.cat([x] * size)),
        }
        for name, call in into.items():
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            once = call(x).square().sum()
            once.backward()
            assert x.grad is not None
            assert x.grad.norm() > 0, name
            first = call(x).square().sum()
            second = call(x * 3).square().sum()
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                (first + second).backward()
            allranks.barrier()

    run_ranks(2, body)


def test_premul_sum_has_gradients_and_checks_its_factor() -> None:
    def body() -> None:
        whole, size = torch.tensor([1, 3]), allranks.get_world_size()
        for op, dtype in ((allranks.premul_sum(0.5), "torch.int64"), (allranks.premul_sum(torch.tensor(0.5)), "")):
            for call in (
                lambda op: functional.all_reduce(whole, op),
                lambda op: functional.reduce(whole, 0, op),
                lambda op: functional.reduce_scatter(torch.zeros_like(whole), [whole] * size, op),
            ):
                with pytest.raises(allranks.UsageError, match=f"premul_sum: a factor of 0.5 on {dtype}"):
                    call(op)
        with pytest.raises(allranks.UsageError, match=r"a factor of 2 on torch\.bool"):
            functional.all_reduce(whole > 1, allranks.premul_sum(2))
        assert functional.all_reduce(whole, allranks.premul_sum(2)).tolist() == [4, 12]
        factor = torch.tensor([[[2.0]]], requires_grad=True)
        x = torch.tensor(3.0, requires_grad=True)
        total = functional.all_reduce(x, allranks.premul_sum(factor))
        assert total.shape == ()
        total.backward()
        assert (total.item(), x.grad, factor.grad) == (12, torch.tensor(4.0), None)

    run_ranks(2, body)


def test_signatures_equal_torch() -> None:
    import inspect

    import torch.distributed.nn.functional as theirs

    for name in (*functional.__all__, "_all_gather_base"):
        expected = inspect.signature(getattr(theirs, name)).parameters
        actual = inspect.signature(getattr(functional, name)).parameters
        assert list(actual) == list(expected)
        assert [p.default for p in actual.values() if p.name in ("src", "dst")] == [
            p.default for p in expected.values() if p.name in ("src", "dst")
        ]
