"""Values as bytes for another process of the job, functions by value with the file that they are from.

cloudpickle alone leaves the file's name out since its version 3.1.3. But errors, traces and tracebacks of the process
that runs the function are to say where in it a call is.
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
    """cloudpickle's, with the names of files."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """As ``cloudpickle.dumps``; ``cloudpickle.loads`` is its inverse, where this package is there."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
