"""Tensors in memory that all ranks of a group share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks._api.world import GroupMember, resolve_group
from allranks._base.errors import NotInitializedError, UsageError
from allranks._base.integers import integer_of
from allranks._base.public import publish

if TYPE_CHECKING:
    import torch

    from allranks._group.process_group import ProcessGroup

__all__ = ["empty_shared"]


def empty_shared(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Create an uninitialized CPU tensor in memory that all ranks of the group share, for collectives without copies.

    Every rank receives its own tensor, which behaves like any other. A collective of this group can read and write
    these tensors in place. For this, every rank must pass its tensor of the same ``empty_shared`` call, or a contiguous
    part of it. If a verb has an input and an output, the input must be such a tensor; for scatter, both.
    ``stats().shared`` counts these calls. If the group spans hosts, the result is an ordinary tensor. With any other
    tensors the same collectives work unchanged. Messages (send, recv) do not become faster.

    Every rank of the group must call this, with sizes of the same number of bytes.

    Args:
        shape: The sizes.
        dtype: The dtype. None: torch's default.
        group: The process group. None: the world.

    Returns:
        The tensor. Its memory is released when every rank has dropped its own tensor.

    Raises:
        MismatchError: The ranks request different sizes, or make another call.
        AllranksError: A rank has no memory available.
        NotInitializedError: This rank is not in the group.

    Cost:
        a few hundred microseconds, and one mapping of every rank's memory in every rank. Use it for tensors that are
        created once and used often (gradient buckets). Large calls (from 16 KiB of broadcast to 128 KiB of all_gather
        on) then copy nothing: an all_reduce moves 2 n bytes per rank instead of about 4 n, in a third (1 to 4 MB) to
        two thirds (64 MB) of the time.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()  # one process: the world is this one
        >>> t = dist.empty_shared((2, 3), torch.float64).fill_(1)
        >>> dist.all_reduce(t)
        >>> t.sum().item()
        6.0
        >>> dist.destroy_process_group()
    """
    import torch

    if group == GroupMember.NON_GROUP_MEMBER:
        raise NotInitializedError(
            "empty_shared: this rank is not in the group.\n  Call it only on members of the group."
        )
    sizes = [integer_of(size) for size in (shape if isinstance(shape, Sequence) else [shape])]
    known = [size for size in sizes if size is not None and size >= 0]
    if len(known) < len(sizes):
        raise UsageError(f"empty_shared: shape must consist of integers of at least 0, not {shape!r}")
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    memory = resolve_group(group).empty_shared(math.prod(known) * tensor.itemsize)
    # A tensor on meta has no memory, and yields the strides that torch would choose.
    strides = torch.empty(known, device="meta").stride()
    tensor.set_(memory.untyped_storage(), 0, known, strides)
    return tensor


publish(globals())
