"""torch's DistributedDataParallel after a loss: a new Reducer for the current ranks.

The wrapper itself keeps only the group, which continues in the same object. Its Reducer keeps more state. It divides by
the size that the group had in its first backward. Its buckets follow the order of the gradients that it has seen. After
an interrupted backward, it rejects the next one. torch's ``_update_process_group`` fixes the first and the last of
these, but keeps the buckets. A replacement process has other buckets: those of a wrapper that has seen no gradient.
Every rank therefore creates a new Reducer, as the constructor does.
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
    """Reject a wrapper, torch's or allranks's, that cannot continue after a loss.

    Raises:
        UsageError: The group belongs to another backend, or optimizers run in backward.
    """
    if isinstance(wrapper, TORCHS_DDP) and behind(wrapper.process_group) is None:
        raise UsageError(
            f"State: {name} is torch's DistributedDataParallel on a group of another backend, whose calls do not"
            " survive a loss.\n  Call allranks.init_process_group(), or torch.distributed.init_process_group() with the"
            ' backend "allranks".'
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.parameters()):
        raise UsageError(
            f"State: {name} has optimizers that run in backward, so a step would be committed before the last"
            " communication of the step.\n  Use an optimizer whose step() is called after backward."
        )


def check_renumbered(wrapper: Any, world: ProcessGroup) -> None:
    """Reject a wrapper that cannot continue with another number of ranks.

    Raises:
        UsageError: It is on a group other than the world, or this torch version keeps the group's size.
    """
    if behind(wrapper.process_group) is not world:
        raise UsageError(
            "State: torch's DistributedDataParallel on a group other than the world cannot continue with a"
            " different set of ranks.\n  Omit process_group, or let the launcher replace lost ranks (allranks run"
            " --elastic)."
        )
    if _c10d.ProcessGroup.size(wrapper.process_group) != world.size():
        raise UsageError(
            f"State: in torch {torch.__version__} torch's DistributedDataParallel cannot continue with a different"
            " set of ranks.\n  Use allranks.nn.parallel.DistributedDataParallel, or let the launcher replace lost ranks"
            " (allranks run --elastic)."
        )


def renew(wrapper: Any) -> None:
    """Give a wrapper the Reducer that a new wrapper would have. Sends nothing."""
    # Read the name of a built-in hook first: the new Reducer and its logger do not have it.
    hook = wrapper._get_ddp_logging_data().get("comm_hook", "")
    # Otherwise the gradients of the next backward would also reach the old Reducer.
    wrapper.reducer._remove_autograd_hooks()
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False  # set again in its first backward
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for call, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(call.__qualname__)
        _c10d._register_comm_hook(wrapper.reducer, state, call)
    # Python hooks are in `_comm_hooks`. Built-in hooks exist only in the Reducer that was just replaced.
    builtin = _c10d.BuiltinCommHookType.__members__.get(hook.rpartition(".")[2])
    if builtin is not None and not wrapper._comm_hooks:
        wrapper._register_builtin_comm_hook(builtin)
    if wrapper.mixed_precision is not None:
        wrapper.reducer._set_mixed_precision_param_dtype(wrapper.mixed_precision.param_dtype)
