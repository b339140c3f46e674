"""The variables that a loop carries from one step to the next: ``total += loss.item()``.

A step that is repeated must find them as they were, and a process that replaces a lost rank must get them. Which ones
they are follows from the bytecode of the function that runs the loop: a variable is carried if a step may read it
before the loop assigns it anew, and the loop assigns it somewhere. That is liveness analysis (Aho, Lam, Sethi, Ullman:
Compilers, 2nd edition, section 9.2.5), at the place where the loop gets the next step.
"""

from __future__ import annotations

import ctypes
import dis
import inspect
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from allranks.resilience.reachable import is_plain

__all__ = ["Carried", "can_be_carried", "carried", "line_of", "miscounted", "read", "write"]

_READ = {
    "LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FAST_BORROW",
}
_WRITE = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"}
_PAIRS = {"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
_DELETE = {"DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF"}
_END = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_JUMP_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}


class _Flow:
    """The instructions of a function: which follow on which, and the variables that each reads and assigns."""

    def __init__(self, code: CodeType) -> None:
        listed = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
        self.at = {each.offset: number for number, each in enumerate(listed)}
        self.listed = listed
        self.following: list[list[int]] = []
        for number, each in enumerate(listed):
            after: list[int] = []
            if each.opname not in _END and each.opname not in _JUMP_ALWAYS and number + 1 < len(listed):
                after.append(number + 1)
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                target = self.at.get(each.argval)
                if target is not None and each.opname not in ("SETUP_FINALLY", "SETUP_WITH"):
                    after.append(target)
            self.following.append(after)

    def reads(self, number: int) -> Iterable[str]:
        return self._names(number, "LOAD", _READ)

    def writes(self, number: int) -> Iterable[str]:
        return self._names(number, "STORE", _WRITE)

    def _names(self, number: int, kind: str, plain: set[str]) -> Iterable[str]:
        each = self.listed[number]
        if each.opname in plain:
            return (str(each.argval),)
        if each.opname in _PAIRS:
            parts = [part for part in each.opname.replace("_BORROW", "").split("_FAST") if part]
            return tuple(n for n, part in zip(each.argval, parts, strict=False) if part.strip("_") == kind)
        return ()

    def reachable(self, start: int) -> set[int]:
        found, queue = set[int](), [start]
        while queue:
            for after in self.following[queue.pop()]:
                if after not in found:
                    found.add(after)
                    queue.append(after)
        return found

    def loop_around(self, start: int) -> set[int]:
        """The instructions that lie on a way from one back to it."""
        before: dict[int, list[int]] = {}
        for number, after in enumerate(self.following):
            for each in after:
                before.setdefault(each, []).append(number)
        found, queue = set[int](), [start]
        while queue:
            for each in before.get(queue.pop(), ()):
                if each not in found:
                    found.add(each)
                    queue.append(each)
        return found & self.reachable(start)


class Carried(NamedTuple):
    """The variables that a loop carries.

    Attributes:
        within: a step may read them before the loop assigns them.
        behind: only what follows the loop reads them: ``print(loss)`` after the last step.
    """

    within: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()


_known: dict[tuple[CodeType, int], Carried] = {}


def carried(frame: FrameType) -> Carried:
    """The variables that the loop around the present instruction carries.

    Args:
        frame: of the function that runs the loop, where it gets the next step.

    Cost:
        some milliseconds for a function of 1,000 lines, once for each loop in the source.
    """
    key = frame.f_code, frame.f_lasti
    if key not in _known:
        _known[key] = _carried(_Flow(frame.f_code), frame.f_lasti)
    return _known[key]


def _carried(flow: _Flow, offset: int) -> Carried:
    start = flow.at.get(offset)
    if start is None:
        return Carried()
    loop = flow.loop_around(start)
    assigned = {name for number in loop for name in flow.writes(number)}
    # A variable is live where some way leads to a read without an assignment. The sets only grow, so this ends.
    live: list[set[str]] = [set() for _ in flow.listed]
    changed = True
    while changed:
        changed = False
        for number in range(len(flow.listed) - 1, -1, -1):
            after = set[str]().union(*(live[each] for each in flow.following[number]))
            new = (after - set(flow.writes(number))) | set(flow.reads(number))
            if new != live[number]:
                live[number], changed = new, True
    # FOR_ITER is followed by the body of the loop, then by what is behind it.
    first, *others = flow.following[start] or [start]
    within = live[first] & assigned
    behind = set[str]().union(*(live[each] for each in others)) & assigned
    return Carried(frozenset(within), frozenset(behind - within))


def miscounted(frame: FrameType, step: object) -> str | None:
    """The counter of ``for i, step in enumerate(state.steps(...))``, which begins at 0 in a replacement process.

    Returns:
        Its name; None if the loop has none.
    """
    flow, values = _Flow(frame.f_code), frame.f_locals
    for number, each in enumerate(flow.listed):
        if each.opname != "UNPACK_SEQUENCE" or not number or flow.listed[number - 1].opname != "FOR_ITER":
            continue
        names = [name for after in range(number + 1, number + 1 + int(each.arg or 0)) for name in flow.writes(after)]
        if any(values.get(name) is step for name in names):
            return next((name for name in names if type(values.get(name)) is int), None)
    return None


def line_of(frame: FrameType, name: str) -> int:
    """The last line in a function that assigns a variable; its first line if none does."""
    code = frame.f_code
    lines = [(start, end, line) for start, end, line in code.co_lines() if line is not None]
    found = code.co_firstlineno
    for each in dis.get_instructions(code):
        if each.opname in _WRITE and each.argval == name:
            found = next((line for start, end, line in lines if start <= each.offset < end), found)
    return found


def can_be_carried(value: object) -> bool:
    """Whether State can restore a variable with this value, and send it to another process."""
    import torch

    if type(value) is tuple:
        return all(map(can_be_carried, value))
    if isinstance(value, torch.Tensor):
        return value.is_leaf and type(value) is torch.Tensor and not value.requires_grad
    return is_plain(value) or (
        type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", 0) == ()
    )


def read(frame: FrameType, names: Iterable[str]) -> dict[str, Any]:
    """The values of those variables of a function that have one."""
    values, outer = frame.f_locals, frame.f_globals
    found = {n: values[n] if n in values else outer[n] for n in names if n in values or n in outer}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # a copy that the frame would keep: with it, the tensors of the step before
    return found


def write(frame: FrameType, values: dict[str, Any]) -> None:
    """Assign variables of a function that is running.

    Before Python 3.13 ``f_locals`` of a function is a copy, which PyFrame_LocalsToFast writes back (PEP 667 tells).
    """
    inner = frame.f_locals
    for name, value in values.items():
        if name in inner or name not in frame.f_globals:
            inner[name] = value
        else:
            frame.f_globals[name] = value
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
