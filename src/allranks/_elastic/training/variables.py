"""The variables that a loop carries from one step to the next: ``total += loss.item()``.

A repeated step must find their previous values, and a process that replaces a lost rank must receive them. The bytecode
of the function that runs the loop determines these variables. A variable is carried if a step may read it before the
loop assigns it, and the loop assigns it somewhere. This is liveness analysis (Aho, Lam, Sethi, Ullman: Compilers, 2nd
edition, section 9.2.5), at the instruction where the loop gets the next step.
"""

from __future__ import annotations

import ctypes
import dis
import inspect
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from allranks._call.digests import is_plain

__all__ = ["Carried", "LoopVariables", "assigned_by", "can_be_carried", "is_plain_function", "miscounted"]

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
# Python 3.13 and later combine two instructions into one, with two names as argument.
_PAIRS = {"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
_DELETE = {"DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF"}
_END = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_JUMP_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}


class _Flow:
    """The control flow of a function: successors of each instruction, and variables that each reads and assigns."""

    def __init__(self, code: CodeType) -> None:
        listed: list[dis.Instruction] = []
        self.at: dict[int, int] = {}
        for each in dis.get_instructions(code):
            # An EXTENDED_ARG belongs to the instruction after it. Jumps lead to the first EXTENDED_ARG.
            self.at[each.offset] = len(listed)
            if each.opname not in ("CACHE", "EXTENDED_ARG"):
                listed.append(each)
        # The cache entries of an instruction belong to it. f_lasti of a caller is the last cache entry of its CALL.
        for offset in range(0, len(code.co_code), 2):
            self.at.setdefault(offset, self.at.get(offset - 2, 0))
        self.listed = listed
        self.following: list[list[int]] = []
        for number, each in enumerate(listed):
            after: list[int] = []
            if each.opname not in _END and each.opname not in _JUMP_ALWAYS and number + 1 < len(listed):
                after.append(number + 1)
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                target = self.at.get(each.argval)
                # In Python 3.10, these have an exception handler as target, which is not regular control flow.
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
        """Return the instructions on any path from an instruction back to itself."""
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
        rebound: All names that the loop assigns.
        within: Names that the program may read before it assigns them.
        assigned: Names in ``within`` that the loop assigns.
        after: Names that the loop assigns and that only code after the loop reads: ``print(loss)`` after the last step.
    """

    rebound: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()


_known: dict[tuple[CodeType, int], Carried] = {}


def carried(frame: FrameType) -> Carried:
    """Return the variables that the loop around the current instruction carries.

    Args:
        frame: Frame of the function that runs the loop, at the instruction that gets the next step.

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
    # A variable is live if any path leads to a read without an assignment. The sets only grow, so the loop terminates.
    live: list[set[str]] = [set() for _ in flow.listed]
    changed = True
    while changed:
        changed = False
        # Backward, because liveness flows from reads to earlier instructions: few passes are then needed.
        for number in range(len(flow.listed) - 1, -1, -1):
            after = set[str]().union(*(live[each] for each in flow.following[number]))
            new = (after - set(flow.writes(number))) | set(flow.reads(number))
            if new != live[number]:
                live[number], changed = new, True
    # The successors of FOR_ITER are the body of the loop, then the code after the loop.
    first, *others = flow.following[start] or [start]
    within = live[first]
    after = set[str]().union(*(live[each] for each in others))
    return Carried(
        frozenset(assigned),
        frozenset(within | (after - assigned)),
        frozenset(within & assigned),
        frozenset((after & assigned) - within),
    )


def miscounted(frame: FrameType, step: object) -> str | None:
    """Find the counter of ``for i, step in enumerate(state.steps(...))``, which starts at 0 in a replacement process.

    Returns:
        Its name. None if the loop has none.
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
    """Return the last line in a function that assigns a variable, or its first line if no line does."""
    code = frame.f_code
    lines = [(start, end, line) for start, end, line in code.co_lines() if line is not None]
    found = code.co_firstlineno
    for each in dis.get_instructions(code):
        if each.opname in _WRITE and each.argval == name:
            found = next((line for start, end, line in lines if start <= each.offset < end), found)
    return found


def is_plain_function(frame: FrameType) -> bool:
    """Return whether this is not a generator or coroutine, which other functions can resume."""
    return not frame.f_code.co_flags & _RESUMED


def can_be_carried(value: object) -> bool:
    """Return whether State can restore a variable with this value, and send it to another process."""
    import torch

    if type(value) is tuple:
        return all(map(can_be_carried, value))
    if isinstance(value, torch.Tensor):
        # A graph cannot be sent to another process, and a subclass or a parameter has further state.
        return value.is_leaf and type(value) is torch.Tensor and not value.requires_grad
    return is_plain(value) or (
        type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", 0) == ()
    )


class LoopVariables:
    """The variables that the loop of a training carries: those of the function that runs it, and of its callers.

    A caller's variables count, too: ``for epoch in state.epochs(9): best = min(best, train_epoch(epoch))``.

    Attributes:
        frames: Frame of the function that runs the loop, then frames of its callers.
        within: Variables that the program may read before it assigns them, as ``function.name``.
        assigned: Variables in ``within`` that the loop assigns. The others keep their value while the function runs.
            They may still depend on the result of an earlier loop, which a replacement process has not run.
        after: Variables that only code after the innermost loop reads.
        rebound: Plain names of all variables that a loop assigns.
    """

    def __init__(self, frames: Sequence[FrameType]) -> None:
        """
        Args:
            frames: Frame of the function that runs the loop, then frames of its callers.
        """
        self.frames = list(frames)
        self._at = frames[0].f_lasti if frames else -1
        self._where: dict[str, tuple[FrameType, str]] = {}
        self.within: set[str] = set()
        self.assigned: set[str] = set()
        self.after: set[str] = set()
        self.rebound: set[str] = set()
        for frame in frames:
            found = carried(frame)
            prefix = f"{frame.f_code.co_name.strip('<>')}."
            for name in found.within | found.after:
                self._where.setdefault(prefix + name, (frame, name))
            self.within |= {prefix + name for name in found.within}
            self.rebound |= found.rebound
            self.assigned |= {prefix + name for name in found.assigned}
            if frame is frames[0]:
                self.after |= {prefix + name for name in found.after}
        # Grouped by frame, because each access to f_locals costs about 1 us.
        self._keys = [
            (frame, [(key, name) for key, (owner, name) in self._where.items() if owner is frame]) for frame in frames
        ]

    def is_of(self, frame: FrameType) -> bool:
        """Return whether these are the variables of the loop that this function is currently running.

        Its callers are suspended in their calls and do not change, unless it is a generator, which any function may
        resume.
        """
        return bool(self.frames) and frame is self.frames[0] and frame.f_lasti == self._at and is_plain_function(frame)

    def read(self, names: Container[str]) -> dict[str, Any]:
        """Return the values of those of the named variables that have one.

        Cost:
            1 us for each function, and 0.1 us for each of its variables.
        """
        found: dict[str, Any] = {}
        for frame, keys in self._keys:
            values, outer = frame.f_locals, frame.f_globals
            for key, name in keys:
                if key in names:
                    if name in values:
                        found[key] = values[name]
                    elif name in outer:
                        found[key] = outer[name]
            if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                values.clear()  # the frame would keep this copy, and with it the tensors of the previous step
        return found

    def read_all(self) -> dict[str, Any]:
        """Return the values of all variables in ``within`` and ``after`` that have one."""
        return self.read(self._where)

    def write(self, values: Mapping[str, Any]) -> None:
        """Assign variables of functions that are running.

        Before Python 3.13, ``f_locals`` of a function is a copy, which PyFrame_LocalsToFast writes back (PEP 667).
        """
        for frame, known in self._by_frame(values):
            inner = frame.f_locals
            for key, name in known.items():
                # A variable without a value yet is assigned in the function, unless it is a global one.
                if name in inner or name not in frame.f_globals:
                    inner[name] = values[key]
                else:
                    frame.f_globals[name] = values[key]
            if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def line(self, key: str) -> int:
        """Return the last line that assigns a variable."""
        return line_of(*self._where[key])

    def _by_frame(self, keys: Iterable[str]) -> Iterable[tuple[FrameType, dict[str, str]]]:
        found: dict[int, tuple[FrameType, dict[str, str]]] = {}
        for key in keys:
            if key in self._where:
                frame, name = self._where[key]
                found.setdefault(id(frame), (frame, {}))[1][key] = name
        return found.values()


def assigned_by(code: CodeType) -> set[str]:
    """Return the names that a function, or the body of a module, assigns itself."""
    return {str(each.argval) for each in dis.get_instructions(code) if each.opname in _WRITE}
