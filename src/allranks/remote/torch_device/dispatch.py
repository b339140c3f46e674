"""Queues operations on handles.

Autograd and nn see ordinary tensors. The operations below them arrive at `dispatch`. It looks them up among the
calls with templates on the workers (`KnownCall`) and sends each as a frame of a few bytes. The core does the same in
C++ for known and ordinary calls (core/python/bind_calls.cc).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allranks import _core
from allranks._base.errors import UsageError
from allranks.remote.protocol.arguments import DEVICE, FLOAT, GENERATOR, INTEGER, LIST, TENSOR, kind_of
from allranks.remote.protocol.signature import SignatureFacts, facts, flatten, indexes
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.handle import DeviceTarget, Handle, KnownCall, operands

__all__ = ["GENERATORS", "MARKS", "SPECIAL", "different_devices_error", "dispatch", "run", "special", "unshare"]

_TRUE, _FALSE, _FLOAT, _INT, _DEVICE, _GENERATOR = object(), object(), object(), object(), object(), object()
_MARK_OF = {INTEGER: _INT, FLOAT: _FLOAT}
MARKS = (_TRUE, _FALSE, _INT, _FLOAT)
"""The entries of a key that stand for such values."""

aten = torch.ops.aten

GENERATORS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Generators of workers, by the address of the C++ generator. torch passes another Python object than the original."""

Special = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
SPECIAL: dict[Any, Special] = {}


def special(*ops: Any) -> Callable[[Special], Special]:
    def add(function: Special) -> Special:
        SPECIAL.update(dict.fromkeys(ops, function))
        # Entries that were made before have no replacement for these operators.
        _known.clear()
        _core.forget_operators()
        return function

    return add


def dispatch(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Queue an operation, or execute its replacement on the master."""
    known = _known.get(id(op))
    if known is None:
        known = _known[id(op)] = (SPECIAL.get(op), facts(op), op)
        if known[0] is None:
            # From now on the core queues calls of this operator without Python code.
            _core.know_operator(op, known[1], known[1].numbers, known[1].floats_matter)
    if known[0] is not None:
        return known[0](op, args, kwargs or {})
    return run(op, args, kwargs, known[1])


_known: dict[int, tuple[Any, SignatureFacts, Any]] = {}
"""By the id of an operator: its replacement on the master, its facts, and the operator itself.

The id is the key because the operator's own hash is a Python function. The operator is stored so that its id is not
reused."""


class _MasterTensor(Exception):
    """An operand is not on a worker."""


def _is_foreign(value: Any) -> bool:
    """Return whether a tensor is of another class that handles operators itself, such as jagged nested tensors."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, Handle)
        and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


class _OnAnotherDevice(Exception):
    """The result is requested on another device than that of the operands."""


def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, known: SignatureFacts | None = None) -> Any:
    """Queue an operation. `_core.dispatch` does the same, but only for known and ordinary calls."""
    known = known or facts(op)
    key: list[Any] = [known]
    refs: list[Any] = []
    values: list[Any] = []
    place: DeviceTarget | None = None
    try:
        for position, value in enumerate(args):
            place = _scan(value, key, refs, values, place, position in known.numbers, known.floats_matter)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                place = _scan(value, key, refs, values, place, name in known.numbers, known.floats_matter)
    except (_MasterTensor, _OnAnotherDevice) as way:
        if any(map(_is_foreign, flatten([*args, *(kwargs or {}).values()]))):
            return NotImplemented  # torch then calls the `__torch_dispatch__` of the other class
        if known.composite:
            return op.decompose(*args, **(kwargs or {}))
        if type(way) is _OnAnotherDevice:
            return _make_elsewhere(op, args, kwargs or {})
        return run(op, *_lift(op, args, kwargs or {}))
    if place is None:
        raise NotImplementedError(f"{known.name}: no operand is on a worker")
    call = place.calls.get(tuple(key))  # raises if a worker of the place is lost (`LostWorkerCalls`)
    if call is None:
        prepared = place.master.operators.prepare(op, args, kwargs or {}, tuple(key), place, refs, values)
        if not isinstance(prepared, KnownCall):
            return prepared.result  # the workers have already executed it
        call = prepared
    if call.resized:
        _unshare(call, args, kwargs or {}, refs)
    try:
        made = place.call(place.target, here(), call.number, refs, call.outputs, call.pack(*values) if values else None)
    # The outbox raises it, before it queues anything, if an operand is on other workers.
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise different_devices_error(known.name, args, kwargs or {}) from None
    return call.build(place, made, args, kwargs)


def _scan(
    value: Any, key: list[Any], refs: list[Any], values: list[Any], place: DeviceTarget | None,
    is_number: bool, floats_matter: bool,
) -> DeviceTarget | None:  # fmt: skip
    """Add an argument to a call's key, operands and numbers. Return the place of the first operand.

    `_core.dispatch` makes the same keys.
    """
    if isinstance(value, Handle):
        key.append(value._sig)
        refs.append(value._ref)
        return place or value._place
    code = kind_of(value, is_number, floats_matter)
    if code in (INTEGER, FLOAT):
        key.append(_MARK_OF[code])
        values.append(value)
    elif code == LIST:
        key.append(len(value))
        for each in value:
            place = _scan(each, key, refs, values, place, is_number, floats_matter)
    elif code == TENSOR:
        raise _MasterTensor  # leaves `_scan` at any depth, and `run` lifts the operand
    elif code == DEVICE:
        place = _scan_device(value, key, place)
        key.append(_DEVICE)
    elif code == GENERATOR:
        place = _scan_generator(value, values, place)
        key.append(_GENERATOR)
    elif value is True or value is False:  # True and False are equal to 1 and 0, so they need keys of their own
        key.append(_TRUE if value else _FALSE)
    elif isinstance(value, float | complex):  # different values may compare equal, such as 0.0 and -0.0
        key.append((type(value), repr(value)))
    else:
        key.append(value)
    return place


def _scan_device(device: torch.device, key: list[Any], place: DeviceTarget | None) -> DeviceTarget:
    """Return the workers of a device among the arguments.

    Raises:
        _OnAnotherDevice: They are not the workers of the operands.
    """
    if device.type not in ("worker", "lazy"):
        if place is None or device != place.lazy:
            raise _OnAnotherDevice
        return place
    target = place_of(device)
    if place is not None and target.index != place.index:
        if _GENERATOR in key:
            raise UsageError(
                f"expected a generator of {target.device}, not of {place.device}.\n  Create it with"
                f" torch.Generator(device='{target.device}')."
            )
        raise _OnAnotherDevice
    return place or target


def _scan_generator(value: torch.Generator, values: list[Any], place: DeviceTarget | None) -> DeviceTarget:
    """Return the workers of a generator, whose number the call passes."""
    generator = GENERATORS.get(value._cdata)  # type: ignore[attr-defined]
    if generator is None or (place is not None and generator._place.index != place.index):
        of = generator.device if generator is not None else value.device
        device = place.device if place is not None else "worker:R"
        raise UsageError(
            f"expected a generator of {device}, not of {of}.\n  Create it with torch.Generator(device='{device}')."
        )
    target: DeviceTarget = generator._place
    if place is not target:
        target.master.connections.check(target)  # the previous worker of this index may have been lost
    values.append(generator._number)
    return place or target


def _make_elsewhere(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that only uses the properties of its operands, with similar operands on the requested device."""
    known = facts(op)
    device = kwargs.get("device")
    if not known.factory or device is None:
        raise NotImplementedError(
            f"{known.name}: the result cannot be on another device than the operands.\n"
            "  Omit device=, and move the result with .to()."
        )

    def similar_operand(value: Any) -> Any:
        if not isinstance(value, Handle):
            return value
        return torch.empty_strided(value._sig.shape, value._sig.strides, dtype=value.dtype, device=device)

    if device.type == "lazy":
        device = place_of(device).device
    return op(*map(similar_operand, args), **{**kwargs, "device": device})


def _lift(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Upload operands of the master that CUDA also accepts on the CPU: tensors without dimensions, and indexes."""
    place: DeviceTarget | None = None
    for each in flatten([*args, *kwargs.values()]):
        if isinstance(each, Handle):
            place = each._place
            break
        if isinstance(each, torch.device) and each.type in ("worker", "lazy"):
            place = place_of(each)
    if place is None:
        raise NotImplementedError(f"{facts(op).name}: no operand is on a worker")
    target: DeviceTarget = place
    lenient = indexes(op)
    written = {each.name for each in op._schema.arguments if each.alias_info and each.alias_info.is_write}

    def lifted(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return [lift(each, lenient, name) for each in value]
        return lift(value, False, name)

    def lift(value: Any, lenient: bool, name: str) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, Handle):
            # A composite operator has created it next to handles that are CPU tensors to torch.
            lenient |= value.device == target.lazy
            if value.device.type == "cpu" and name not in written and (value.dim() == 0 or lenient):
                return target.master.transfers.upload(target, value)
            raise different_devices_error(facts(op).name, args, kwargs)
        return value

    return (
        [lifted(each, argument.name) for each, argument in zip(args, op._schema.arguments, strict=False)],
        {name: lifted(each, name) for name, each in kwargs.items()},
    )


def different_devices_error(name: str, args: Any, kwargs: Any) -> RuntimeError:
    found: list[str] = []
    for each in flatten([*args, *kwargs.values()]):
        if isinstance(each, Handle):
            each._place.master.connections.check(each._place)  # its worker may be lost, which is then the better error
        where = str(each._place) if isinstance(each, Handle) else None
        if where is None and isinstance(each, torch.Tensor):
            where = str(each.device)
        if where is not None and where not in found:
            found.append(where)
    error = RuntimeError(
        "Expected all tensors to be on the same device, "
        f"but found at least two devices, {' and '.join(found)}! ({name})"
    )
    error._without_frames = True  # type: ignore[attr-defined] # for `_core.dispatch`
    return error


def _unshare(call: KnownCall, args: Any, kwargs: Any, refs: list[Any]) -> None:
    """Give each operand that the call reshapes an id of its own, because detached handles share one."""
    found = operands(args, kwargs)
    resized = [found[index] for index, _ in call.resized]
    own = dict(zip(map(id, resized), unshare(resized), strict=True))
    refs[:] = [own.get(id(operand), ref) for operand, ref in zip(found, refs, strict=True)]


def unshare(given: Sequence[Handle]) -> list[Any]:
    """Give handles ids of their own for the same memory, and return their new Refs.

    A handle that is passed twice, as an input and as the result, keeps one id. The worker then refuses the call, as
    torch does locally.
    """
    own: dict[int, Any] = {}
    for operand in given:
        if id(operand) not in own:
            own[id(operand)] = run(aten.alias.default, (operand,), None)._ref
            operand._end_watch()
            operand._ref = own[id(operand)]
    return [own[id(operand)] for operand in given]
