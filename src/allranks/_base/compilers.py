"""Exclusion of functions from `torch.compile`: calls that exchange data with other processes run in Python.

By default, the compiler traces into such a function with tensors that have no values. It fails when one of them reaches
the native core.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

__all__ = ["leave_to_python"]


def leave_to_python(*things: Any) -> None:
    """Make `torch.compile` call these functions, and all methods of these classes, without tracing into them.

    The effect is that of ``torch.compiler.disable``, which would import the whole compiler (seconds). A subclass of
    ``torch.nn.Module`` remains unchanged, because the code that its ``forward`` calls is worth compiling. No effect if
    torch is not imported.
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
            frames.set_code_exec_strategy(thing.__code__, skip)  # excludes the functions that it calls, too
            setattr(thing, "_torchdynamo_disable", True)  # noqa: B010 - no attribute of functions that mypy knows
