"""`torch.autocast("worker")`: operands are cast as `torch.autocast` casts them on the device of the workers.

torch's own casts are C++ for devices that it supports. They run above autograd, which must record them. torch reports
which operators have a cast. The cast of each operator is defined here, as in torch/include/ATen/autocast_mode.h and,
for CPUs, in aten/src/ATen/autocast_mode.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from allranks.remote.protocol.signature import AUTOCAST
from allranks.remote.torch_device.composites import (
    COMPOSITES,
    PARAMETER_REPLACEMENTS,
    decompose_on_worker,
    each_handle,
    operator,
)
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["POLICIES", "register"]

_CONVOLUTIONS = {
    "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input",
}  # fmt: skip
_PRODUCTS = {
    "addbmm", "addmm", "baddbmm", "bmm", "linalg_vecdot", "linear", "matmul", "mm", "prelu",
    "scaled_dot_product_attention",
}  # fmt: skip


_RECURRENT = {name for name in COMPOSITES if name.partition(".")[0] in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


class _Policy(NamedTuple):
    """The casts for one kind of device. Operators of torch that are in none of the sets compute in float32.

    Attributes:
        key: torch's dispatch key, which has a kernel for each of the operators.
        lower: Operators that compute in the lower precision.
        promoted: Operators whose operands are cast to the most precise dtype among them.
        refused: Operators that overflow in the lower precision.
        apart: Operators that are otherwise queued whole, and whose parts are cast.
    """

    key: str
    lower: set[str]
    promoted: set[str]
    refused: set[str]
    apart: set[str]


POLICIES = {
    "cpu": _Policy(
        "AutocastCPU",
        _CONVOLUTIONS | _PRODUCTS | {
            "_addmm_activation", "_native_multi_head_attention", "conv1d.padding", "conv2d.padding", "conv3d.padding",
            "mkldnn_rnn_layer",
        },
        {"cat", "index_copy", "stack"},
        set(),
        _RECURRENT | {"_transformer_encoder_layer_fwd"},
    ),
    "cuda": _Policy(
        "AutocastCUDA",
        _CONVOLUTIONS | _PRODUCTS | {
            "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
            "addmv", "addr", "chain_matmul", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
            "einsum", "gru_cell", "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell", "rnn_tanh_cell",
        },
        {
            "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
            "tensordot", "vdot",
        },
        {"binary_cross_entropy"},
        _RECURRENT,
    ),
}  # fmt: skip
"""The casts, by kind of device."""

_casts: dict[int, tuple[Any, Any]] = {}
"""Casts within the outermost `autocast`, as (parameter, result) by the parameter's id. torch caches the same."""

_registered: dict[str, torch.library.Library] = {}
"""The registered library of the current workers, by kind of device."""


def register(kind: str) -> None:
    """Register the casts with torch.

    Args:
        kind: The kind of device that the workers compute on.
    """
    if kind in _registered:
        return
    if not _registered:
        torch.clear_autocast_cache = _clearing(torch.clear_autocast_cache)
    for other in list(_registered):
        _registered.pop(other)._destroy()  # type: ignore[no-untyped-call]
    _registered[kind] = library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        kernel = _kernel(name, POLICIES[kind]) if space == "aten" else None
        if kernel is not None:
            library.impl(name, kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]


def _kernel(name: str, policy: _Policy) -> Callable[..., Any] | None:
    """Return the kernel that replaces an operator in autocast, or None."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, f"aten::{name}")
    if has(policy.key):
        return _casting(name, policy)
    if name in policy.apart:
        return functools.partial(_take_apart, operator(name))
    # Also in inference mode: without autograd, these operators would be decomposed below autocast.
    if has("CompositeImplicitAutograd") and not has("CPU") and name not in COMPOSITES:
        return functools.partial(operator(name)._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
    return None


def _clearing(clear: Callable[[], None]) -> Callable[[], None]:
    """Wrap the function that `torch.autocast` calls when the outermost context ends."""

    @functools.wraps(clear)
    def cleared() -> None:
        _casts.clear()
        PARAMETER_REPLACEMENTS.clear()
        clear()

    return cleared


def _take_apart(op: Any, *args: Any, **kwargs: Any) -> Any:
    return decompose_on_worker(op, args, kwargs)


def _casting(name: str, policy: _Policy) -> Callable[..., Any]:
    """Return a kernel that casts the operands."""
    op = operator(name)
    if name in policy.refused:

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                f"torch.autocast: {name} overflows in low precision.\n"
                "  Use binary_cross_entropy_with_logits or BCEWithLogitsLoss without the preceding sigmoid."
            )

        return refuse

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            lower = torch.get_autocast_dtype("worker")
            to = lower if name in policy.lower else torch.float32
            if name in policy.promoted:
                dtypes: set[Any] = set()
                each_handle([args, kwargs], lambda x: dtypes.add(x.dtype) if _is_eligible(x) else None)
                to = lower if dtypes <= {lower} else torch.float32

            def cast(x: RemoteTensor) -> torch.Tensor:
                return _cast(x, to, lower)

            # The last operand first, as in torch. This order is also the order in which the backward adds up gradients.
            named = {each: each_handle(kwargs[each], cast) for each in reversed(kwargs)}
            return op(*[each_handle(each, cast) for each in reversed(args)][::-1], **named)

    return kernel


def _is_eligible(x: RemoteTensor) -> bool:
    return x.is_floating_point() and x.dtype is not torch.float64


def _cast(x: RemoteTensor, to: torch.dtype, lower: torch.dtype) -> torch.Tensor:
    if not _is_eligible(x) or x.dtype is to:
        return x
    parameter = (x.requires_grad and x.is_leaf and not x._is_view()) or hasattr(x, "is_parameter")
    if not (parameter and to is lower and x.dtype is torch.float32 and torch.is_autocast_cache_enabled()):
        return x.to(to)
    if id(x) not in _casts:
        _casts[id(x)] = (x, x.to(to))  # holds the parameter, so that its id is not reused
    cast: torch.Tensor = _casts[id(x)][1]
    return cast
