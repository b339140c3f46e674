"""The grammar of a call's arguments: how values are classified, and how a template describes them.

A template has a form for each argument. A form is a list that begins with one of the codes below. Tensors and numbers
are gaps in the template: each call passes the ids of the tensors and the values of the numbers, in the order of the
arguments. All other values are part of the template.

The master, its fast path in C++ and the workers read the same tables. `kind_of` classifies values, and `visit` reads a
form.

==================  ==================================================================
``["t"]``           a tensor, passed with each call
``["i"]``           an integer, passed with each call
``["f"]``           a float, passed with each call
``["g"]``           a generator, whose number is passed with each call
``["l", ...]``      a list of forms
``["c", value]``    None, a bool, an integer, a float or a string
``["z", re, im]``   a complex number
``["d", name]``     a dtype
``["m", name]``     a memory format
``["y", name]``     a layout
``["w"]``           the device of the worker
==================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any, Protocol, TypeVar

import torch

__all__ = [
    "CODES", "COMPLEX", "CONSTANT", "DEVICE", "FLOAT", "GENERATOR", "INTEGER", "KINDS", "LIST", "NUMBERS", "TENSOR",
    "Form", "Visitor", "constant_of", "count_tensors", "form_of", "is_in_place", "kind_of", "number_codes",
    "packed_as", "visit", "written_by",
]  # fmt: skip

Form = list[Any]

TENSOR, INTEGER, FLOAT, GENERATOR, LIST, CONSTANT, COMPLEX = "t", "i", "f", "g", "l", "c", "z"
DTYPE, MEMORY_FORMAT, LAYOUT, DEVICE = "d", "m", "y", "w"

NUMBERS = {INTEGER: "q", FLOAT: "d", GENERATOR: "q"}
"""The kinds of values that each call passes as a number, and their codes in `struct`."""

KINDS: dict[type, str] = {
    int: INTEGER,
    float: FLOAT,
    bool: CONSTANT,
    NoneType: CONSTANT,
    str: CONSTANT,
    list: LIST,
    tuple: LIST,
    torch.dtype: DTYPE,
    torch.memory_format: MEMORY_FORMAT,
    torch.layout: LAYOUT,
    torch.device: DEVICE,
    torch.Generator: GENERATOR,
    complex: COMPLEX,
}
"""Codes by the exact type of a value. `kind_of` also handles subclasses."""

CODES = (TENSOR, LIST, INTEGER, FLOAT, CONSTANT, DTYPE, MEMORY_FORMAT, LAYOUT)
"""The kinds of values that the fast path in C++ accepts. It leaves calls with other kinds to Python."""

_NAMED = (DTYPE, MEMORY_FORMAT, LAYOUT)
_BEYOND = 1 << 63  # a number of a call has 64 bits; a larger integer is part of the template
_IN_PLACE = frozenset({"all_reduce", "broadcast"})

T = TypeVar("T")
T_co = TypeVar("T_co")


def kind_of(value: Any, is_number: bool, floats_matter: bool) -> str:
    """Return the code of a value, or "" if no template can contain it.

    Args:
        value: An argument, or an element of one.
        is_number: Integers are passed with each call, because no shape depends on them.
        floats_matter: Floats are part of the template, because a shape may depend on them.
    """
    # The exact type: with isinstance, a bool would be an integer.
    code = KINDS.get(type(value))
    if code is None:
        return _kind_of_subclass(value)
    if code == INTEGER:
        return INTEGER if is_number and -_BEYOND <= value < _BEYOND else CONSTANT
    if code == FLOAT:
        return CONSTANT if floats_matter else FLOAT
    return code


def _kind_of_subclass(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TENSOR
    if isinstance(value, list | tuple):
        return LIST
    if isinstance(value, bool | int | float | str):
        return CONSTANT
    return COMPLEX if isinstance(value, complex) else ""


def form_of(value: Any, is_number: bool = False, floats_matter: bool = True) -> Form:
    """Return the form of a value.

    Raises:
        TypeError: No template can contain it.
    """
    code = kind_of(value, is_number, floats_matter)
    if code == LIST:
        return [LIST, *(form_of(each, is_number, floats_matter) for each in value)]
    if code in NUMBERS or code in (TENSOR, DEVICE):
        return [code]
    if code == CONSTANT:
        return [CONSTANT, value]
    if code in _NAMED:
        return [code, str(value).removeprefix("torch.")]
    if code == COMPLEX:
        return [COMPLEX, value.real, value.imag]
    raise TypeError(
        f"{type(value).__name__} cannot be an argument of an operation on a worker.\n"
        "  Call the operation in a function that mw.remote() runs on the worker."
    )


def constant_of(form: Form, device: torch.device) -> Any:
    """Return the value of a form that has no gaps and is not a list.

    Args:
        form: The form of the value.
        device: The device of the worker.
    """
    code, *parts = form
    if code == CONSTANT:
        return parts[0]
    if code in _NAMED:
        value = getattr(torch, parts[0])
        assert isinstance(value, torch.dtype | torch.memory_format | torch.layout)
        return value
    if code == COMPLEX:
        return complex(*parts)
    assert code == DEVICE
    return device


class Visitor(Protocol[T]):
    """Converts each kind of form to a value of the visitor's type."""

    def tensor(self) -> T: ...
    def number(self, code: str) -> T: ...
    def sequence(self, parts: list[T]) -> T: ...
    def constant(self, form: Form) -> T: ...


def visit(form: Form, visitor: Visitor[T]) -> T:
    """Convert a form with a visitor, in the order in which calls pass tensors and numbers. Return the result."""
    code = form[0]
    if code == TENSOR:
        return visitor.tensor()
    if code in NUMBERS:
        return visitor.number(code)
    if code == LIST:
        return visitor.sequence([visit(each, visitor) for each in form[1:]])
    return visitor.constant(form)


class _Gaps:
    """The gaps of a form: a ``t`` for each tensor, and the code of each number."""

    def tensor(self) -> str:
        return TENSOR

    def number(self, code: str) -> str:
        return code

    def sequence(self, parts: list[str]) -> str:
        return "".join(parts)

    def constant(self, form: Form) -> str:
        return ""


def count_tensors(forms: Iterable[Form]) -> int:
    """Return the number of tensors that a call passes."""
    return sum(visit(each, _Gaps()).count(TENSOR) for each in forms)


def number_codes(forms: Iterable[Form]) -> str:
    """Return the format in which the numbers of a call are packed, in the codes of `struct`."""
    gaps = "".join(visit(each, _Gaps()) for each in forms)
    return "".join(NUMBERS[each] for each in gaps if each != TENSOR)


def packed_as(values: Sequence[Any]) -> str:
    """Return the `struct` format of some numbers, by their Python types: a float as FLOAT, others as INTEGER."""
    return "".join(NUMBERS[FLOAT if type(each) is float else INTEGER] for each in values)


def is_in_place(operation: str) -> bool:
    """Return whether an operation of allranks (``allranks::all_reduce``) changes its tensors."""
    return operation.partition("::")[2] in _IN_PLACE


def written_by(op: Any, args: Sequence[Form], kwargs: dict[str, Form]) -> list[int]:
    """Return the positions, among the tensors of a call, of those that the call changes.

    Args:
        op: An operator of torch, or the name of an operation of allranks.
        args, kwargs: The forms of its arguments.
    """
    if isinstance(op, str):
        return list(range(count_tensors([*args, *kwargs.values()]))) if is_in_place(op) else []
    by_name = {each.name: each for each in op._schema.arguments}
    given = [*zip(op._schema.arguments, args, strict=False), *((by_name[name], form) for name, form in kwargs.items())]
    found: list[int] = []
    seen = 0
    for argument, form in given:
        count = count_tensors([form])
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += range(seen, seen + count)
        seen += count
    return found
