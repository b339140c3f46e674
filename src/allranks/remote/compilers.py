"""What torch compiles and traces, and handles.

`torch.compile` compiles what has nothing to do with handles, and leaves the rest as it is: operations on handles are
queued one by one, and what makes one command of a whole step is `capture`. Untold, torch would take a handle for an
object of some class that it can look into, and what this package does for a part of the program.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from allranks.remote.tensor import RemoteTensor

__all__ = ["register"]


def register(*entries: Any) -> None:
    """Keeps `torch.compile` out of functions, methods and properties, and of what they call; and handles out of it."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in entries:
        for function in (each, *(getattr(each, name, None) for name in ("__func__", "fget", "fset"))):
            if isinstance(function, FunctionType):
                frames.set_code_exec_strategy(function.__code__, skip)
    # Others than these have, torch believes, tensors of their own within, whose operations it would see.
    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, RemoteTensor)  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:
        _leave_handles()
        return
    torch_compile = torch.compile

    @functools.wraps(torch_compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        _leave_handles()  # not before: the import takes seconds
        return torch_compile(*args, **kwargs)

    torch.compile = compile


@functools.cache
def _leave_handles() -> None:
    """Has Dynamo leave to Python each line that takes a handle, or makes one."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._subclasses.fake_impls import op_implementations_checks
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    why = "Operations on workers are queued, not compiled: allranks.capture makes one command of a whole step."

    def leave(builder: Any, handle: RemoteTensor) -> Any:
        unimplemented(gb_type="a tensor on a worker", context=str(handle.device), explanation=why, hints=[])

    def leave_new(mode: Any, op: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and device.type == "worker" and hasattr(symbolic_convert.tls, "current_tx"):
            raise UnsupportedFakeTensorException(why)
        return NotImplemented

    VariableBuilder._type_dispatch()[RemoteTensor] = leave
    op_implementations_checks.insert(0, (lambda op: True, leave_new))
