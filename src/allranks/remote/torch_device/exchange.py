"""Tensors of a group and of its workers, as autograd sees them.

To autograd a group's tensor is one tensor of which each worker has a row: its gradient is each worker's own, and a
backward that begins with a group's tensor is that of the sum over its workers. What goes between workers is a linear
map, whose backward is its transpose: that of a part is zeros elsewhere, that of a copy to all is the sum.
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

__all__ = ["as_view", "has_tangent", "part", "shard", "through", "total", "widen"]

aten = torch.ops.aten


class Exchange(torch.autograd.Function):
    """A linear map. Backward is its transpose, which is one as well, so that derivatives have derivatives."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *tensors: Any) -> Any:
        ctx.there, ctx.back = there, back
        return there(*tensors)

    @staticmethod
    def jvp(ctx: Any, there: None, back: None, *tangents: Any) -> Any:
        return through(ctx.there, ctx.back, *tangents)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made = through(ctx.back, ctx.there, *grads)
        return None, None, *(made if isinstance(made, tuple) else (made,))


def through(there: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Applies a linear map, which autograd follows where it has to.

    Args:
        there: the map.
        back: its transpose.
        tensors: what it is applied to.
    """
    followed = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if followed or forward_ad._current_level >= 0:
        return Exchange.apply(there, back, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return there(*tensors)


def has_tangent(x: Handle) -> bool:
    """Whether forward-mode differentiation follows the tensor."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def shard(x: Handle, rank: int) -> Handle:
    """One worker's tensor of a group's; backward, the others' gradients are zeros.

    Raises:
        UsageError: the worker is not in the group.
    """
    if rank not in x._place.ranks:
        raise UsageError(f"the tensor is on {x._place}, not on worker:{rank}")
    made: Handle = through(lambda whole: as_view(whole, part(whole, rank)), partial(widen, x._place, rank), x)
    return made


def part(x: Any, rank: int) -> Handle:
    """One worker's tensor of a group's, unseen by autograd."""
    place, master = x._place, x._place.master
    master.connections.check(place)
    own = master.devices.worker(rank)
    return make(own, x._sig, master.connections.outbox.view(x._ref, own.target), x._off)


def widen(place: DeviceTarget, rank: int, x: Handle) -> Handle:
    """A tensor of one worker's on all of a group: zeros on the others."""
    place.master.connections.check(place)
    made: Any = torch.zeros(x.shape, dtype=x.dtype, device=place.device)
    part(made, rank).copy_(x)
    return made  # type: ignore[no-any-return]


def total(x: Handle) -> Handle:
    """The sum of the workers' tensors, which become it, on the first; unseen by autograd."""
    place, master = x._place, x._place.master
    master.operators.invoke(place, "all_reduce", master.transfers.link(place, *place.ranks), [x], ["SUM"])
    return part(x, place.ranks[0])


def as_view(base: Handle, view: Handle) -> Handle:
    """Has torch take a handle for a view of another: one that it has not made, as where the two are on other workers.

    Autograd then sees where a change of one changes the other, and refuses it where it would have to know how.
    """
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
