"""Transfer of a training's state to processes that lack it: tensors, and a pickled rest.

Tensors travel over the data channel. If the receiver has an equal part (modules, plain tensors), they arrive directly
in its memory, otherwise in new memory. Everything else is pickled. A rank receives its shard of a DTensor from a rank
that has the same shard (`shards`), and everything else from one rank, its donor. A process that has received only part
of the state counts as a process without state, and must receive all of it again.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from allranks._api import objects
from allranks._base.errors import StateLostError, UsageError
from allranks._call.bytes import in_huge_pages
from allranks._call.digests import PLAIN, local_of
from allranks._elastic.training.reachable import is_array, is_generator
from allranks._elastic.training.shards import Layout, Parts, layout_of, meshes_in, restored

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Donors", "assign", "attributes_of", "check_own", "check_part", "receive", "send"]

_PLACEHOLDER = "tensor"  # in a structure: placeholder of the next tensor


def check_part(name: str, part: object) -> None:
    """Reject an object that cannot be a part of a state.

    Raises:
        UsageError: The content of the object cannot be replaced in place.
    """
    if isinstance(part, (Tensor, dict, list, set, deque)) or is_array(part) or is_generator(part):
        return
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return
    if not hasattr(part, "__dict__") or isinstance(part, (type, FunctionType, ModuleType)):
        raise UsageError(
            f"State: {name} is a {type(part).__name__}, which cannot be changed in place. Expected a module, an"
            " optimizer, a tensor, an array, a dict, a list, or an object with attributes.\n"
            f"  Put a number or a string into a dict: State({name}={{...}})."
        )


def check_own(own: object) -> None:
    """Reject ``own`` tensors that another rank could not store."""
    for tensor in own if isinstance(own, (list, tuple)) else [own]:
        if not (isinstance(tensor, Tensor) and tensor.is_cpu and tensor.is_contiguous() and layout_of(tensor) is None):
            raise UsageError(f"State: own={own!r:.80}. Expected a list of contiguous tensors on the CPU")


class Donors(NamedTuple):
    """The ranks that send a process its state.

    Attributes:
        to: Rank of the process.
        full: The ranks that have the state.
        machines: The hosts of all ranks.
        sharded: The state contains DTensors.
    """

    to: int
    full: Sequence[int]
    machines: Sequence[str]
    sharded: bool

    @property
    def first(self) -> int:
        """The rank that sends everything except shards that it does not have."""
        return self._nearest(self.full)

    def of(self, layouts: Sequence[Layout | None]) -> list[int | None]:
        """Return the sending rank of each tensor, or None if no remaining rank has it."""
        known: dict[Any, int | None] = {}
        for layout in layouts:
            if layout is not None and layout[:4] not in known:  # the shape does not matter
                known[layout[:4]] = self._holder(layout)
        return [self.first if layout is None else known[layout[:4]] for layout in layouts]

    def _holder(self, layout: Layout) -> int | None:
        holders = [rank for rank in self.full if layout.same(rank, self.to)]
        if self.first in holders:
            return self.first
        return self._nearest(holders) if holders else None

    def _nearest(self, ranks: Sequence[int]) -> int:
        near = [rank for rank in ranks if self.machines[rank] == self.machines[self.to]] or ranks
        # Spread several receivers over the donors. All ranks compute the same result from exchanged values.
        return near[self.to % len(near)]


def send(parts: Parts, head: object, group: ProcessGroup, donors: Donors) -> None:
    """Send this rank's share of a state to a rank. All ranks that have the state call this.

    Args:
        parts: The state.
        head: An object that is sent before the state.
        group: The world.
        donors: The senders for that rank.

    Raises:
        StateLostError: No remaining rank has a required shard. Raised on all ranks.
    """
    me = group.rank()
    # Without shards, one donor sends everything. Packing the state on the other ranks would be wasted.
    if me != donors.first and not donors.sharded:
        return
    packed = {name: _Packed.of(part) for name, part in parts.items()}
    senders = donors.of([layout for each in packed.values() for layout in each.layouts])
    names = [f"{name}.{path}" for name, each in packed.items() for path in each.paths]
    lost = [name for name, sender in zip(names, senders, strict=True) if sender is None]
    # The receiver gets the error instead of the state, so that it raises the same error as the senders.
    message = _lost(donors.to, lost) if lost else [(name, each.structure, each.shapes) for name, each in packed.items()]
    tensors = [tensor for each in packed.values() for tensor in each.tensors]
    own_tensors = [tensor for tensor, sender in zip(tensors, senders, strict=True) if sender == me]
    # If a shard is lost, only the donor sends, because the receiver stops after its first message.
    if me == donors.first or (own_tensors and not lost):
        objects.send_object_list([head, message], donors.to, group)
    if isinstance(message, str):
        raise StateLostError(message)
    for tensor in own_tensors:
        if tensor.numel():
            group.send(tensor.contiguous(), donors.to)


def receive(parts: Parts, group: ProcessGroup, donors: Donors) -> Any:
    """Receive a state into these parts. Return its head.

    Raises:
        StateLostError: See ``send``.
        UsageError: The parts of this process differ from those of the sender.
    """
    head, described = _receive_described(group, donors.first)
    if {name for name, _, _ in described} != set(parts):
        raise UsageError(
            f"State: this process has the parts {sorted(parts)}, but rank {donors.first} has"
            f" {sorted(name for name, _, _ in described)}.\n  Create the State with the same parts on all ranks."
        )
    incoming = [_Incoming.of(parts[name], structure, donors) for name, structure, _ in described]
    # Senders run in parallel, but the receiver reads from one after the other: first the donor, then by rank.
    others = {sender for each in incoming for sender in each.senders if sender is not None} - {donors.first}
    for sender in (donors.first, *sorted(others)):
        if sender != donors.first:
            # The shapes of shards can differ between donors, so each one describes its own.
            _, described = _receive_described(group, sender)
        for each, (_, _, shapes) in zip(incoming, described, strict=True):
            each.receive(group, sender, shapes)
    # The meshes of this process: a mesh holds process groups, which cannot be sent.
    meshes = meshes_in(parts) if donors.sharded else {}
    for each in incoming:
        each.store(meshes)
    return head


def _receive_described(group: ProcessGroup, source: int) -> Any:
    message: list[Any] = [None, None]
    objects.recv_object_list(message, source, group)
    if isinstance(message[1], str):
        raise StateLostError(message[1])
    return message


def _lost(rank: int, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"State: rank {rank} was lost, and no remaining rank has the same shards of {', '.join(names[:3])}{more}.\n"
        "  Restart the job from a checkpoint (automatic with allranks run --restarts). A mesh with a replicated"
        " dimension keeps each shard on several ranks; see docs/resilience.md."
    )


class _Packed(NamedTuple):
    """A part of a state, with its tensors taken out.

    Attributes:
        structure: The rest, with placeholders for the tensors.
        paths: Name of each tensor in the part.
        layouts: Layout of each DTensor. None for other tensors.
        shapes: Shape and dtype of this rank's share of each tensor.
        tensors: This rank's share of each tensor, detached.
    """

    structure: Any
    paths: list[str]
    layouts: list[Layout | None]
    shapes: list[Any]
    tensors: list[Tensor]

    @classmethod
    def of(cls, part: Any) -> _Packed:
        found: list[tuple[str, Tensor]] = []
        structure = _pack(_state_of(part), found, "")
        tensors = [local_of(tensor) for _, tensor in found]
        return cls(
            structure,
            [path for path, _ in found],
            [layout_of(tensor) for _, tensor in found],
            [(tuple(tensor.shape), tensor.dtype) for tensor in tensors],
            tensors,
        )


class _Incoming(NamedTuple):
    """A part that is being received.

    Attributes:
        part: The part.
        structure: Structure of the incoming state.
        senders: The sending rank of each tensor.
        own: The current content of the part, if tensors are received into it. Otherwise None.
        tensors: The received tensors, by number.
    """

    part: Any
    structure: Any
    senders: list[int | None]
    own: _Packed | None
    tensors: dict[int, Tensor]

    @classmethod
    def of(cls, part: Any, structure: Any, donors: Donors) -> _Incoming:
        own = _Packed.of(part)
        # New memory would cost as much as the transfer: the kernel clears each page when it is first touched.
        in_place = isinstance(part, (Tensor, nn.Module)) and own.structure == structure
        return cls(part, structure, donors.of(list(_layouts(structure))), own if in_place else None, {})

    def receive(self, group: ProcessGroup, sender: int, shapes: Sequence[Any]) -> None:
        """Receive the tensors that one rank sends."""
        for number, (shape, dtype) in enumerate(shapes):
            if self.senders[number] != sender:
                continue
            if self.own is not None and self.own.shapes[number] == (shape, dtype):
                tensor = self.own.tensors[number]
            else:
                tensor = in_huge_pages(torch.empty(shape, dtype=dtype, device="cpu"))
            self.tensors[number] = tensor
            if tensor.numel() and tensor.is_contiguous():
                group.recv(tensor, sender)
            elif tensor.numel():
                # A receive needs contiguous memory, and the part may be a strided view.
                group.recv(buffer := torch.empty_like(tensor, memory_format=torch.contiguous_format), sender)
                tensor.copy_(buffer)

    def store(self, meshes: Mapping[Any, Any]) -> None:
        """Put the received tensors into the part, unless they were received in place."""
        received = [self.tensors[number] for number in range(len(self.senders))]
        # Received in place: load_state_dict would only copy each tensor onto itself.
        if self.own is not None and all(a is b for a, b in zip(received, self.own.tensors, strict=True)):
            return
        state = _unpack(self.structure, iter(received), meshes)
        if isinstance(self.part, Tensor):
            with torch.no_grad():
                self.part.copy_(state)
        elif hasattr(self.part, "load_state_dict"):
            self.part.load_state_dict(state)
        elif isinstance(self.part, (dict, list, set, deque)) or is_array(self.part):
            assign(self.part, state)
        elif not is_generator(self.part):
            for name, value in state.items():
                setattr(self.part, name, assign(getattr(self.part, name, None), value))


def attributes_of(part: object) -> dict[str, Any]:
    """Return the attributes of an object that are values: no modules, optimizers, functions, or other objects."""
    return {name: value for name, value in vars(part).items() if _is_value(value, 0)}


def _is_value(value: object, depth: int) -> bool:
    if type(value) in PLAIN or isinstance(value, Tensor) or is_array(value):
        return True
    if depth > 8:  # also ends the recursion in a cyclic container
        return False
    if isinstance(value, dict):
        return all(_is_value(each, depth + 1) for each in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(_is_value(each, depth + 1) for each in value)
    return False


def assign(old: Any, new: Any) -> Any:
    """Replace a value. Reuse the old objects if possible, because other objects may reference them.

    Returns:
        The object to store.
    """
    if old is new:
        return new
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.shape == new.shape and old.dtype == new.dtype and layout_of(old) == layout_of(new):
            with torch.no_grad():
                old.copy_(new)
            return old
        return new.to(old.device)
    if type(old) is not type(new):
        return new
    if isinstance(old, dict):
        # Merge before clearing, because the old values are needed to reuse their objects.
        merged = {key: assign(old.get(key), value) for key, value in new.items()}
        # dict's own methods, because a subclass may override them (Counter.update adds).
        dict.clear(old)
        dict.update(old, merged)
        return old
    if isinstance(old, (list, deque)):
        values = [assign(old[n] if n < len(old) else None, value) for n, value in enumerate(new)]
        old.clear()
        old.extend(values)
        return old
    if isinstance(old, set):
        old.clear()
        old.update(new)
        return old
    if is_array(old) and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
        return old
    return new


def _state_of(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, (dict, list, set, deque)) or is_array(part):
        return part
    return None if is_generator(part) else attributes_of(part)


def _pack(value: Any, found: list[tuple[str, Tensor]], path: str) -> Any:
    """Return the value with placeholders for its tensors, which are appended to ``found`` in order."""
    if isinstance(value, Tensor):
        return _take_out(value, found, path)
    # Exact types only: a subclass may have more state than its items.
    if type(value) in (dict, OrderedDict):
        return {"dict": [(key, _pack(each, found, _join(path, key))) for key, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(each, found, _join(path, at)) for at, each in enumerate(value)]}
    if type(value) in PLAIN:
        return {"value": value}
    # Pickle rebuilds all other values (a namedtuple, a Counter, an object of the program).
    places: list[Any] = []
    pickler = _StatePickler(buffer := io.BytesIO(), lambda tensor: places.append(_take_out(tensor, found, path)))
    pickler.dump(value)
    return {"pickled": (buffer.getvalue(), places)}


def _take_out(tensor: Tensor, found: list[tuple[str, Tensor]], path: str) -> Any:
    found.append((path, tensor))
    return (_PLACEHOLDER, str(tensor.device), layout_of(tensor))


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an object without its tensors, which are sent separately."""

    def __init__(self, file: io.BytesIO, add_tensor: Callable[[Tensor], None]) -> None:
        super().__init__(file)
        self._add_tensor = add_tensor
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        # A tensor that is referenced twice must be one tensor after unpickling, too.
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._add_tensor(value)
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _layouts(packed: Any) -> Iterator[Layout | None]:
    """Yield the layouts of the tensors of a structure, in order."""
    if isinstance(packed, tuple):
        yield packed[2]
        return
    ((kind, value),) = packed.items()
    if kind == "pickled":
        for each in value[1]:
            yield from _layouts(each)
    elif kind != "value":
        for each in value:
            yield from _layouts(each[1] if kind == "dict" else each)


def _unpack(packed: Any, tensors: Iterator[Tensor], meshes: Mapping[Any, Any]) -> Any:
    if isinstance(packed, tuple):
        _, device, layout = packed
        local = next(tensors).to(device)
        return local if layout is None else restored(local, layout, meshes)
    ((kind, value),) = packed.items()
    if kind == "dict":
        return {key: _unpack(each, tensors, meshes) for key, each in value}
    if kind == "value":
        return value
    if kind == "pickled":
        data, places = value
        return _Unpickler(data, [_unpack(place, tensors, meshes) for place in places]).load()
    items = [_unpack(each, tensors, meshes) for each in value]
    return items if kind == "list" else tuple(items)
