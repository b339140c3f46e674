"""Public classes and functions show the package in which users find them, not the module in which they are written."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["publish"]


def publish(space: dict[str, Any]) -> None:
    """Sets ``__module__`` of what the package takes from a module: tracebacks, ``repr``, ``help`` and pickles use it.

    Args:
        space: the ``globals()`` of that module, at its end.
    """
    package = sys.modules["allranks"]
    for name in package._HOME[space["__name__"].removeprefix("allranks.")]:
        if hasattr(space[name], "__qualname__"):  # a class or a function
            space[name].__module__ = package.__name__
