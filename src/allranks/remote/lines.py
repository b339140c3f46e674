"""Which line of the user's program an operation comes from, as a small number.

A worker that meets a fault says this number, and the master the line: nothing is kept for each operation.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

__all__ = ["here", "line_of"]

_OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (torch.__file__, __file__))
_SKIPPED = ("<__array_function__", "<string>", "<frozen", os.sep + "contextlib.py")

_numbers: dict[int, dict[int, int] | None] = {}
"""By id of a code object the numbers of its lines, by instruction; None for code that is torch's or this package's."""
_kept: list[CodeType] = []  # so that an id stays one code object's; a code's own hash costs a microsecond
_lines: list[tuple[CodeType, int]] = []


def here(depth: int = 3) -> int:
    """The number of the line that runs: the innermost that is neither torch's nor this package's. 0 where none is.

    Args:
        depth: so many frames, this one included, are known to be this package's.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        try:
            numbers = _numbers[id(code)]
        except KeyError:
            numbers = _numbers[id(code)] = None if _is_inside(code.co_filename) else {}
            _kept.append(code)
        if numbers is not None:
            number = numbers.get(frame.f_lasti)
            if number is None:
                _lines.append((code, frame.f_lineno))
                number = numbers[frame.f_lasti] = len(_lines)
            return number
        frame = frame.f_back
    return 0


def _is_inside(file: str) -> bool:
    return file.startswith(_OURS) or file.startswith(_SKIPPED[:3]) or file.endswith(_SKIPPED[3])


def line_of(number: int) -> str:
    """``file:line`` of a number."""
    if number == 0:
        return ""
    code, line = _lines[number - 1]
    return f"{code.co_filename}:{line}"
