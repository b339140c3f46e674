"""Which line of the user's program an operation comes from, as a small number.

A worker that meets a fault says this number, and the master the line: nothing is kept for each operation.
"""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

__all__ = ["here", "line_of"]

_OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (torch.__file__, __file__))
_SKIPPED = ("<__array_function__", "<string>", "<frozen", os.sep + "contextlib.py")

_inside: dict[CodeType, bool] = {}
_numbers: dict[tuple[CodeType, int], int] = {}
_lines: list[tuple[CodeType, int]] = []


def here() -> int:
    """The number of the line that runs: the innermost that is neither torch's nor this package's. 0 where none is."""
    frame = sys._getframe(3)
    known = _inside
    while frame is not None:
        code = frame.f_code
        inside = known.get(code)
        if inside is None:
            name = code.co_filename
            inside = known[code] = name.startswith(_OURS) or name.startswith(_SKIPPED[:3]) or name.endswith(_SKIPPED[3])
        if not inside:
            key = (code, frame.f_lasti)
            number = _numbers.get(key)
            if number is None:
                _lines.append((code, frame.f_lineno))
                number = _numbers[key] = len(_lines)
            return number
        frame = frame.f_back  # type: ignore[assignment]
    return 0


def line_of(number: int) -> str:
    """``file:line`` of a number."""
    if number == 0:
        return ""
    code, line = _lines[number - 1]
    return f"{code.co_filename}:{line}"
