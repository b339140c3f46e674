"""FSDP2 modules after an interrupted step: gathered parameters, pending calls, gradients that were not reduced.

torch 2.13 and later has ``FSDPModule.reset_iter_state`` for this purpose. It waits for pending calls, which have failed
here. Before torch 2.15 it also keeps the gradients of gathered parameters, to which the repeated step would add. Before
torch 2.13 this method does not exist. This module then performs the same actions, with the attribute names of torch
2.10 to 2.12.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from allranks._base.errors import UsageError

__all__ = ["check_not_flat", "param_groups", "reset", "reshard"]


def check_not_flat(name: str, module: nn.Module) -> None:
    """Reject FSDP1 modules: the shard of a flat parameter is a plain tensor, so State cannot recognize it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()):
        raise UsageError(
            f"State: {name} contains a FullyShardedDataParallel, whose shards cannot be distinguished from other"
            " tensors.\n  Use torch.distributed.fsdp.fully_shard."
        )


def param_groups(module: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together, in a module and its submodules."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for each in module.modules() if fsdp is not None else ():
        if isinstance(each, fsdp.FSDPModule):
            yield from _groups(each._get_fsdp_state())


def reshard(modules: Iterable[nn.Module]) -> None:
    """Replace gathered parameters of modules by their shards.

    The outermost module keeps its gathered parameters after a forward, for the backward. An evaluation has no backward.
    The gathered memory is freed later, so State must not record tensors in it.
    """
    for module in modules:
        for group in param_groups(module):
            group._to_sharded()


def reset(modules: Iterable[nn.Module]) -> None:
    """Return modules to their state between two steps, without communication."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        for each in module.modules():
            # Only a root that has been called has a shared context. It lists the states of all its submodules.
            if isinstance(each, fsdp.FSDPModule) and each._get_fsdp_state()._is_root:
                _reset(each)


def _reset(root: Any) -> None:
    """Reset a root module that was called, and its submodules."""
    state = root._get_fsdp_state()
    # Kernels that are still running may use the memory that is released here.
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    groups = [group for each in state._state_ctx.all_states for group in _groups(each)]
    for group in groups:
        group._all_gather_result = None  # its call has failed, or no thread will wait for it
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_before_2_13(state, groups)
    for group in groups:
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # before 2.15
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                # Otherwise the repeated backward would add to the gradient of the interrupted one.
                parameter._unsharded_param.grad = None


def _groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that are gathered together. Before torch 2.12, at most one group exists."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups  # type: ignore[no-any-return]
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _reset_before_2_13(root: Any, groups: Sequence[Any]) -> None:
    idle = type(root._training_state).IDLE
    context = root._comm_ctx
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    for group in groups:
        group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
    root._state_ctx.iter_forward_root = None
    # Otherwise the next backward would not queue the callback that finishes its reductions.
    root._state_ctx.post_backward_final_callback_queued = False
