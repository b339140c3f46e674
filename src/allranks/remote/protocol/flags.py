"""What torch keeps once for a process and its kernels look at: what is set on the master is set on the workers.

A flag must change between the operations before and those behind it. So whatever sets one on the master is noticed when
it does, and an operation costs nothing. All flags together are read then, as setting one may change others.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from allranks.remote.protocol import wire

__all__ = ["Flags", "apply", "read", "watch"]

Flags = tuple[tuple[str, Any], ...]
"""Names and values: numbers, strings and tuples of them."""

_C: Any = torch._C
_TINY = 5e-324


class _Flag(NamedTuple):
    read: Callable[[], Any]
    set: Callable[[Any], Any]


def _plain(getter: str, setter: str, *names: str) -> Iterator[tuple[str, _Flag]]:
    """Flags of a value; not those that this version of torch has not yet."""
    for name in names:
        if hasattr(_C, getter.format(name)) and hasattr(_C, setter.format(name)):
            yield name, _Flag(getattr(_C, getter.format(name)), getattr(_C, setter.format(name)))


def _kind(name: str, of: type) -> tuple[str, _Flag]:
    """A flag that is one of an enumeration."""
    getter, setter = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return name, _Flag(lambda: int(getter()), lambda value: setter(of(value)))


def _many(name: str) -> tuple[str, _Flag]:
    """A flag of several values, of one in older versions of torch."""
    getter, setter = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return name, _Flag(getter, lambda value: setter(*value) if isinstance(value, tuple) else setter(value))


def _precision(backend: str, part: str) -> tuple[str, _Flag]:
    getter, setter = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return f"{backend}.{part}", _Flag(lambda: getter(backend, part), lambda value: setter(backend, part, value))


_default_dtype = _Flag(
    lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    lambda name, set=_C._set_default_dtype: set(wire.dtype_of(name)),  # type: ignore[misc]
)
_deterministic = _Flag(
    lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
    lambda value, set=_C._set_deterministic_algorithms: set(value[0], warn_only=value[1]),  # type: ignore[misc]
)
_priority = _Flag(
    lambda: tuple(_C._get_sdp_priority_order()),
    lambda value, set=_C._set_sdp_priority_order: set(list(value)),  # type: ignore[misc]
)

_FLAGS: dict[str, _Flag] = {
    "default_dtype": _default_dtype,
    "deterministic_algorithms": _deterministic,
    "flush_denormal": _Flag(lambda: _TINY * 1.0 == 0.0, _C.set_flush_denormal),  # torch tells nobody
    "sdp_priority_order": _priority,
} | dict([
    *_plain(
        "_get_{}", "_set_{}",
        "deterministic_fill_uninitialized_memory", "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled",
        "qengine", "cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction",
        "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation",
        "cudnn_allow_tf32", "cublas_allow_tf32", "float32_matmul_precision",  # before what is more precise than they
    ),
    *_plain("_get_{}_sdp_enabled", "_set_sdp_use_{}", "flash", "mem_efficient", "math", "cudnn", "overrideable"),
    *map(_many, ("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction")),
    _kind("linalg_preferred_backend", _C._LinalgBackend),
    _kind("blas_preferred_backend", _C._BlasBackend),
    _precision("generic", "all"),
    *(_precision(on, part) for on in ("cuda", "mkldnn") for part in ("all", "matmul", "conv", "rnn")),
])  # fmt: skip

_SETTERS = {each for each in dir(_C) if each.removeprefix("_set_") in _FLAGS or each.startswith("_set_sdp_")}
_SETTERS |= {"_set_default_tensor_type", "_set_fp32_precision_setter"}


def read() -> Flags:
    """All flags as they are here; not those that torch refuses to tell, as it does after some of its older and newer
    functions for precision have been mixed."""
    found = []
    for name, flag in _FLAGS.items():
        try:
            found.append((name, flag.read()))
        except RuntimeError:
            continue
    return tuple(found)


def apply(wanted: Sequence[Any]) -> None:
    """Sets those that are not yet so.

    Raises:
        RuntimeError: this host cannot do what the flag asks for.
    """
    own = dict(read())
    for name, value in wanted:
        value = tuple(value) if isinstance(value, list) else value
        if name not in own or own[name] != value:
            _FLAGS[name].set(value)


def watch(changed: Callable[[], None]) -> None:
    """Has something called whenever a flag may have been set in this process, not in one that it forks."""
    process = os.getpid()

    def reporting(setter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(setter)
        def set(*args: Any, **kwargs: Any) -> Any:
            result = setter(*args, **kwargs)
            if os.getpid() == process:
                changed()
            return result

        return set

    for name in _SETTERS:
        setattr(_C, name, reporting(getattr(_C, name)))
    torch.set_flush_denormal = reporting(torch.set_flush_denormal)
    # torch.backends.cudnn and others hold their setters themselves.
    attribute: Any = type(vars(type(torch.backends.mkldnn))["enabled"])
    attribute.__set__ = reporting(attribute.__set__)
