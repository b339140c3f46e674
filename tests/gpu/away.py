"""A stand-in for a device other than the CPU, for machines without a GPU.

``enter()`` registers the device type ``away`` in this process, with one device. Its tensors have no address: a core
that receives one of them reads address 0. Each tensor holds a CPU tensor, and every operation runs on it immediately.
The device has no real streams and only counts how often its stream is synchronized. Only a GPU can reveal errors in the
use of streams. As for a GPU, autograd runs backward passes in a separate thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

_libraries: list[torch.library.Library] = []  # a registration lasts as long as its Library object


class Away(Tensor):
    """A tensor on the device ``away``."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        like: Away = Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device="away:0"
        )
        like.held = held
        return like

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.held})"


class Stream:
    """The only stream of the device. ``captures``: it pretends to record a graph."""

    waits = 0
    captures = False

    @classmethod
    def synchronize(cls) -> None:
        cls.waits += 1


class _Module(_DummyBackendModule):
    """The module ``torch.away``."""

    def current_stream(self, device: torch.device) -> type[Stream]:
        return Stream

    def is_current_stream_capturing(self) -> bool:
        return Stream.captures


def enter() -> torch.device:
    """Register the device type and return the device. Call it once per process."""
    _setup_privateuseone_for_python_backend("away", _Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    _libraries.append(library)
    return torch.device("away", 0)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    given: dict[int, Away] = {}

    def held(value: Any) -> Any:
        if isinstance(value, Away):
            given[id(value.held)] = value
            return value.held
        return value

    to = kwargs.get("device")
    if to is not None and torch.device(to).type == "away":
        kwargs["device"] = "cpu"
    args, kwargs = _pytree.tree_map(held, (args, kwargs))
    goes_away = bool(given) if to is None else torch.device(to).type == "away"

    def put_back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        # An operation that writes to a CPU argument returns that argument.
        return Away(value) if goes_away and not any(value is argument for argument in args) else value

    return _pytree.tree_map(put_back, op(*args, **kwargs))
