"""Call sites in the user's program, for errors and for the comparison of call sites in debug mode.

The user's program is all code outside this package, torch and Python's standard library. For example,
DistributedDataParallel makes its calls inside torch; their call site is the line ``loss.backward()``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import warnings
import zlib
from types import FrameType

__all__ = ["NOWHERE", "is_program", "line_of", "site", "stack_hash", "warn", "where"]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEEPEST = 32  # frames
NOWHERE = "(no call site)"  # not "": the core searches for the call site itself if it receives ""

# File names by the file names of frames, in the form for the core; "" if a file is not part of the program. A cache,
# because every asynchronous call needs it.
_names: dict[str, str] = {}
_MOST_FILES = 10_000  # limits the cache: a program may invent names for code that it compiles

# Installed packages are in folders with these names, some of them inside the folder of the standard library.
_INSTALLED = ("site-packages", "dist-packages")


def _look_up(filename: str) -> str:
    folders = [_PACKAGE]
    torch = importlib.util.find_spec("torch")  # not imported: the launcher does not need it
    folders += torch.submodule_search_locations or () if torch else ()
    passed_over = filename.startswith((*(os.path.join(folder, "") for folder in folders), "<frozen "))
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        inner = filename.removeprefix(os.path.join(library, ""))
        passed_over = passed_over or (inner != filename and not inner.startswith(_INSTALLED))
    if len(_names) >= _MOST_FILES:
        _names.clear()
    # Python represents bytes of a name that are not UTF-8 as surrogates, which the core cannot accept.
    _names[filename] = "" if passed_over else filename.encode(errors="replace").decode()
    return _names[filename]


def is_program(filename: str) -> bool:
    """Return whether a file belongs to the program or a package that it uses: not to torch, Python or this package."""
    name = _names.get(filename)
    return bool(_look_up(filename) if name is None else name)


def _program(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the innermost frame of the program, starting at ``frame``, and its file."""
    known = _names.get
    while frame is not None:
        filename = frame.f_code.co_filename
        name = known(filename)
        if name is None:
            name = _look_up(filename)
        if name:
            return frame, name
        frame = frame.f_back
    return None, ""


def line_of(frame: FrameType) -> str:
    """Return the current ``file:line`` of a frame; "" if the frame does not belong to the program."""
    filename = frame.f_code.co_filename
    return f"{_names[filename]}:{frame.f_lineno}" if is_program(filename) else ""


def site() -> str:
    """Return ``file:line`` of the innermost frame of the program, or ``NOWHERE`` (in a thread of allranks)."""
    frame, name = _program(sys._getframe(1))
    return f"{name}:{frame.f_lineno}" if frame else NOWHERE


def warn(text: str) -> None:
    """Issue a UserWarning at the innermost line of the program, at any depth of calls inside this package."""
    frame, _ = _program(sys._getframe(1))
    if frame is None:  # in a thread of allranks
        warnings.warn(text, stacklevel=2)
        return
    space = frame.f_globals
    seen = space.setdefault("__warningregistry__", {})  # as in warnings.warn: one warning per line
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, space.get("__name__"), seen)


def where() -> str:
    """Return the call site and the shape of the tensor of the call. Slow: for errors only."""
    frame: FrameType | None = sys._getframe(1)
    program, name = _program(frame)
    tensor = None
    while frame is not None and frame is not program:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            tensor = frame.f_locals.get("tensor", tensor)
        frame = frame.f_back
    place = f"{name}:{program.f_lineno}" if program else NOWHERE
    shape = getattr(tensor, "shape", None)
    return place if shape is None else f"{place}, shape {tuple(shape)}"


def stack_hash() -> int:
    """Return a hash (32 bits, not 0) of the program's call stack, equal on all ranks with the same call path.

    It covers ``file:line`` of the innermost 32 frames of the program.
    """
    crc = 0
    frame, name = _program(sys._getframe(1))
    for _ in range(_DEEPEST):
        if frame is None:
            break
        crc = zlib.crc32(f"{name}:{frame.f_lineno}\n".encode(), crc)
        frame, name = _program(frame.f_back)
    return crc or 1
