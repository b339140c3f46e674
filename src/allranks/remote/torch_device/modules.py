"""Modules that move between the master and its workers keep their parameters, as those do that move to a GPU.

torch changes the data of a parameter that moves to CUDA and leaves the object; where that cannot be it makes another,
which unties weights that are shared and leaves optimisers behind with the old ones, both without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["apply", "swap_tensors"]

_torch_apply = torch.nn.Module._apply
_torch_swap = torch.utils.swap_tensors


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """`torch.utils.swap_tensors`, of which captured steps are told."""
    _torch_swap(t1, t2)  # type: ignore[no-untyped-call]
    for each in (t1, t2):
        if isinstance(each, RemoteTensor):
            each._leave()


def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    """`torch.nn.Module._apply`, after which each parameter is the object that it was.

    Raises:
        RuntimeError: a graph that is still to run backward holds a parameter, or it is lazy and has no shapes yet.
    """
    _refuse_master(fn)
    before: dict[str, Any] = dict(module._parameters)
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    if any(map(is_lazy, held)) and isinstance(fn(torch.empty(0, device="cpu")), RemoteTensor):
        raise RuntimeError(
            f"{type(module).__name__} has no shapes yet, and cannot move to a worker: "
            "call the module with an input of the master's before"
        )
    _torch_apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    for name, old in before.items():
        new: Any = module._parameters[name]
        if old is not new and isinstance(old, RemoteTensor) != isinstance(new, RemoteTensor):
            module._parameters[name] = old
            try:
                _become(old, new)
            except RuntimeError as error:
                why = (
                    "TorchScript holds it. Move the module first, and script it then"
                    if isinstance(module, torch.jit.ScriptModule)
                    else "something else holds it, as a graph does until its backward has run, or a weak reference"
                )
                raise RuntimeError(
                    f"{type(module).__name__}.{name} cannot move from {old.device} to {new.device}: {why}"
                ) from error
    return module


def _refuse_master(fn: Callable[..., Any]) -> None:
    """Refuses ``module.to("worker:0")``: in each parameter's ``to`` it could not be told from ``"worker"``."""
    function: Any = fn
    code = getattr(fn, "__code__", None)
    if code is not None and "device" in code.co_freevars:
        device = function.__closure__[code.co_freevars.index("device")].cell_contents
        if isinstance(device, torch.device) and device.type == "worker" and device.index == 0:
            place_of(device)


def _become(old: Any, new: Any) -> None:
    """Makes one parameter the other, but for what its user has put on it."""
    notes = RemoteTensor._notes(old)
    hooks, after = old._backward_hooks, old._post_accumulate_grad_hooks
    swap_tensors(old, new)
    old.__dict__.update(notes)
    if hooks:
        old._backward_hooks = hooks
    if after:
        old._post_accumulate_grad_hooks = after
