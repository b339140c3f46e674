"""The state of a training on its way to processes that have none: parts, as tensors and as what is not tensors.

Tensors go over the data channel straight into their place where the receiver has one of the same shape (parameters,
buffers, plain tensors), else into new memory; the rest is pickled. Nothing is put into its place before all has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from allranks._api import objects
from allranks._base.errors import UsageError

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Parts", "check_part", "receive", "send"]

Parts = Mapping[str, Any]
"""What a state consists of: modules, optimisers, anything with state_dict and load_state_dict, tensors, dicts."""

_PLACE = "tensor"  # in a structure: the place of the next tensor


def check_part(name: str, part: object) -> None:
    """Refuses what cannot be a part of a state."""
    if isinstance(part, (Tensor, dict)):
        return
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise UsageError(
            f"State: {name} is a {type(part).__name__}. Expected a module, an optimizer, anything with state_dict() and"
            " load_state_dict(), a tensor, or a dict of values"
        )


def check_own(own: object) -> None:
    """Refuses what no other rank could keep."""
    for tensor in own if isinstance(own, (list, tuple)) else [own]:
        if not (isinstance(tensor, Tensor) and tensor.is_cpu and tensor.is_contiguous()):
            raise UsageError(f"State: own={own!r:.80}. Expected a list of contiguous tensors on the CPU")


def send(parts: Parts, head: object, group: ProcessGroup, to: int) -> None:
    """Sends a state to a rank. ``head``: what goes before it."""
    tensors: list[Tensor] = []
    structure = {name: _pack(_state_of(part), tensors) for name, part in parts.items()}
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    objects.send_object_list([head, structure, shapes], to, group)
    for tensor in tensors:
        if tensor.numel():
            group.send(tensor.detach().contiguous(), to)


def receive(parts: Parts, group: ProcessGroup, source: int) -> Any:
    """Receives a state from a rank into these parts. Returns its head."""
    message: list[Any] = [None, None, None]
    objects.recv_object_list(message, source, group)
    head, structure, shapes = message
    if set(structure) != set(parts):
        raise UsageError(
            f"State: this process has the parts {sorted(parts)}, rank {source} has {sorted(structure)}. All ranks make"
            " it of the same parts"
        )
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in tensors:
        if tensor.numel():
            group.recv(tensor, source)
    come = iter(tensors)
    states = {name: _unpack(structure[name], come) for name in structure}  # in the sender's order
    for name, part in parts.items():
        _put(part, states[name])
    return head


def _state_of(part: Any) -> Any:
    return part if isinstance(part, (Tensor, dict)) else part.state_dict()


def _put(part: Any, state: Any) -> None:
    if isinstance(part, Tensor):
        with torch.no_grad():
            part.copy_(state)
    elif isinstance(part, dict):
        part.clear()
        part.update(state)
    elif isinstance(part, nn.Module):
        part.load_state_dict(state)
    else:
        part.load_state_dict(state)


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    """The value with its tensors taken out, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (_PLACE, str(value.device))
    if isinstance(value, Mapping):
        return {"dict": [(key, _pack(each, tensors)) for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_pack(each, tensors) for each in value]}
    return {"value": value}


def _unpack(packed: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(packed, tuple):
        return next(tensors).to(packed[1])
    ((kind, value),) = packed.items()
    if kind == "dict":
        return {key: _unpack(each, tensors) for key, each in value}
    if kind == "value":
        return value
    items = [_unpack(each, tensors) for each in value]
    return items if kind == "list" else tuple(items)
