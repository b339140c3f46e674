"""Tensors whose shape needs more memory than their storage has: an error instead of a crash."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allranks as dist
from allranks._call.bytes import view_of
from allranks.testing import run_ranks

COUNTS = (8, 1 << 20)  # the core checks large tensors by another method


def _freed(count: int) -> Tensor:
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


def _end_of_freed(count: int) -> Tensor:
    whole = torch.ones(2 * count)
    end = whole[count:]
    whole.untyped_storage().resize_(0)
    return end


def _column_of_freed(count: int) -> Tensor:
    whole = torch.ones(count, 2)
    column = whole[:, 1]
    whole.untyped_storage().resize_(0)
    return column


def _parameter(count: int) -> Tensor:
    parameter = nn.Parameter(torch.ones(count))
    parameter.untyped_storage().resize_(0)
    return parameter


def _shrunk(count: int) -> Tensor:
    tensor = torch.ones(1 << 20)  # large: for a small storage, the core checks the size only if it may have been freed
    tensor.untyped_storage().resize_(4 * count)
    return tensor


KINDS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "freed": (_freed, "bytes of its storage, which has 0"),
    "end of freed": (_end_of_freed, "bytes of its storage, which has 0"),
    "column of freed": (_column_of_freed, "bytes of its storage, which has 0"),
    "parameter": (_parameter, "bytes of its storage, which has 0"),
    "shrunk": (_shrunk, "needs 4194304 bytes of its storage, which has 32"),
    "zeros": (lambda count: torch._efficientzerotensor(count), "represents zeros"),
}


@pytest.mark.parametrize("backend", ["allranks", "gloo"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_verb_reads_or_writes_beyond_the_storage(kind: str, backend: str) -> None:
    make, words = KINDS[kind]

    def body() -> None:
        dist.init_process_group(backend)
        rank = dist.get_rank()
        for count in COUNTS if kind != "shrunk" else COUNTS[:1]:
            tensor = make(count)
            like = torch.zeros(tensor.shape)
            calls: list[Callable[[], Any]] = [
                lambda: dist.all_reduce(tensor),  # noqa: B023
                lambda: dist.all_reduce(tensor, async_op=True),  # noqa: B023
                lambda: dist.broadcast(tensor, 0),  # noqa: B023
                lambda: dist.all_gather([like, like.clone()], tensor),  # noqa: B023
                lambda: dist.all_gather([tensor, like], like.clone()),  # noqa: B023
                lambda: dist.reduce_scatter(like, [tensor, tensor]),  # noqa: B023
                lambda: dist.all_to_all_single(tensor, like),  # noqa: B023
                lambda: dist.all_to_all_single(like, tensor),  # noqa: B023
                lambda: dist.send(tensor, 1 - rank),  # noqa: B023
                lambda: dist.irecv(tensor, 1 - rank),  # noqa: B023
            ]
            for call in calls:
                with pytest.raises((dist.UsageError, RuntimeError), match=f"{words}|out of bounds for storage"):
                    call()  # torch may refuse first, when the tensor is divided into chunks
        total = torch.ones(1)
        dist.all_reduce(total)  # the refused calls have not started
        assert total == 2

    run_ranks(2, body, init=False)


def test_view_of_a_freed_tensor_is_refused() -> None:
    with pytest.raises(dist.UsageError, match="its storage was freed"):
        view_of(_freed(8))


def test_overlapping_result_is_refused_without_listing_its_elements() -> None:
    def body() -> None:
        large = torch.ones(1).expand(1 << 26)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            with pytest.raises(dist.UsageError, match="share memory"):
                dist.all_reduce(large)
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
        )  # listing all elements takes 3 GB
        for overlapping in (torch.ones(6).as_strided((3, 2), (2, 1)), torch.ones(30).as_strided((4, 3), (3, 2))):
            dist.all_reduce(overlapping)  # no two elements share an address
        with pytest.raises(dist.UsageError, match="share memory"):
            dist.all_reduce(torch.ones(30).as_strided((4, 3), (2, 3)))

    run_ranks(2, body)


def test_ranks_may_pass_different_shapes_of_equal_size() -> None:
    def body() -> None:
        first = dist.get_rank() == 0
        scalar = torch.tensor(5.0) if first else torch.zeros(1)
        dist.broadcast(scalar, 0)
        assert scalar.item() == 5
        total = torch.ones(6) if first else torch.ones(2, 3)
        dist.all_reduce(total)
        assert total.flatten().tolist() == [2.0] * 6
        gathered = [torch.zeros(6), torch.zeros(3, 2)]
        dist.all_gather(gathered, total)
        assert all(bool((piece == 2).all()) for piece in gathered)

    run_ranks(2, body)


def test_different_shapes_are_an_error_in_debug_mode() -> None:
    def body() -> None:
        with pytest.raises(dist.MismatchError, match="with tensors of different shapes"):
            dist.all_reduce(torch.ones((2, 3) if dist.get_rank() else (3, 2)))

    run_ranks(2, body, env={"ALLRANKS_DEBUG": "DETAIL"})
