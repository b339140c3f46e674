"""What a step may change before its commit: buffers, tensors and dicts among the parts of a state, and gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allranks.resilience import fully_sharded
from allranks.resilience.handover import Parts

__all__ = ["Changed", "buffers_of", "owners_of_buffers"]


class Changed:
    """Copies of these, as they were when the step began."""

    def __init__(self, parts: Parts, modules: Sequence[nn.Module], own: Sequence[Tensor]) -> None:
        self._modules = modules
        self._owners = owners_of_buffers(modules)
        self._own = [*own, *(part for part in parts.values() if isinstance(part, Tensor))]
        self._dicts = [part for part in parts.values() if isinstance(part, dict)]
        self._tensors: list[Tensor] = []
        self._copies: Sequence[Tensor] = ()
        self._values: list[tuple[Any, Any]] = []  # what is in dicts: each container, and a shallow copy of it

    def keep(self) -> None:
        """A step begins."""
        self._values = []
        inside: list[Tensor] = []
        for part in self._dicts:
            _collect(part, self._values, inside)
        if self._owners or self._own or inside:
            self._tensors = [*buffers_of(self._owners), *self._own, *inside]
            with torch.no_grad():
                self._copies = [tensor.clone() for tensor in self._tensors]

    def clear(self) -> None:
        """A loss has cut calls off: modules have nothing pending any more."""
        fully_sharded.reset(self._modules)

    def take_back(self) -> None:
        """The step is to be repeated."""
        self.clear()
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
        for container, values in self._values:
            container.clear()
            if isinstance(container, dict):
                dict.update(container, values)  # that of a Counter would add
            elif isinstance(container, set):
                container.update(values)
            else:
                container.extend(values)
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None


def _collect(container: Any, containers: list[tuple[Any, Any]], tensors: list[Tensor]) -> None:
    """Adds a container of values with a copy of it, those in it, and the tensors in it."""
    if not isinstance(container, tuple):
        containers.append((container, container.copy()))
    values: Iterable[Any] = container.values() if isinstance(container, dict) else container
    if _PLAIN.issuperset(map(type, values)):  # a long list of numbers takes little time
        return
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, dict, tuple, set, deque)):
            _collect(value, containers, tensors)


_PLAIN = {int, float, str, bool, bytes, type(None)}


def owners_of_buffers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in these that have buffers of their own."""
    return [owner for module in modules for owner in module.modules() if owner._buffers]


def buffers_of(owners: Sequence[nn.Module]) -> list[Tensor]:
    """Their buffers; a module may have put another tensor in a buffer's place."""
    return [buffer for owner in owners for buffer in owner._buffers.values() if buffer is not None]
