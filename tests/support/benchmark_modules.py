"""Import a module of benchmarks/, whose programs tests run with other parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["benchmark"]

_FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """Import a module. Until the end of the context, it can import the modules beside it."""
    sys.path.insert(0, _FOLDER)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(_FOLDER)
