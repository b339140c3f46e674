"""Process-wide flags of torch that its kernels read. The workers use the same values as the master.

A flag must change between the operations before its assignment and those after it. The setters on the master are
therefore wrapped and report each assignment, so that an operation costs nothing. After an assignment all flags are
read, because setting one may change others.
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
"""Names and values. Values are numbers, strings and tuples of them."""

_C: Any = torch._C
_TINY = 5e-324  # the smallest denormal; it is read as 0 if denormals are flushed


class _Flag(NamedTuple):
    read: Callable[[], Any]
    set: Callable[[Any], Any]


def _plain(getter: str, setter: str, *names: str) -> Iterator[tuple[str, _Flag]]:
    """Yield flags with a single value. Flags that this version of torch lacks are skipped."""
    for name in names:
        if hasattr(_C, getter.format(name)) and hasattr(_C, setter.format(name)):
            yield name, _Flag(getattr(_C, getter.format(name)), getattr(_C, setter.format(name)))


def _kind(name: str, of: type) -> tuple[str, _Flag]:
    """Return a flag whose value is a member of an enumeration."""
    getter, setter = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return name, _Flag(lambda: int(getter()), lambda value: setter(of(value)))


def _many(name: str) -> tuple[str, _Flag]:
    """Return a flag of several values, which has one value in older versions of torch."""
    getter, setter = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return name, _Flag(getter, lambda value: setter(*value) if isinstance(value, tuple) else setter(value))


def _precision(backend: str, part: str) -> tuple[str, _Flag]:
    getter, setter = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return f"{backend}.{part}", _Flag(lambda: getter(backend, part), lambda value: setter(backend, part, value))


# Default arguments bind torch's own setters here, because `watch` later replaces the attributes of torch._C.
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
    "flush_denormal": _Flag(lambda: _TINY * 1.0 == 0.0, _C.set_flush_denormal),  # torch has no getter
    "sdp_priority_order": _priority,
} | dict([
    *_plain(
        "_get_{}", "_set_{}",
        "deterministic_fill_uninitialized_memory", "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled",
        "qengine", "cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction",
        "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation",
        # Before the finer settings, which they overwrite.
        "cudnn_allow_tf32", "cublas_allow_tf32", "float32_matmul_precision",
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
    """Return all flags of this process that torch returns.

    torch refuses to return some flags after some of its older and newer functions for precision have been mixed.
    """
    found = []
    for name, flag in _FLAGS.items():
        try:
            found.append((name, flag.read()))
        except RuntimeError:
            continue
    return tuple(found)


def apply(wanted: Sequence[Any]) -> None:
    """Set the flags whose values differ.

    Raises:
        RuntimeError: This host does not support the value of a flag.
    """
    own = dict(read())
    for name, value in wanted:
        value = tuple(value) if isinstance(value, list) else value
        if name not in own or own[name] != value:
            _FLAGS[name].set(value)


def watch(changed: Callable[[], None]) -> None:
    """Call a function whenever a flag may have been set in this process, but not in its forked children."""
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
    # torch.backends.cudnn and others hold references to the setters, so their attribute descriptor is wrapped, too.
    attribute: Any = type(vars(type(torch.backends.mkldnn))["enabled"])
    attribute.__set__ = reporting(attribute.__set__)
