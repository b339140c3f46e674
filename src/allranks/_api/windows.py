"""One-sided communication: memory that other ranks read and write. The names are those of torch 2.15."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks._api.world import GroupMember, resolve_group
from allranks._base.errors import NotInitializedError
from allranks._base.public import publish
from allranks._engines.native.window_memory import allocate
from allranks._group.window import Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from allranks._group.process_group import ProcessGroup

__all__ = ["allocate_tensor", "new_window"]


def new_window(tensor: Tensor | None = None, group: ProcessGroup | None = None) -> Window:
    """Create a window on a group. All ranks of the group call this, in the same order.

    Args:
        tensor: The memory of this rank, which is registered as by ``tensor_register``. None on all ranks: the ranks
            call ``tensor_register`` later.
        group: The process group. None: the world.

    Returns:
        The window.

    Raises:
        UsageError: The engine of the group has no windows: only native and tcp do.
        AllranksError: The tensor of a rank cannot be registered. Raised on every rank.

    Cost:
        Two small all_gathers, and one mapping for each rank of this host. ``tensor_register`` costs the same again.

    Example:
        >>> rank = dist.get_rank()  # on each of 2 ranks; rank 0 shows:
        >>> memory = dist.allocate_tensor(4).zero_()
        >>> window = dist.new_window(memory)
        >>> window.put(torch.full((2,), rank + 1.0), dst_rank=1 - rank, target_offset_nelems=2)
        >>> window.wait_signal(1 - rank)
        >>> memory
        tensor([0., 0., 2., 2.])
        >>> window.tensor_deregister()
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        raise NotInitializedError("new_window: this rank is not in the group.\n  Call it only on members of the group.")
    resolved = resolve_group(group)
    made = Window(resolved, resolved.engine.open_window())
    if tensor is not None:
        made.tensor_register(tensor)
    return made


def allocate_tensor(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Create a CPU tensor in memory that can be registered in a window. Its elements are zero.

    No other rank takes part. The memory is released with the last tensor and window that use it.

    Args:
        shape: The sizes.
        dtype: The dtype. None: torch's default.

    Raises:
        AllranksError: There is no memory.

    Cost:
        Some system calls. The pages are allocated now.
    """
    import torch

    made = torch.empty(0, dtype=dtype, device="cpu")
    meta = torch.empty(shape, dtype=dtype, device="meta")
    memory = allocate(math.prod(meta.shape) * meta.element_size())
    return made.set_(memory.untyped_storage(), 0, meta.shape, meta.stride())


publish(globals())
