"""The state of a training on its way to processes that have none: parts, as tensors and as what is not tensors.

Tensors go over the data channel straight into their place where the receiver has the same (modules, plain tensors),
else into new memory; the rest is pickled. A process to which not all has come has no state, and must get it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
    packed = {name: _Packed.of(part) for name, part in parts.items()}
    objects.send_object_list([head, [(name, each.structure, each.shapes) for name, each in packed.items()]], to, group)
    for each in packed.values():
        for tensor in each.tensors:
            if tensor.numel():
                group.send(tensor.contiguous(), to)


def receive(parts: Parts, group: ProcessGroup, source: int) -> Any:
    """Receives a state from a rank into these parts. Returns its head."""
    message: list[Any] = [None, None]
    objects.recv_object_list(message, source, group)
    head, described = message
    if {name for name, _, _ in described} != set(parts):
        raise UsageError(
            f"State: this process has the parts {sorted(parts)}, rank {source} has"
            f" {sorted(name for name, _, _ in described)}. All ranks make it of the same parts"
        )
    for name, structure, shapes in described:
        _receive_part(parts[name], structure, shapes, group, source)
    return head


def _receive_part(part: Any, structure: Any, shapes: list[Any], group: ProcessGroup, source: int) -> None:
    own = _Packed.of(part)
    # New memory would cost as much as the transfer: the kernel clears each page when it is first touched.
    in_place = isinstance(part, (Tensor, nn.Module)) and (own.structure, own.shapes) == (structure, shapes)
    tensors = own.tensors if in_place else [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in tensors:
        if tensor.numel() and tensor.is_contiguous():
            group.recv(tensor, source)
        elif tensor.numel():
            group.recv(come := torch.empty_like(tensor, memory_format=torch.contiguous_format), source)
            tensor.copy_(come)
    if not in_place:
        _put(part, _unpack(structure, iter(tensors)))


class _Packed(NamedTuple):
    """A part of a state, with its tensors taken out.

    Attributes:
        structure: the rest, with places for them.
        shapes: shape and dtype of each.
        tensors: they, detached.
    """

    structure: Any
    shapes: list[Any]
    tensors: list[Tensor]

    @classmethod
    def of(cls, part: Any) -> _Packed:
        tensors: list[Tensor] = []
        structure = _pack(_state_of(part), tensors)
        tensors = [tensor.detach() for tensor in tensors]
        return cls(structure, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors], tensors)


def _state_of(part: Any) -> Any:
    return part if isinstance(part, (Tensor, dict)) else part.state_dict()


def _put(part: Any, state: Any) -> None:
    if isinstance(part, Tensor):
        with torch.no_grad():
            part.copy_(state)
    elif isinstance(part, dict):
        part.clear()
        part.update(state)
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
