"""Ranks, roots, tags and sizes that programs compute with NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

KINDS: dict[str, Callable[[int], Any]] = {
    "int64": np.int64,
    "uint8": np.uint8,
    "tensor": lambda value: torch.tensor(value),
    "tensor of one": lambda value: torch.tensor([value], dtype=torch.int32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["allranks", "gloo"])
def test_numpy_and_torch_integers_are_accepted_as_ranks_tags_and_sizes(kind: str, backend: str) -> None:
    number = KINDS[kind]

    def body() -> list[Any]:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        found: list[Any] = []
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, number(1))
        found.append(tensor.tolist())
        dist.reduce(tensor, number(0))
        pieces = [torch.zeros(2), torch.zeros(2)]
        dist.gather(tensor, pieces if rank == 1 else None, number(1))
        dist.scatter(tensor, pieces if rank == 1 else None, number(1))
        found.append(tensor.tolist())
        if rank == 0:
            dist.send(tensor, number(1), tag=number(3))
            dist.isend(tensor, number(1), tag=number(4)).wait()
        else:
            dist.recv(tensor, number(0), tag=number(3))
            dist.irecv(tensor, number(0), tag=number(4)).wait()
        found.append(tensor.tolist())
        out, splits = torch.zeros(2), [number(1), number(1)]
        dist.all_to_all_single(out, torch.arange(2.0) + 10 * rank, splits, splits)
        found.append(out.tolist())
        group = dist.new_group([number(0), number(1)])
        found.append(dist.get_group_rank(group, number(1)))
        objects: list[Any] = [rank]
        dist.broadcast_object_list(objects, number(1))
        found += [objects, dist.empty_shared((number(2), 1)).shape, dist.empty_shared(number(3)).shape]
        assert all(type(each) is int for each in dist.get_process_group_ranks(group))
        return found

    for rank, found in enumerate(run_ranks(2, body, init=False)):
        assert found == [
            [1.0, 1.0],
            [2.0, 2.0] if rank == 0 else [1.0, 1.0],
            [2.0, 2.0],
            [float(rank), 10.0 + rank],
            1,
            [1],
            (2, 1),
            (3,),
        ]


def test_non_integer_raises_type_error_that_names_the_argument() -> None:
    def body() -> None:
        tensor = torch.ones(2)
        for wrong in ("1", 1.0, [0], torch.ones(1), torch.tensor([0, 1]), object()):
            kind = type(wrong).__name__
            with pytest.raises(TypeError, match=f"src must be a rank, not {kind}"):
                dist.broadcast(tensor, wrong)
            with pytest.raises(TypeError, match=f"dst must be a rank, not {kind}"):
                dist.reduce(tensor, wrong)
            with pytest.raises(TypeError, match=f"dst must be a rank, not {kind}"):
                dist.send(tensor, wrong)
            with pytest.raises(TypeError, match=f"tag must be an integer, not {kind}"):
                dist.isend(tensor, 1 - dist.get_rank(), tag=wrong)
            with pytest.raises(TypeError, match="ranks: expected a rank, not"):
                dist.new_group([wrong])
            with pytest.raises(TypeError, match="output_split_sizes must be integers"):
                dist.all_to_all_single(tensor, tensor.clone(), [wrong, 1], [1, 1])
            with pytest.raises(dist.UsageError, match=f"group must be a ProcessGroup or None, not {kind}"):
                dist.all_reduce(tensor, group=wrong)

    run_ranks(2, body)


def test_reduce_op_has_a_name_and_an_integer_value() -> None:
    assert str(dist.ReduceOp.SUM) == f"{dist.ReduceOp.SUM}" == "ReduceOp.SUM"
    assert int(dist.ReduceOp.MAX) == 4


def test_error_about_an_ipv6_address_without_brackets_shows_the_correct_form() -> None:
    with pytest.raises(dist.ConfigError, match=r"needs brackets: tcp://\[::1\]:29500"):
        dist.init_process_group(init_method="tcp://::1:29500", rank=0, world_size=2)


def test_error_reports_that_torch_distributed_uses_its_own_backend() -> None:
    def body() -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        with pytest.raises(dist.NotInitializedError, match=r"torch\.distributed is initialized with its own backend"):
            dist.all_reduce(torch.ones(1))
        torch.distributed.destroy_process_group()

    run_ranks(1, body, init=False)
