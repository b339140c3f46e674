"""Public classes and functions: where users find them, and what `torch.compile` does with them."""

from __future__ import annotations

import sys
from typing import Any

from allranks._base.compilers import leave_to_python

__all__ = ["publish"]


def publish(space: dict[str, Any]) -> None:
    """Set ``__module__`` of what the package takes from a module, and have `torch.compile` leave it to Python.

    With that ``__module__``, tracebacks, ``repr``, ``help`` and pickles show the package in which users find them, not
    the module in which they are written.

    Args:
        space: the ``globals()`` of that module, at its end.
    """
    package = sys.modules["allranks"]
    for name in package._HOME[space["__name__"].removeprefix("allranks.")]:
        if hasattr(space[name], "__qualname__"):  # a class or a function
            space[name].__module__ = package.__name__
            leave_to_python(space[name])
