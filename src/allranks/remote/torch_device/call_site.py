"""The line of the user's program that an operation comes from, as a small number.

A worker reports this number with a fault, and the master converts it to the line. No record is kept per operation.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch

from allranks._call.callsite import is_program

__all__ = ["called", "here", "line_of"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the package of master-worker mode
_GENERATED = ("<__array_function__", "<string>")  # code that libraries generate

_numbers: dict[int, dict[int, int] | None] = {}
"""The numbers of the lines of a code object, by its id and the instruction; None for code that is not the program's."""
_kept: list[CodeType] = []  # keeps code objects alive, so that no id is reused; hashing a code object costs 1 us
_lines: list[tuple[CodeType, int]] = []


def here(depth: int = 3) -> int:
    """Return the number of the program's line that is running, or 0 if there is none.

    `_call.callsite` defines which code is part of the program.

    Args:
        depth: The number of innermost frames, including this one, that are known to belong to this package.
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
            # By instruction and not by line, because Python computes `f_lineno` from a table each time.
            number = numbers.get(frame.f_lasti)
            if number is None:
                _lines.append((code, frame.f_lineno))
                number = numbers[frame.f_lasti] = len(_lines)
            return number
        frame = frame.f_back
    return 0


def _is_inside(file: str) -> bool:
    return file.startswith(_GENERATED) or not is_program(file)


def line_of(number: int) -> str:
    """Return ``file:line`` for a number."""
    if number == 0:
        return ""
    code, line = _lines[number - 1]
    return f"{code.co_filename}:{line}"


def called() -> tuple[str, frozenset[str]]:
    """Return the function that the innermost frame outside this package calls, and the strings in that call.

    The strings are constants, the strings and devices of variables, and those of attributes that can be read without
    running code. Without the source, and before Python 3.11, the result is "" and no strings.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None or sys.version_info < (3, 11):
        return "", frozenset()
    name, texts, paths = _call_at(frame.f_code, frame.f_lasti)
    values = [_value(frame, each) for each in paths]
    return name, texts.union(str(each) for each in values if isinstance(each, str | torch.device))


def _value(frame: FrameType, path: tuple[str, ...]) -> Any:
    first, *attributes = path
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for each in attributes:
        value = getattr(value, "__dict__", {}).get(each)
    return value


@functools.lru_cache(maxsize=1024)
def _call_at(code: CodeType, at: int) -> tuple[str, frozenset[str], tuple[tuple[str, ...], ...]]:
    first, last, begin, end = list(code.co_positions())[at // 2]  # f_lasti counts bytes, and an instruction has 2
    lines = [each.encode() for each in linecache.getlines(code.co_filename)[(first or 1) - 1 : last]]
    if not lines:
        return "", frozenset(), ()
    lines[-1] = lines[-1][:end]  # before lines[0], which may be the same line
    lines[0] = lines[0][begin:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:  # the file has changed since it was imported
        return "", frozenset(), ()
    function = call.func if isinstance(call, ast.Call) else None
    given = [*call.args, *(each.value for each in call.keywords)] if isinstance(call, ast.Call) else []
    paths = tuple(path for each in given for node in ast.walk(each) if (path := _path(node)))
    constants = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name, frozenset(each for each in constants if isinstance(each, str)), paths


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return the names of ``a.b.c``, or an empty tuple for another expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return (*before, node.attr)
    return ()
