"""Where in the user's program a call stands: for errors, and for the debug mode's comparison of call sites.

The program is what is neither this package, torch nor Python's own library: DistributedDataParallel's calls come from
the middle of torch's, and are attributed to the line ``loss.backward()``.
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
NOWHERE = "(no line of the program)"  # "" would be taken for a question by the core

# The files of frames as the core gets them; "" if they are not the program's. Every asynchronous call looks here.
_names: dict[str, str] = {}
_MOST_FILES = 10_000  # a program may make up names for what it compiles

# Installed packages lie in folders of these names, some within the library's.
_INSTALLED = ("site-packages", "dist-packages")


def _look_up(filename: str) -> str:
    folders = [_PACKAGE]
    torch = importlib.util.find_spec("torch")  # not imported here: the launcher does without
    folders += torch.submodule_search_locations or () if torch else ()
    passed_over = filename.startswith((*(os.path.join(folder, "") for folder in folders), "<frozen "))
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        inner = filename.removeprefix(os.path.join(library, ""))
        passed_over = passed_over or (inner != filename and not inner.startswith(_INSTALLED))
    if len(_names) >= _MOST_FILES:
        _names.clear()
    # Bytes of a name that are no UTF-8, Python has as surrogates; the core cannot take them.
    _names[filename] = "" if passed_over else filename.encode(errors="replace").decode()
    return _names[filename]


def is_program(filename: str) -> bool:
    """Whether code of a file is the program's, or of a package that it uses: not torch, not Python's, not this one."""
    name = _names.get(filename)
    return bool(_look_up(filename) if name is None else name)


def _program(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The innermost frame of the program, from ``frame`` on, and its file."""
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
    """``file:line`` that a frame is at; "" if that is not the program's."""
    filename = frame.f_code.co_filename
    return f"{_names[filename]}:{frame.f_lineno}" if is_program(filename) else ""


def site() -> str:
    """``file:line`` of the innermost frame of the program; where there is none (a thread of ours) a text instead."""
    frame, name = _program(sys._getframe(1))
    return f"{name}:{frame.f_lineno}" if frame else NOWHERE


def warn(text: str) -> None:
    """Give a UserWarning at the innermost line of the program, however deep in this package the caller is."""
    frame, _ = _program(sys._getframe(1))
    if frame is None:  # in a thread of ours
        warnings.warn(text, stacklevel=2)
        return
    space = frame.f_globals
    seen = space.setdefault("__warningregistry__", {})  # as warnings.warn does, for "once for each line"
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, space.get("__name__"), seen)


def where() -> str:
    """``site``, and the shape of what it calls with. Slow: for errors."""
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
    """32 bits, not 0, of all ``file:line`` of the program: the same on every rank that came the same way."""
    crc = 0
    frame, name = _program(sys._getframe(1))
    for _ in range(_DEEPEST):
        if frame is None:
            break
        crc = zlib.crc32(f"{name}:{frame.f_lineno}\n".encode(), crc)
        frame, name = _program(frame.f_back)
    return crc or 1
