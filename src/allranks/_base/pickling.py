"""Serialization of values for another process of the job. Functions are pickled by value, with their file name.

cloudpickle omits the file name since its version 3.1.3. Errors, traces and tracebacks of the process that runs the
function need it to show the call site.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

__all__ = ["Pickler", "dumps"]


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (code.co_filename, make, args)


def _make_code(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with the file names of functions."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """Serialize a value. ``cloudpickle.loads`` is the inverse, and needs this package to be installed."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
