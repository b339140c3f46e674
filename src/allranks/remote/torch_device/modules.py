"""Modules that move between the master and its workers keep their parameters, like modules that move to a GPU.

When a parameter moves to CUDA, torch changes its data and keeps the object. If this is impossible, torch creates
another object. This unties shared weights and leaves optimizers with the old ones, both without an error.

Here the two objects are swapped (`torch.utils.swap_tensors`). This fails if something else holds the parameter: a graph
before its backward, or a weak reference, as in exported modules. The module then gets new parameters, which are shared
like the old ones. Further uses of an old parameter raise an error: a backward that would give it a gradient, and an
optimizer that would step it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["apply", "swap_tensors"]

_torch_apply = torch.nn.Module._apply
_torch_swap = torch.utils.swap_tensors
_applying = threading.local()  # inner: a call for a module that contains this one is running
_replaced: Any = WeakIdKeyDictionary()
"""The replacements of parameters, by the replaced parameters."""


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Swap two tensors like `torch.utils.swap_tensors`, and invalidate captured steps that use them."""
    _torch_swap(t1, t2)  # type: ignore[no-untyped-call]
    for each in (t1, t2):
        if isinstance(each, RemoteTensor):
            each._end_watch()


def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    """Apply `torch.nn.Module._apply`, and keep each parameter's object if possible.

    Raises:
        RuntimeError: TorchScript holds a parameter. No parameter has moved then.
    """
    _refuse_master(fn)
    if not getattr(_applying, "inner", False):
        _refuse_scripted(module, fn, recurse)
        _applying.inner = True
        try:
            return apply(module, fn, recurse)
        finally:
            _applying.inner = False
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    if any(map(is_lazy, held)) and _moves_to_worker(fn):
        _move_when_known(module, fn)
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        return module
    before: dict[str, Any] = dict(module._parameters)
    _torch_apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    for name, old in before.items():
        new: Any = module._parameters[name]
        if old is not new and isinstance(old, RemoteTensor) != isinstance(new, RemoteTensor):
            try:
                _become(old, new)
            except RuntimeError:  # a graph or a weak reference holds it
                module._parameters[name] = _replacement(old, new)
            else:
                module._parameters[name] = old
    return module


def _moves_to_worker(fn: Callable[[Any], Any]) -> bool:
    return isinstance(fn(torch.empty(0, device="cpu")), RemoteTensor)


def _refuse_scripted(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool) -> None:
    modules = module.modules() if recurse else [module]
    if any(isinstance(each, torch.jit.ScriptModule) for each in modules) and _moves_to_worker(fn):
        raise RuntimeError(
            f"{type(module).__name__} cannot move to a worker: TorchScript holds its parameters.\n"
            "  Move the module first, then script it."
        )


def _move_when_known(module: torch.nn.Module, fn: Callable[[Any], Any]) -> None:
    """Move a lazy module at its first forward, after torch's own hook has set its shapes from the input."""

    def move(module: torch.nn.Module, inputs: Any) -> None:
        hook.remove()  # the next forward must not move the module again
        module._apply(fn, recurse=False)  # type: ignore[no-untyped-call]

    hook = module.register_forward_pre_hook(move)


def _replacement(old: Any, new: Any) -> Any:
    """Return the replacement of a parameter that is held elsewhere. All modules that share it get the same one."""
    if old in _replaced and _replaced[old].device == new.device:
        return _replaced[old]
    _watch_optimizers()
    where = f"a parameter has moved from {old.device} to {new.device}"

    def refuse(grad: Any) -> None:
        raise RuntimeError(f"{where} since this graph was created.\n  Run backward before you move the module.")

    new.__dict__.update(RemoteTensor._notes(old))
    # Hooks of the program follow the parameter. They must not run on the old one, which only raises.
    new._backward_hooks, old._backward_hooks = old._backward_hooks, OrderedDict()
    new._post_accumulate_grad_hooks, old._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks, None
    if old.requires_grad:
        old.register_hook(refuse)
    _replaced[old] = new
    return new


@functools.cache
def _watch_optimizers() -> None:
    """Check each step of each optimizer, from the first replaced parameter on. Before that, steps cost nothing more."""
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer that holds a replaced parameter.

    Raises:
        RuntimeError: The optimizer would step a parameter that no module uses any longer.
    """
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each in _replaced:
                raise RuntimeError(
                    f"{type(optimizer).__name__} has a parameter that stayed on {each.device} when its module moved to"
                    f" {_replaced[each].device}, because a graph or a weak reference held it.\n"
                    "  Create the optimizer after you move the module."
                )


def _refuse_master(fn: Callable[..., Any]) -> None:
    """Refuse ``module.to("worker:0")``. The ``to`` of a parameter cannot distinguish it from ``"worker"``."""
    function: Any = fn
    code = getattr(fn, "__code__", None)
    if code is not None and "device" in code.co_freevars:
        device = function.__closure__[code.co_freevars.index("device")].cell_contents
        if isinstance(device, torch.device) and device.type == "worker" and device.index == 0:
            place_of(device)


def _become(old: Any, new: Any) -> None:
    """Swap one parameter for another, but keep the attributes and hooks that the user has set."""
    notes = RemoteTensor._notes(old)
    hooks, after = old._backward_hooks, old._post_accumulate_grad_hooks
    # The swap also exchanges attributes and hooks, which belong to the object that the program holds.
    swap_tensors(old, new)
    old.__dict__.update(notes)
    if hooks:
        old._backward_hooks = hooks
    if after:
        old._post_accumulate_grad_hooks = after
