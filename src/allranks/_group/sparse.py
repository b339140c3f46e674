"""``all_reduce`` of sparse tensors by dense calls, because every rank has elements at other indices.

The ranks exchange their numbers of elements, then the indices and values. Each rank adds all of them in the order of
the ranks, so every rank gets the same bits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from allranks._base.errors import MismatchError, UsageError, rank_list
from allranks._call.types import PremulSum, ReduceOp
from allranks._call.work import Complete, Work

__all__ = ["Dense", "all_reduce"]


class Dense(Protocol):
    """The group that transfers the dense tensors: a ``ProcessGroup``."""

    name: str

    @property
    def device(self) -> str:
        """The device on which these tensors must be."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def all_gather(self, outputs: Tensor, tensor: Tensor, /) -> Any:
        """Gather the tensors of all ranks."""
        ...


def all_reduce(group: Dense, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
    """Sum a COO tensor over the ranks, in place. The result is coalesced.

    Cost:
        Three all_gathers: 8 bytes per dimension, then each rank's indices and values, padded to the longest. It is
        complete when this returns, also with ``async_op``.
    """
    if op is not ReduceOp.SUM:
        raise UsageError(
            f"all_reduce on group '{group.name}': {getattr(op, 'name', op)} of sparse tensors is not supported.\n"
            "  Use op=SUM, or pass tensor.to_dense()."
        )
    mine = tensor.detach().coalesce()
    # The shape travels along, so that a mismatch is found on all ranks before any tensor is changed.
    shape = torch.tensor([mine.values().shape[0], mine.sparse_dim(), *mine.shape], device="cpu").to(group.device)
    shapes = _gather(group, shape)
    different = [rank for rank, other in enumerate(shapes) if not torch.equal(other[1:], shapes[0][1:])]
    if different:
        raise MismatchError(
            f"all_reduce on group '{group.name}': the sparse tensors of {rank_list(different)} differ in shape or "
            f"number of sparse dimensions from rank 0's, shape {tuple(shapes[0][2:].tolist())}. No tensor was changed."
            "\n  Pass tensors with the same shape and sparse_dim on every rank."
        )
    counts = [int(other[0]) for other in shapes]
    everyones = torch.cat(_gather(group, mine.indices().mT, counts))
    if mine.sparse_dim():
        places, place_of = torch.unique(everyones, dim=0, return_inverse=True)  # in the order of a coalesced tensor
    else:  # no sparse dimension: one element, which exists or not
        places, place_of = everyones[:1], everyones.new_zeros(len(everyones))
    values = _gather(group, mine.values(), counts)
    # As in the core: float16 and bfloat16 are added in float32.
    wide = torch.float32 if mine.dtype in (torch.float16, torch.bfloat16) else mine.dtype
    sums = torch.zeros(places.shape[0], *mine.values().shape[1:], dtype=wide, device=mine.device)
    for rows, at in zip(values, place_of.split(counts), strict=True):
        sums.index_add_(0, at, rows.to(wide))
    with torch.no_grad():
        tensor.copy_(
            torch.sparse_coo_tensor(
                places.mT,
                sums.to(mine.dtype),
                mine.shape,
                is_coalesced=True,
                check_invariants=False,
                device=mine.device,
            )
        )
    return Complete([tensor]) if async_op else None


def _gather(group: Dense, rows: Tensor, counts: list[int] | None = None) -> list[Tensor]:
    """Return the rows of every rank. ``counts`` is the number of rows of each rank, if they differ."""
    counts = counts or [rows.shape[0]] * group.size()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = padded.new_empty(group.size(), *padded.shape)
    group.all_gather(gathered, padded)
    return [gathered[rank, :count] for rank, count in enumerate(counts)]
