"""Composite operators that choose their parts by the kind of device, as they choose on the worker's.

torch takes `lstm` and its like apart above the level at which operations are queued, and asks there whether the tensors
are on a CPU: of handles, which are on none, it would make other sums than of the tensors that they stand for. Where
autograd does not look such an operator is queued whole. Where it does, and workers compute on their CPUs, the operator
is given handles that are on the CPU to torch's C++, so that it goes apart as it would there.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from allranks.remote.protocol.signature import WHOLE, flatten
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.dispatch import run, special
from allranks.remote.torch_device.handle import DeviceTarget, make
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["COMPOSITES", "KEPT", "choose_by_kind", "each_handle", "operator", "take_apart"]

aten = torch.ops.aten


class _Near(DeviceTarget):
    """A place whose handles are on the CPU to torch's C++."""

    __slots__ = ("far",)

    def __init__(self, far: DeviceTarget) -> None:
        self.far = far
        self.master, self.index, self.ranks, self.target = far.master, far.index, far.ranks, far.target
        self.device, self.lazy = far.device, torch.device("cpu")

    kind = property(lambda self: self.far.kind)
    calls = property(lambda self: self.far.calls)
    call = property(lambda self: self.far.call)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

KEPT: dict[int, tuple[Any, Any]] = {}
"""Within the outermost `torch.autocast`, by id of a parameter, it and what stands for it on the CPU: each time the
same, so that what it is cast to can be kept, see `autocast`."""


def _nearer(far: DeviceTarget) -> _Near | None:
    """The same place on the CPU; None where the workers compute elsewhere."""
    return _Near(far) if far.kind == "cpu" else None


def choose_by_kind() -> None:
    """Has torch's chunked `linear_cross_entropy`, which adds up as precisely as the device's name says, see the kind of
    device that workers compute on instead of their name."""
    name = "torch.nn.modules.linear_cross_entropy_options"
    if importlib.util.find_spec(name) is None:  # of torch 2.13
        return
    options: Any = importlib.import_module(name).LinearCrossEntropyOptions
    adjust = options._adjust

    @functools.wraps(adjust)
    def adjusted(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is not None and device.type == "worker":
            device = torch.device("cpu" if _nearer(place_of(device)) is not None else "cuda")
        return adjust(self, *args, device=device, **kwargs)

    options._adjust = adjusted


def _at(place: DeviceTarget, x: Any) -> Any:
    return make(place, x._sig, x._ref, x._off)


class _Approach(torch.autograd.Function):
    """The same tensor, on the CPU to torch's C++."""

    @staticmethod
    def forward(x: Any, near: _Near) -> Any:
        return _at(near, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.near = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Depart.apply(grad, ctx.near), None  # type: ignore[no-untyped-call]


class _Depart(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(x: Any, near: _Near) -> Any:
        return _at(near.far, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.near = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Approach.apply(grad, ctx.near), None  # type: ignore[no-untyped-call]


def each_handle(value: Any, change: Callable[[RemoteTensor], Any]) -> Any:
    """A value in which each handle, in any nesting, is changed."""
    if isinstance(value, RemoteTensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(each_handle(one, change) for one in value)
    if isinstance(value, dict):
        return {name: each_handle(one, change) for name, one in value.items()}
    return value


def _as_there(op: Any) -> Callable[..., Any]:
    """What stands for a composite operator above autograd."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in flatten([*args, *kwargs.values()]) if isinstance(each, torch.Tensor)]
        # There is nothing to derive a rank by; and taken apart, torch would not write it to the tensor that is given.
        derived = torch.is_grad_enabled() and "rank" not in op._schema.name
        looked_at = derived and any(each.requires_grad for each in tensors)
        plain = not all(isinstance(each, RemoteTensor) for each in tensors)
        if not looked_at and not plain and forward_ad._current_level < 0:
            return run(op, args, kwargs)
        return take_apart(op, args, kwargs)

    return kernel


def take_apart(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator's parts, of which it chooses those that it would choose on the worker."""
    handle: Any = next(each for each in flatten([*args, *kwargs.values()]) if isinstance(each, RemoteTensor))
    near = _nearer(handle._place)
    if near is None:
        return op.decompose(*args, **kwargs)

    cast = torch.is_autocast_enabled("worker") and torch.is_autocast_cache_enabled()

    def there(x: Any) -> Any:
        if not (cast and x.requires_grad and x.is_leaf):
            return _Approach.apply(x, near)  # type: ignore[no-untyped-call]
        if id(x) not in KEPT:
            KEPT[id(x)] = (x, _Approach.apply(x, near))  # type: ignore[no-untyped-call]
            KEPT[id(x)][1].is_parameter = True
        return KEPT[id(x)][1]

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):  # torch.autocast("cpu") is not for these
        # Not by decompose(), which prefers a decomposition in Python where there is one, of other operators.
        key = _COMPOSITE if op.has_kernel_for_dispatch_key(_COMPOSITE) else torch._C.DispatchKey.CPU
        result = op._op_dk(key, *each_handle(args, there), **each_handle(kwargs, there))
    return each_handle(result, lambda x: _Depart.apply(x, near))  # type: ignore[no-untyped-call]


def _dropout(x: Any, p: float, train: bool) -> Any:
    """As on a CPU: the mask is rounded to the tensor's dtype before it is multiplied with."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if not 0 < p < 1:
        return aten.dropout.default.decompose(x, p, train)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def _ctc_loss(log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, *rest: Any) -> Any:
    """The lengths may be the master's, as they may be the CPU's where the rest is on a GPU."""
    op = aten.ctc_loss.Tensor.decompose
    if not isinstance(lengths, RemoteTensor) and not isinstance(target_lengths, RemoteTensor):
        op, lengths, target_lengths = (
            aten.ctc_loss.IntList,
            *(each.reshape(-1).tolist() for each in (lengths, target_lengths)),
        )
    return op(log_probs, targets, lengths, target_lengths, *rest)


def _tensor_split(x: Any, places: torch.Tensor, dim: int = 0) -> Any:
    """The sizes of the results are in the data."""
    return x.tensor_split(places.tolist(), dim)


def _one_hot(x: Any, classes: int = -1) -> Any:
    """torch compares the classes with their number on a CPU, and on devices that it does not know does without."""
    if classes != -1:
        return run(aten.one_hot.default, (x, classes), {})
    if x.numel() and x.min().item() < 0:
        raise RuntimeError("Class values must be non-negative.")
    return aten.one_hot.default.decompose(x, classes)


def operator(name: str) -> Any:
    """Of torch's own, by its name without ``aten::``."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


COMPOSITES: dict[str, Callable[..., Any]] = {
    name: _as_there(operator(name)) for name in (*WHOLE, "lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data")
} | {
    "one_hot": _one_hot,
    "dropout": _dropout,
    "ctc_loss.Tensor": _ctc_loss,
    "tensor_split.tensor_indices_or_sections": _tensor_split,
}
"""By name, without ``aten::``."""


@special(aten.dropout.default)
def _dropout_below(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _dropout(*args, **kwargs)


@special(aten._pack_padded_sequence.default)
def _pack(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The lengths, and what follows from them, are of the master's, as torch has it for every device."""
    x, lengths, batch_first = args
    if isinstance(lengths, RemoteTensor):  # torch's words for those on a GPU
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} tensor"
        )
    rows = torch.arange(x.shape[0] * x.shape[1], device="cpu").reshape(x.shape[0], x.shape[1], 1)
    order, sizes = op(rows, lengths, batch_first)
    flat = x.flatten(0, 1)
    return flat.index_select(0, order.flatten().to(x.device)), sizes
