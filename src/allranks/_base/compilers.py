"""What `torch.compile` must leave to Python: calls that exchange data with other processes.

Untold, it traces into such a function with tensors that have no values, and fails where one of them meets the core.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

__all__ = ["leave_to_python"]


def leave_to_python(*things: Any) -> None:
    """Have `torch.compile` call these functions, and all methods of these classes, without looking into them.

    Does what ``torch.compiler.disable`` does, which would import the whole compiler (seconds). A class that is a
    ``torch.nn.Module`` is left as it is: what its ``forward`` calls is worth compiling. Without torch nothing happens.
    """
    torch = sys.modules.get("torch")
    frames = getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)
    if torch is None or frames is None:
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for thing in things:
        if isinstance(thing, type):
            if not issubclass(thing, torch.nn.Module):
                leave_to_python(*filter(inspect.isfunction, vars(thing).values()))
        elif inspect.isfunction(thing):
            frames.set_code_exec_strategy(thing.__code__, skip)  # nor what it calls
            setattr(thing, "_torchdynamo_disable", True)  # noqa: B010 - no attribute of functions that mypy knows
