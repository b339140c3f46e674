"""Excludes handles from compilation and tracing by torch.

`torch.compile` compiles code without handles, and leaves the rest to Python. Operations on handles are queued one by
one, and `capture` makes one command of a whole step. Without this module, torch would trace into the attributes of a
handle, and would treat this package as a part of the program.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["register"]

_PACKAGE = "allranks.remote."


def register() -> None:
    """Exclude this package, and the functions that it calls, from `torch.compile`, and handles from compiled code."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for code in _codes(vars(module)):
                # By code object, because torch's dispatcher may call any of these functions directly.
                frames.set_code_exec_strategy(code, skip)
    # torch assumes that other tensor subclasses contain tensors, whose operations it could trace.
    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, RemoteTensor)  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:
        _leave_handles()
        return
    torch_compile = torch.compile

    @functools.wraps(torch_compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        _leave_handles()  # not earlier, because the import takes seconds
        return torch_compile(*args, **kwargs)

    torch.compile = compile


def _codes(space: Any) -> Iterator[CodeType]:
    """Yield the code objects of the functions of a module or class, including nested functions."""
    for each in list(space.values()):
        if isinstance(each, type) and each.__module__.startswith(_PACKAGE):
            yield from _codes(vars(each))
        for function in (each, *(getattr(each, name, None) for name in ("__func__", "fget", "fset"))):
            if isinstance(function, FunctionType) and function.__globals__["__name__"].startswith(_PACKAGE):
                yield from _within(function.__code__)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _within(each)


@functools.cache
def _leave_handles() -> None:
    """Make Dynamo leave to Python each line that takes or creates a handle."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._subclasses.fake_impls import op_implementations_checks
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    why = "Operations on workers are queued, not compiled. allranks.capture sends a whole step as one command."

    def leave(builder: Any, handle: RemoteTensor) -> Any:
        unimplemented(gb_type="a tensor on a worker", context=str(handle.device), explanation=why, hints=[])

    def leave_new(mode: Any, op: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and device.type == "worker" and hasattr(symbolic_convert.tls, "current_tx"):
            raise UnsupportedFakeTensorException(why)
        return NotImplemented

    VariableBuilder._type_dispatch()[RemoteTensor] = leave
    op_implementations_checks.insert(0, (lambda op: True, leave_new))
