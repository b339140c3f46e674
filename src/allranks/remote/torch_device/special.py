"""Operators that are not simply queued: data that moves between the master and workers, and views.

A view's shape does not depend on its offset, so the offset is a number of the call and not part of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allranks.remote.protocol import wire
from allranks.remote.protocol.arguments import form_of
from allranks.remote.protocol.signature import Signature, signature
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.devices import place_of
from allranks.remote.torch_device.dispatch import run, special
from allranks.remote.torch_device.exchange import total
from allranks.remote.torch_device.handle import Handle, KnownCall, view

__all__: list[str] = []

aten = torch.ops.aten


@special(aten.detach.default, aten.lift_fresh.default, aten.lift.default)
def _detach(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return view(x, x._sig, x._ref, x._off) if isinstance(x, Handle) else x


@special(aten._local_scalar_dense.default)
def _item(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]._place.master.transfers.item(args[0])


@special(aten._to_copy.default)
def _to_copy(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    device = kwargs.get("device")
    if not isinstance(x, Handle):
        # torch adds index 0 to a device without an index when it converts a CPU tensor.
        place = place_of(None if device is not None and device.index == 0 else device)
        plain = op(x, **{**kwargs, "device": torch.device("cpu")})
        return place.master.transfers.upload(place, plain, bool(kwargs.get("non_blocking")))
    master = x._place.master
    if device in (None, x._place.lazy) or (
        device.type in ("worker", "lazy") and place_of(device).index == x._place.index
    ):
        return run(op, args, kwargs)
    rest = {name: each for name, each in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    # The task id is -1 outside of a backward.
    if len(x._place.ranks) > 1 and torch._C._current_graph_task_id() >= 0:
        # The backward sends a gradient to the source of a tensor that was copied to all workers, so it is their sum.
        x = total(run(op, args, {**rest, "device": x._place.lazy}))
        return x if device == x._place.lazy else x.to(device)
    if device.type in ("worker", "lazy"):
        if any(each is not None for name, each in rest.items() if name != "memory_format"):
            x = run(op, args, {**rest, "device": x._place.lazy})
        return master.transfers.copy(x, place_of(device))
    fetched = master.transfers.fetch(x)
    as_it_is = {None, torch.preserve_format, torch.strided, x.dtype}
    if device.type == "cpu" and as_it_is.issuperset(rest.values()):
        return fetched  # no other reference exists, and another copy would take as long as the transfer
    return op(fetched, **rest, device=device)


@special(aten.copy_.default)
def _copy(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    into, source = args[:2]
    non_blocking = len(args) > 2 and bool(args[2])
    if not isinstance(into, Handle):
        into.copy_(source._place.master.transfers.fetch(source))
        return into
    place = into._place
    if not isinstance(source, Handle):
        source = place.master.transfers.upload(place, source.detach().cpu(), non_blocking)
    elif source._place.index != place.index:
        source = place.master.transfers.copy(source, place)
    run(op, (into, source), None)
    return into


@special(aten._copy_from.default, aten._copy_from_and_resize.default)
def _copy_from(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _copy(aten.copy_.default, (args[1], args[0], *args[2:]), {})


@special(aten._sparse_compressed_tensor_unsafe.default)
def _refuse(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # torch would fail with an internal assertion.
    raise TypeError(f"the result is {kwargs['layout']}: {wire.ONLY_STRIDED}")


@special(aten._efficientzerotensor.default)
def _zeros(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # Autograd creates zeros without memory for itself; they cannot be sent or printed.
    return run(aten.zeros.default, args, kwargs)


@special(aten.is_pinned.default)
def _is_pinned(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return False


@special(aten._has_compatible_shallow_copy_type.default)
def _is_like(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # The check of ``.data = ``; it must also work for lost tensors.
    return isinstance(args[0], Handle) and isinstance(args[1], Handle)


@special(aten.select.int)
def _select(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, dim, index = args
    if not isinstance(x, Handle):
        return run(op, args, kwargs)
    sig = x._sig
    if not -len(sig.shape) <= dim < len(sig.shape) or not -sig.shape[dim] <= index < sig.shape[dim]:
        return op(sig.on_meta(), dim, index)  # raises the error
    if index < 0:
        index += sig.shape[dim]
    place = x._place
    call = place.calls.get((op, sig, dim))
    if call is None:
        shape, strides = list(sig.shape), list(sig.strides)
        del shape[dim], strides[dim]
        looks = signature(sig.dtype, shape, strides, sig.bits)
        forms = [["t"], ["c", dim], ["i"]]
        call = place.master.operators.define(
            place, (op, sig, dim), op, forms, {}, [index], [("new", looks, 0, True, 0)], [], False
        )
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(index))
    return view(x, _only(call), made, x._off + index * sig.strides[dim])


@special(aten.slice.Tensor)
def _slice(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    x, dim, start, end, step = (*args, *defaults[len(args) - 1 :])
    sig = x._sig
    if not -len(sig.shape) <= dim < len(sig.shape) or step <= 0:
        return op(sig.on_meta(), dim, start, end, step)  # raises the error
    start, end, step = slice(start, end, step).indices(sig.shape[dim])
    end = max(start, end)
    length = (end - start + step - 1) // step
    place = x._place
    key = (op, sig, dim, length, step)
    call = place.calls.get(key)
    if call is None:
        shape, strides = list(sig.shape), list(sig.strides)
        shape[dim], strides[dim] = length, strides[dim] * step
        looks = signature(sig.dtype, shape, strides, sig.bits)
        forms = [["t"], ["c", dim], ["i"], ["i"], ["c", step]]
        call = place.master.operators.define(
            place, key, op, forms, {}, [start, end], [("new", looks, 0, True, 0)], [], False
        )
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(start, end))
    return view(x, _only(call), made, x._off + start * sig.strides[dim])


@special(aten.as_strided.default)
def _as_strided(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, size, strides, offset = (*args, None)[:4]
    place = x._place
    offset = x._off if offset is None else offset
    key = (op, x._sig, tuple(size), tuple(strides))
    call = place.calls.get(key)
    if call is None:
        looks = signature(x.dtype, size, strides, x._sig.bits)
        forms = [["t"], form_of(size), form_of(strides), ["i"]]
        call = place.master.operators.define(
            place, key, op, forms, {}, [offset], [("new", looks, 0, False, 0)], [], False
        )
    made = place.call(place.target, here(), call.number, (x._ref,), 1, call.pack(offset))
    return view(x, _only(call), made, offset)


@special(aten.set_.source_Tensor)
def _set(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, source = args
    x.data = source
    return x


def _only(call: KnownCall) -> Signature:
    assert call.only is not None
    return call.only
