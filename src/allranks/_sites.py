"""Where in the user's program a call stands: for errors, and for the debug mode's comparison of call sites."""

from __future__ import annotations

import os
import sys
import zlib
from types import FrameType

__all__ = ["site", "stack_hash", "where"]

_PACKAGE = os.path.dirname(__file__) + os.sep
_DEEPEST = 32  # frames


def _outside() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def site() -> str:
    """``file:line`` of the innermost frame outside this package; "" where there is none (a thread of its own)."""
    frame = _outside()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def where() -> str:
    """``site``, and the shape of what it calls with. Slow: for errors."""
    frame: FrameType | None = sys._getframe(1)
    tensor = None
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        tensor = frame.f_locals.get("tensor", tensor)
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    return place if tensor is None else f"{place}, shape {tuple(tensor.shape)}"


def stack_hash() -> int:
    """32 bits, not 0, of all ``file:line`` outside this package: the same on every rank that came the same way."""
    frame, crc = _outside(), 0
    for _ in range(_DEEPEST):
        if frame is None:
            break
        crc = zlib.crc32(f"{frame.f_code.co_filename}:{frame.f_lineno}\n".encode(errors="replace"), crc)
        frame = frame.f_back
    return crc or 1
