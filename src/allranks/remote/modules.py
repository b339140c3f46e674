"""Modules that move between the master and its workers keep their parameters, as those do that move to a GPU.

torch changes the data of a parameter that moves to CUDA and leaves the object; where that cannot be it makes another,
which unties weights that are shared and leaves optimisers behind with the old ones, both without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allranks.remote.tensor import RemoteTensor

__all__ = ["apply"]

_HANDLE = {"_ref", "_sig", "_place", "_off", "_is_param"}
_torch_apply = torch.nn.Module._apply


def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    """`torch.nn.Module._apply`, after which each parameter is the object that it was.

    Raises:
        RuntimeError: a graph that is still to run backward holds a parameter.
    """
    before: dict[str, Any] = dict(module._parameters)
    _torch_apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    for name, old in before.items():
        new: Any = module._parameters[name]
        if old is not new and isinstance(old, RemoteTensor) != isinstance(new, RemoteTensor):
            module._parameters[name] = old
            try:
                _become(old, new)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} cannot move from {old.device} to {new.device}: something else "
                    "holds it, as a graph does until its backward has run, or a weak reference"
                ) from error
    return module


def _become(old: Any, new: Any) -> None:
    """Makes one parameter the other, but for what its user has put on it."""
    named = {name: each for name, each in old.__dict__.items() if name not in _HANDLE}
    hooks, after = old._backward_hooks, old._post_accumulate_grad_hooks
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    old.__dict__.update(named)
    if hooks:
        old._backward_hooks = hooks
    if after:
        old._post_accumulate_grad_hooks = after
