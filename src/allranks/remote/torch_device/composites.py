"""Composite operators that choose their parts by the kind of device.

torch decomposes `lstm` and similar operators above the level at which operations are queued, and checks there whether
the tensors are on a CPU. Handles are on no CPU, so torch would compute other sums than for tensors on the worker. If
autograd does not record such an operator, it is queued whole. If it does, and workers compute on their CPUs, the
operator receives handles that torch's C++ sees as CPU tensors. It is then decomposed as on the worker.
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

__all__ = ["COMPOSITES", "PARAMETER_REPLACEMENTS", "choose_by_kind", "each_handle", "operator", "decompose_on_worker"]

aten = torch.ops.aten


class _CpuTarget(DeviceTarget):
    """A place whose handles are CPU tensors to torch's C++."""

    __slots__ = ("worker_target",)

    def __init__(self, worker_target: DeviceTarget) -> None:
        self.worker_target = worker_target
        self.master, self.index, self.ranks, self.target = (
            worker_target.master,
            worker_target.index,
            worker_target.ranks,
            worker_target.target,
        )
        self.device, self.lazy = worker_target.device, torch.device("cpu")

    kind = property(lambda self: self.worker_target.kind)
    calls = property(lambda self: self.worker_target.calls)
    call = property(lambda self: self.worker_target.call)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

PARAMETER_REPLACEMENTS: dict[int, tuple[Any, Any]] = {}
"""Replacements of parameters on the CPU, by the id of the parameter.

They exist within the outermost `torch.autocast`. Each use of a parameter has the same replacement, so that its cast can
be cached, see `autocast`."""


def _cpu_target(worker_target: DeviceTarget) -> _CpuTarget | None:
    """Return the same place on the CPU, or None if the workers do not compute on CPUs."""
    return _CpuTarget(worker_target) if worker_target.kind == "cpu" else None


def choose_by_kind() -> None:
    """Make torch's chunked `linear_cross_entropy` use the kind of device that workers compute on.

    torch chooses the precision of its sums by the name of the device.
    """
    name = "torch.nn.modules.linear_cross_entropy_options"
    if importlib.util.find_spec(name) is None:  # before torch 2.13
        return
    options: Any = importlib.import_module(name).LinearCrossEntropyOptions
    adjust = options._adjust

    @functools.wraps(adjust)
    def adjusted(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is not None and device.type == "worker":
            device = torch.device("cpu" if _cpu_target(place_of(device)) is not None else "cuda")
        return adjust(self, *args, device=device, **kwargs)

    options._adjust = adjusted


def _handle_on(place: DeviceTarget, x: Any) -> Any:
    return make(place, x._sig, x._ref, x._off)


class _ToCpuHandle(torch.autograd.Function):
    """Converts a handle to one that is a CPU tensor to torch's C++."""

    @staticmethod
    def forward(x: Any, cpu_target: _CpuTarget) -> Any:
        return _handle_on(cpu_target, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cpu_target = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _FromCpuHandle.apply(grad, ctx.cpu_target), None  # type: ignore[no-untyped-call]


class _FromCpuHandle(torch.autograd.Function):
    """The opposite of `_ToCpuHandle`."""

    @staticmethod
    def forward(x: Any, cpu_target: _CpuTarget) -> Any:
        return _handle_on(cpu_target.worker_target, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cpu_target = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _ToCpuHandle.apply(grad, ctx.cpu_target), None  # type: ignore[no-untyped-call]


def each_handle(value: Any, change: Callable[[RemoteTensor], Any]) -> Any:
    """Return a value with each handle, in any nesting, replaced by the result of a function."""
    if isinstance(value, RemoteTensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(each_handle(one, change) for one in value)
    if isinstance(value, dict):
        return {name: each_handle(one, change) for name, one in value.items()}
    return value


def _composite_kernel(op: Any) -> Callable[..., Any]:
    """Return the kernel that replaces a composite operator above autograd."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in flatten([*args, *kwargs.values()]) if isinstance(each, torch.Tensor)]
        # A rank has no derivative. A decomposed operator would not write it to the tensor that the caller passes.
        derived = torch.is_grad_enabled() and "rank" not in op._schema.name
        looked_at = derived and any(each.requires_grad for each in tensors)
        plain = not all(isinstance(each, RemoteTensor) for each in tensors)
        if not looked_at and not plain and forward_ad._current_level < 0:
            return run(op, args, kwargs)
        return decompose_on_worker(op, args, kwargs)

    return kernel


def decompose_on_worker(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the parts of an operator, and choose the parts that it would choose on the worker."""
    handle: Any = next(each for each in flatten([*args, *kwargs.values()]) if isinstance(each, RemoteTensor))
    cpu_target = _cpu_target(handle._place)
    if cpu_target is None:
        return op.decompose(*args, **kwargs)

    cast = torch.is_autocast_enabled("worker") and torch.is_autocast_cache_enabled()

    def to_cpu_handle(x: Any) -> Any:
        if not (cast and x.requires_grad and x.is_leaf):
            return _ToCpuHandle.apply(x, cpu_target)  # type: ignore[no-untyped-call]
        if id(x) not in PARAMETER_REPLACEMENTS:
            # With the parameter, so that its id is not reused.
            PARAMETER_REPLACEMENTS[id(x)] = (x, _ToCpuHandle.apply(x, cpu_target))  # type: ignore[no-untyped-call]
            PARAMETER_REPLACEMENTS[id(x)][
                1
            ].is_parameter = True  # `autocast` caches its cast, although it is not a leaf
        return PARAMETER_REPLACEMENTS[id(x)][1]

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):  # torch.autocast("cpu") does not apply to these handles
        # Not `decompose`, which prefers a Python decomposition into other operators, if one exists.
        key = _COMPOSITE if op.has_kernel_for_dispatch_key(_COMPOSITE) else torch._C.DispatchKey.CPU
        result = op._op_dk(key, *each_handle(args, to_cpu_handle), **each_handle(kwargs, to_cpu_handle))
    return each_handle(result, lambda x: _FromCpuHandle.apply(x, cpu_target))  # type: ignore[no-untyped-call]


def _dropout(x: Any, p: float, train: bool) -> Any:
    """Apply dropout as on a CPU: the mask is rounded to the tensor's dtype before the multiplication."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if not 0 < p < 1:
        return aten.dropout.default.decompose(x, p, train)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def _ctc_loss(log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, *rest: Any) -> Any:
    """Accept lengths on the master, as torch accepts lengths on the CPU for tensors on a GPU."""
    op = aten.ctc_loss.Tensor.decompose
    if not isinstance(lengths, RemoteTensor) and not isinstance(target_lengths, RemoteTensor):
        op, lengths, target_lengths = (
            aten.ctc_loss.IntList,
            *(each.reshape(-1).tolist() for each in (lengths, target_lengths)),
        )
    return op(log_probs, targets, lengths, target_lengths, *rest)


def _tensor_split(x: Any, places: torch.Tensor, dim: int = 0) -> Any:
    """Split a tensor. The data contains the sizes of the results, so the master fetches it."""
    return x.tensor_split(places.tolist(), dim)


def _one_hot(x: Any, classes: int = -1) -> Any:
    """Encode classes, and check them as torch does on a CPU. torch skips the check on other devices."""
    if classes != -1:
        return run(aten.one_hot.default, (x, classes), {})
    if x.numel() and x.min().item() < 0:
        raise RuntimeError("Class values must be non-negative.")
    return aten.one_hot.default.decompose(x, classes)


def operator(name: str) -> Any:
    """Return an operator of torch by its name without ``aten::``."""
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


COMPOSITES: dict[str, Callable[..., Any]] = {
    name: _composite_kernel(operator(name))
    for name in (*WHOLE, "lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data")
} | {
    "one_hot": _one_hot,
    "dropout": _dropout,
    "ctc_loss.Tensor": _ctc_loss,
    "tensor_split.tensor_indices_or_sections": _tensor_split,
}
"""Kernels by the name of the operator without ``aten::``."""


@special(aten.dropout.default)
def _dropout_below(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _dropout(*args, **kwargs)


@special(aten._pack_padded_sequence.default)
def _pack(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Pack a sequence. The lengths and the sizes are tensors of the master, as torch requires for every device."""
    x, lengths, batch_first = args
    if isinstance(lengths, RemoteTensor):  # torch's message for lengths on a GPU
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} tensor"
        )
    rows = torch.arange(x.shape[0] * x.shape[1], device="cpu").reshape(x.shape[0], x.shape[1], 1)
    order, sizes = op(rows, lengths, batch_first)
    flat = x.flatten(0, 1)
    return flat.index_select(0, order.flatten().to(x.device)), sizes
