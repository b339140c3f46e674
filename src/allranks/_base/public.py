"""Public classes and functions: their public module name, and their exclusion from `torch.compile`."""

from __future__ import annotations

import sys
from typing import Any

from allranks._base.compilers import leave_to_python

__all__ = ["publish"]


def publish(space: dict[str, Any]) -> None:
    """Set ``__module__`` of the names that the package exports from a module, and exclude them from `torch.compile`.

    Tracebacks, ``repr``, ``help`` and pickles then show the public package instead of the module that defines the
    object.

    Args:
        space: The ``globals()`` of that module, passed at its end.
    """
    package = sys.modules["allranks"]
    for name in package._HOME[space["__name__"].removeprefix("allranks.")]:
        if hasattr(space[name], "__qualname__"):  # a class or a function
            space[name].__module__ = package.__name__
            leave_to_python(space[name])
