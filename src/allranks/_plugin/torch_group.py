"""``torch_group``: registers a group of allranks with torch."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch

from allranks._api.world import resolve_group, torch_store
from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks._group.process_group import ProcessGroup
from allranks._plugin import register
from allranks._plugin.creation import adopting, group_of_torch
from allranks._plugin.names import NAME

__all__ = ["torch_group"]

_c10d: Any = torch.distributed


def torch_group(group: ProcessGroup | int | None = None) -> Any:
    """Return the group as a ``torch.distributed.ProcessGroup``, for features of PyTorch: DDP, FSDP, DTensor, ...

    This initializes torch.distributed on this world: its functions, called without a group, refer to the same ranks.
    For the world, torch calls this itself when its default group is first requested.

    Args:
        group: The group. None: the world.

    Returns:
        torch's group. All calls return the same object.

    Raises:
        NotInitializedError: The group does not exist.
        UsageError: torch.distributed is initialized with other ranks.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()
        >>> group = dist.torch_group(dist.new_group([0]))
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        >>> dist.destroy_process_group()
    """
    ours = resolve_group(group)
    world = resolve_group(None)
    if _c10d.is_initialized():
        if (_c10d.get_rank(), _c10d.get_world_size()) != (world.rank(), world.size()):
            raise UsageError(
                f"torch.distributed is initialized with rank {_c10d.get_rank()} of {_c10d.get_world_size()}, allranks "
                f"with rank {world.rank()} of {world.size()}.\n  Pass the same rank and world size to both, or"
                " initialize only one of them."
            )
    else:
        register()
        store = torch_store()
        assert store is not None  # otherwise torch has created this world
        store.serve()
        timeout = timedelta(seconds=world.timeout_s)
        excepthook = sys.excepthook  # torch's hook prefixes each line of a traceback with the rank
        with adopting(world):
            _c10d.init_process_group(NAME, store=store, rank=world.rank(), world_size=world.size(), timeout=timeout)
        sys.excepthook = excepthook
    return group_of_torch(ours)


publish(globals())
