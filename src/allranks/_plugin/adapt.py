"""Adapts functions that torch implements only for its own groups, by name or in C++.

Each function replaces a function of torch by one that first checks whether the group belongs to allranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from allranks._api import world
from allranks._plugin.work import finish_all, finished_futures

__all__ = ["TORCHS_DDP", "adapt"]

TORCHS_DDP: tuple[Any, ...] = tuple(
    each
    for each in nn.Module.__subclasses__()
    if (each.__module__, each.__name__) == ("torch.nn.parallel.distributed", "DistributedDataParallel")
)
"""torch's class, for isinstance. The program may have assigned another object to its name."""

_c10d: Any = torch.distributed
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of reducers


@functools.cache
def adapt(split: Callable[..., Any]) -> None:
    """Adapt torch's functions to groups of allranks, once per process.

    Args:
        split: torch.distributed.split_group for a group of allranks.
    """
    _let_barrier_be_monitored()
    _let_hooks_be_built_in()
    _let_reducers_hold_works()
    _let_futures_be_waited_for()
    _let_groups_be_shrunk()
    _let_groups_be_split(split)
    _let_timeouts_be_set()


def _let_barrier_be_monitored() -> None:
    """Adapt torch.distributed.monitored_barrier, which rejects every backend except gloo by name."""
    torchs = _c10d.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        meant = _c10d.group.WORLD if group is None else group
        if (ours := world.behind(meant)) is not None:
            return ours.monitored_barrier(timeout, wait_all_ranks)
        return torchs(group, timeout, wait_all_ranks)

    _c10d.monitored_barrier = _c10d.distributed_c10d.monitored_barrier = monitored_barrier


def _let_hooks_be_built_in() -> None:
    """Replace C++ hooks of DistributedDataParallel by Python hooks: Python cannot create their type of future."""
    for wrapper in TORCHS_DDP:
        _replace(wrapper, "_register_builtin_comm_hook", _register_builtin_comm_hook)


def _register_builtin_comm_hook(torchs: Callable[..., None], model: Any, comm_hook_type: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if world.behind(model.process_group) is None:
        return torchs(model, comm_hook_type)
    compressed = comm_hook_type == _c10d.BuiltinCommHookType.FP16_COMPRESS
    hook = default_hooks.fp16_compress_hook if compressed else default_hooks.allreduce_hook
    return model.register_comm_hook(model.process_group, hook)  # type: ignore[no-any-return]


def _let_reducers_hold_works() -> None:
    """Keep Works alive that DistributedDataParallel.join passes to C++, which does not reference their Python part."""
    _replace(_c10d.Reducer, "_set_forward_pass_work_handle", _set_forward_pass_work_handle)


def _set_forward_pass_work_handle(torchs: Callable[..., None], reducer: Any, work: Any, *named: Any) -> None:
    _works[reducer] = work
    torchs(reducer, work, *named)


def _let_futures_be_waited_for() -> None:
    """Complete futures before C++ combines them.

    Within a backward, the waiting thread completes a future of allranks. A thread that waits for a C++ combination does
    not.
    """
    _replace(_c10d.Reducer, "_run_allreduce_hook", _run_allreduce_hook)
    _replace(torch.futures, "collect_all", _collect)
    _replace(torch.futures, "wait_all", _collect)


def _run_allreduce_hook(torchs: Callable[..., Any], reducer: Any, bucket: Any) -> Any:
    with finished_futures():
        return torchs(reducer, bucket)


def _collect(torchs: Callable[..., Any], futures: Any) -> Any:
    futures = list(futures)
    finish_all(futures)
    return torchs(futures)


def _let_groups_be_shrunk() -> None:
    """Adapt torch.distributed.shrink_group: it wraps the backend's result, which is already a group in allranks."""
    if hasattr(_c10d.distributed_c10d, "_create_shrunk_process_group"):  # torch 2.10 and later
        _replace(_c10d.distributed_c10d, "_create_shrunk_process_group", _create_shrunk_process_group)


def _create_shrunk_process_group(
    torchs: Callable[..., Any], made: Any, remaining: list[int], about: Any, is_default: bool
) -> Any:
    ours = getattr(made, "allranks_group", None)
    if ours is None:
        return torchs(made, remaining, about, is_default)
    # torch numbers the ranks by this list. The new group also excludes ranks that were lost in the meantime, and ranks
    # of the world have new numbers.
    remaining[:] = ours.ranks
    made._set_group_name(about["new_group_name"])
    made._set_group_desc("default:shrunken" if is_default else f"{about['original_group_name']}:shrunk")
    return made


def _let_groups_be_split(split: Callable[..., Any]) -> None:
    """Adapt torch.distributed.split_group: before torch 2.15, it requires a group on an accelerator."""
    if _TORCH >= (2, 15):
        return

    def split_group(torchs: Callable[..., Any], parent_pg: Any = None, *args: Any, **named: Any) -> Any:
        parent = _c10d.group.WORLD if parent_pg is None else parent_pg
        ours = None if parent is None else world.behind(parent)
        return torchs(parent_pg, *args, **named) if ours is None else split(ours, *args, **named)

    _replace(_c10d.distributed_c10d, "split_group", split_group)
    _c10d.split_group = _c10d.distributed_c10d.split_group


def _let_timeouts_be_set() -> None:
    """Adapt torch's function that sets timeouts: before torch 2.15, it supports only gloo and nccl."""
    if _TORCH < (2, 15):
        _replace(_c10d.distributed_c10d, "_set_pg_timeout", _set_pg_timeout)


def _set_pg_timeout(torchs: Callable[..., None], timeout: timedelta, group: Any = None) -> None:
    meant = _c10d.group.WORLD if group is None else group
    if meant is None or world.behind(meant) is None:
        return torchs(timeout, group)
    return meant.set_timeout(timeout)  # type: ignore[no-any-return]


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    torchs = getattr(owner, name)

    @functools.wraps(torchs)
    def method(*args: Any, **named: Any) -> Any:
        return ours(torchs, *args, **named)

    setattr(owner, name, method)
