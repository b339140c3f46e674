"""Tensors of a group and of its workers, as autograd sees them.

To autograd a group's tensor is one tensor, and each worker has a row of it. Its gradient is each worker's own. A
backward that starts from a group's tensor is the backward of the sum over its workers. A transfer between workers is a
linear map, and its backward is the transpose. The transpose of one worker's part is zeros on the other workers. The
transpose of a copy to all workers is the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from allranks._base.errors import UsageError
from allranks.remote.torch_device.dispatch import run, special
from allranks.remote.torch_device.handle import DeviceTarget, Handle, make

__all__ = ["as_view", "has_tangent", "part", "shard", "apply_linear", "total", "zero_padded"]

aten = torch.ops.aten


class Exchange(torch.autograd.Function):
    """A linear map. Its backward is its transpose, again as such a map, so that higher derivatives exist."""

    @staticmethod
    def forward(ctx: Any, linear_map: Callable[..., Any], transpose: Callable[..., Any], *tensors: Any) -> Any:
        ctx.linear_map, ctx.transpose = linear_map, transpose
        return linear_map(*tensors)

    @staticmethod
    def jvp(ctx: Any, linear_map: None, transpose: None, *tangents: Any) -> Any:
        return apply_linear(ctx.linear_map, ctx.transpose, *tangents)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made = apply_linear(ctx.transpose, ctx.linear_map, *grads)
        return None, None, *(made if isinstance(made, tuple) else (made,))


def apply_linear(linear_map: Callable[..., Any], transpose: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Apply a linear map. Autograd records it if necessary.

    Args:
        linear_map: The map.
        transpose: Its transpose.
        tensors: The arguments of the map.
    """
    followed = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if followed or forward_ad._current_level >= 0:
        return Exchange.apply(linear_map, transpose, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return linear_map(*tensors)


def has_tangent(x: Handle) -> bool:
    """Return whether forward-mode differentiation follows the tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def shard(x: Handle, rank: int) -> Handle:
    """Return one worker's part of a group's tensor. In the backward, the gradients of the others are zeros.

    Raises:
        UsageError: The worker is not in the group.
    """
    if rank not in x._place.ranks:
        raise UsageError(f"shard: the tensor is on {x._place}, not on worker:{rank}")
    made: Handle = apply_linear(
        lambda whole: as_view(whole, part(whole, rank)), partial(zero_padded, x._place, rank), x
    )
    return made


def part(x: Any, rank: int) -> Handle:
    """Return one worker's part of a group's tensor. Autograd does not record this."""
    place, master = x._place, x._place.master
    master.connections.check(place)
    own = master.devices.worker(rank)
    return make(own, x._sig, master.connections.outbox.view(x._ref, own.target), x._off)


def zero_padded(place: DeviceTarget, rank: int, x: Handle) -> Handle:
    """Return a group's tensor that has one worker's tensor on this worker, and zeros on the others."""
    place.master.connections.check(place)
    made: Any = torch.zeros(x.shape, dtype=x.dtype, device=place.device)
    part(made, rank).copy_(x)
    return made  # type: ignore[no-any-return]


def total(x: Handle) -> Handle:
    """Sum the workers' tensors in place, and return the first worker's. Autograd does not record this."""
    place, master = x._place, x._place.master
    master.operators.invoke(place, "all_reduce", master.transfers.link(place, *place.ranks), [x], ["SUM"])
    return part(x, place.ranks[0])


def as_view(base: Handle, view: Handle) -> Handle:
    """Make torch treat a handle as a view of another one, although it has not created the view.

    Used if the two are on different workers. Autograd then detects if a change of one changes the other, and refuses
    the change if it would need its derivative.
    """
    # Per thread: torch dispatches the `alias` below in this thread, and `_alias` returns the view.
    _awaited.view = view
    try:
        return aten.alias.default(base)  # type: ignore[no-any-return]
    finally:
        _awaited.view = None


_awaited = threading.local()


@special(aten.alias.default)
def _alias(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    view = getattr(_awaited, "view", None)
    return run(op, args, kwargs) if view is None else view
