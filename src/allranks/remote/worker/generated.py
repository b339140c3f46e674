"""Python functions that are generated from templates: all code of this package that is executed as text.

A template's function reads its tensors from the slots, calls the operator and stores the results. It is generated, and
not composed of closures, because the text has no loop over the arguments: benchmarks/worker_calls.py measures both. The
text contains numbers, and names that this module creates, but no text that the master has sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from allranks.remote.protocol.arguments import GENERATOR, NUMBERS, Form, constant_of, visit
from allranks.remote.worker.template import Code, Slots

__all__ = ["GeneratedSource", "call_function", "call_source", "flatten", "program_function"]


class GeneratedSource:
    """Builds the text of a call's arguments. Tensors are ``{i[0]}``, numbers ``{n[0]}``, as in `Code`.

    Attributes:
        inputs: The number of tensors so far.
        codes: The codes of the numbers so far, as in `struct`.
        space: The values that the text refers to, by name.
    """

    def __init__(self, own: str, device: torch.device, space: dict[str, Any]) -> None:
        self.inputs = 0
        self.codes = ""
        self.space = space
        self._own = own
        self._device = device

    def tensor(self) -> str:
        self.inputs += 1
        return f"{{i[{self.inputs - 1}]}}"

    def number(self, code: str) -> str:
        self.codes += NUMBERS[code]
        number = f"{{n[{len(self.codes) - 1}]}}"
        return f"generators[{number}]" if code == GENERATOR else number

    def sequence(self, parts: list[str]) -> str:
        return f"[{', '.join(parts)}]"

    def constant(self, form: Form) -> str:
        name = f"c{len(self.space)}{self._own}"
        self.space[name] = constant_of(form, self._device)
        return name


class CallSource(NamedTuple):
    """A call as text.

    Attributes:
        plain: Does not check the results.
        checked: Compares each result with the master's expectation.
    """

    plain: Code
    checked: Code
    inputs: int
    outputs: int


def call_source(
    number: int,
    args: Sequence[Form],
    kwargs: dict[str, Form],
    results: Sequence[Any],
    op: Any,
    device: torch.device,
    space: dict[str, Any],
) -> CallSource:
    """Return the text of a call.

    Args:
        number: The number of the template. It distinguishes the names of different templates.
        args, kwargs: The forms of its arguments.
        results: For each returned value None if it is not kept.
        op: The operator.
        device: The device of the worker.
        space: The values that the text of every call refers to: ``settle`` and ``generators``.

    Raises:
        ValueError: The name of an argument is not an identifier.
    """
    # The names of arguments are the only text of the master that becomes part of the code (docs/decisions/090).
    if not all(each.isidentifier() for each in kwargs):
        raise ValueError(f"{list(kwargs)}: expected identifiers")
    own = f"_{number}"
    # `OpOverload._op` is the C++ function, which `OpOverload.__call__` only passes its arguments to.
    names = {f"op{own}": getattr(op, "_op", op), f"R{own}": results, "flatten": flatten, **space}
    source = GeneratedSource(own, device, names)
    given = [visit(form, source) for form in args]
    given += [f"{name}={visit(form, source)}" for name, form in kwargs.items()]
    call = f"op{own}({', '.join(given)})"
    outputs = [each for each, meta in enumerate(results) if meta is not None]
    schema = getattr(op, "_schema", None)
    single = outputs and len(results) == 1 and not (schema and str(schema.returns[0].type).startswith("List"))

    def text(checked: bool) -> str:
        def result(source: str, which: int) -> str:
            return f"settle({source}, {which}, R{own})" if checked else source

        if not outputs:
            return call
        if single:
            return f"{{o[0]}} = {result(call, 0)}"
        taken = [f"{{o[{at}]}} = {result(f'r[{each}]', each)}" for at, each in enumerate(outputs)]
        # Without `del`, the function of a captured step would hold these results until its end.
        return "; ".join([f"r = flatten({call})", *taken, "del r"])

    layout = struct.Struct(f"<{source.inputs + len(outputs)}I{source.codes}")
    plain, checked = (Code(text(each), layout, names) for each in (False, True))
    return CallSource(plain, checked, source.inputs, len(outputs))


def call_function(code: Code, inputs: int, outputs: int, site: int = 0) -> Callable[[Slots, Any, int], None]:
    """Return a function of slots, a buffer, and the position in the buffer of a call's ids.

    ``site`` is the number that it stores while it runs; 0: it stores none.
    """
    numbers = len(code.layout.unpack(bytes(code.layout.size))) - inputs - outputs
    ids = [f"i{each}" for each in range(inputs)], [f"o{each}" for each in range(outputs)]
    values = [f"n{each}" for each in range(numbers)]
    names = [*ids[0], *ids[1], *values]
    taken = f"{', '.join(names)}, = unpack(B, at)" if names else "pass"
    slots = [[f"S[{each}]" for each in kind] for kind in ids]
    body = code.text.format(i=slots[0], o=slots[1], n=values)
    space = {**code.space, "unpack": code.layout.unpack_from}
    noted = f"doing[0] = {site}" if site else "pass"
    return _execute(f"def run(S, B, at):\n  {noted}\n  {taken}\n  {body}", space)  # type: ignore[no-any-return]


def program_function(inputs: Sequence[int], lines: Sequence[str], results: str, space: dict[str, Any]) -> Any:
    """Return a function of slots and of a captured step's inputs, whose tensors are local variables.

    Args:
        inputs: The numbers of the inputs in the step.
        lines: The lines of its body.
        results: The expression that it returns.
        space: The values that the lines refer to.
    """
    body = "\n  ".join([*lines, f"return ({results})"])
    return _execute(f"def run({', '.join(['S', *(f'v{each}' for each in inputs)])}):\n  {body}", space)


def flatten(result: Any) -> list[Any]:
    """Return the values that an operator returned, in one list."""
    if isinstance(result, list | tuple):
        return [one for each in result for one in (each if isinstance(each, list | tuple) else (each,))]
    return [result]


def _execute(source: str, space: dict[str, Any]) -> Any:
    exec(source, space)
    return space["run"]
