"""Tensors in memory that all ranks of a group see."""

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
    """An uninitialised CPU tensor in memory that all ranks of the group see, for collectives that copy nothing.

    Every rank gets its own tensor, which behaves like any other. A collective of this group in which every rank
    passes its tensor of the same ``empty_shared`` call (or a contiguous part of it) reads and writes all of them
    where they lie; of verbs with an input and an output it is the input that counts, of scatter both.
    ``stats().shared`` counts such calls. Where the group spans hosts it is an ordinary tensor. With any other
    tensors the same collectives work as always. Messages (send, recv) gain nothing.

    Called by every rank of the group, with sizes of equally many bytes.

    Args:
        shape: its sizes.
        dtype: None is torch's default.
        group: None is the world.

    Returns:
        The tensor. Its memory goes back when every rank has dropped its own.

    Raises:
        MismatchError: the ranks ask for different sizes, or call something else.
        AllranksError: there is no memory on some rank.
        NotInitializedError: this rank is not in the group.

    Cost:
        a few hundred microseconds, and one mapping of every rank's memory in every rank: what is made once and used
        often (gradient buckets) belongs here. Large calls (from 16 KiB of broadcast to 128 KiB of all_gather on) then
        copy nothing: an all_reduce moves 2 n bytes per rank in place of about 4 n, in a third (1 to 4 MB) to
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
        raise NotInitializedError("empty_shared: this rank is not in the group")
    sizes = [integer_of(size) for size in (shape if isinstance(shape, Sequence) else [shape])]
    known = [size for size in sizes if size is not None and size >= 0]
    if len(known) < len(sizes):
        raise UsageError(f"empty_shared: a shape is integers of at least 0, not {shape!r}")
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    memory = resolve_group(group).empty_shared(math.prod(known) * tensor.itemsize)
    strides = torch.empty(known, device="meta").stride()
    tensor.set_(memory.untyped_storage(), 0, known, strides)
    return tensor


publish(globals())
