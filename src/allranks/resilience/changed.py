"""What a step may change before its commit: buffers, tensors and dicts among the parts of a state, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._values: list[dict[Any, Any]] = []

    def keep(self) -> None:
        """A step begins."""
        if self._owners or self._own:
            self._tensors = [*buffers_of(self._owners), *self._own]
            with torch.no_grad():
                self._copies = [tensor.clone() for tensor in self._tensors]
        if self._dicts:
            self._values = [dict(part) for part in self._dicts]

    def clear(self) -> None:
        """A loss has cut calls off: modules have nothing pending any more."""
        fully_sharded.reset(self._modules)

    def take_back(self) -> None:
        """The step is to be repeated."""
        self.clear()
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy)
        for part, values in zip(self._dicts, self._values, strict=True):
            part.clear()
            part.update(values)
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None


def owners_of_buffers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in these that have buffers of their own."""
    return [owner for module in modules for owner in module.modules() if owner._buffers]


def buffers_of(owners: Sequence[nn.Module]) -> list[Tensor]:
    """Their buffers; a module may have put another tensor in a buffer's place."""
    return [buffer for owner in owners for buffer in owner._buffers.values() if buffer is not None]
