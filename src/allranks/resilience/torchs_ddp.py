"""torch's DistributedDataParallel after a loss: another Reducer, for the ranks that there are now.

The wrapper itself keeps nothing of its ranks but the group, which goes on in the same object. Its Reducer does: it
divides by the size that the group had in its first backward, its buckets follow the order of gradients that it has
seen, and after a backward that was cut off it refuses the next one. torch has a call for the first and the last of
these (``_update_process_group``), which keeps the buckets. A process that takes a place has other buckets, those of a
wrapper that has seen nothing. So every rank makes a new Reducer, as the constructor does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from allranks._api.world import behind
from allranks._base.errors import UsageError
from allranks._plugin.adapt import TORCHS_DDP

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["check", "check_renumbered", "renew"]

_c10d: Any = torch.distributed


def check(name: str, wrapper: Any) -> None:
    """Refuse a wrapper, torch's or ours, that cannot go on after a loss.

    Raises:
        UsageError: it is such.
    """
    if isinstance(wrapper, TORCHS_DDP) and behind(wrapper.process_group) is None:
        raise UsageError(
            f"State: {name} is torch's DistributedDataParallel on a group of another backend, whose calls do not"
            ' survive a loss. Begin with allranks.init_process_group(), or torch\'s with the backend "allranks"'
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.parameters()):
        raise UsageError(
            f"State: {name} has optimizers that run in backward: a step would be committed before its last call on"
            " other ranks. Use an optimizer whose step() is called after backward"
        )


def check_renumbered(wrapper: Any, world: ProcessGroup) -> None:
    """Refuses a wrapper that cannot go on with another number of ranks.

    Raises:
        UsageError: it is on a group other than the world, or this torch keeps the group's size.
    """
    if behind(wrapper.process_group) is not world:
        raise UsageError(
            "State: torch's DistributedDataParallel on a group other than the world cannot go on with other ranks."
            " Leave out process_group, or let lost ranks be replaced (allranks run --elastic)"
        )
    if _c10d.ProcessGroup.size(wrapper.process_group) != world.size():
        raise UsageError(
            f"State: in torch {torch.__version__} torch's DistributedDataParallel cannot go on with other ranks. Use"
            " allranks.nn.parallel.DistributedDataParallel, or let lost ranks be replaced (allranks run --elastic)"
        )


def renew(wrapper: Any) -> None:
    """Gives a wrapper the Reducer that it would have if it were made now. Sends nothing."""
    hook = wrapper._get_ddp_logging_data().get("comm_hook", "")
    wrapper.reducer._remove_autograd_hooks()
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False  # again in its first backward
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for call, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(call.__qualname__)
        _c10d._register_comm_hook(wrapper.reducer, state, call)
    builtin = _c10d.BuiltinCommHookType.__members__.get(hook.rpartition(".")[2])
    if builtin is not None and not wrapper._comm_hooks:
        wrapper._register_builtin_comm_hook(builtin)
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)
