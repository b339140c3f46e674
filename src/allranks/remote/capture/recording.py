"""The operations that a call of a captured function has queued.

A recording identifies tensors by its own numbers: tensors that are passed to the function, tensors that existed before
(``fixed``: parameters, states), and tensors that the step creates. Some of the last are returned, and get new ids on
each call. Some outlive the step (``kept``: gradients that are not set to None), and keep their ids. The worker frees
all others immediately after their last use.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allranks._base.errors import UsageError
from allranks.remote.protocol.signature import Signature
from allranks.remote.torch_device.call_site import here, line_of
from allranks.remote.torch_device.devices import places
from allranks.remote.torch_device.handle import DeviceTarget, Driver
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["Entry", "Recorder", "Recording", "RecordedResult", "difference"]

_REPEAT = ".\n  Capture a part of the step that always runs the same operations."


class Entry(NamedTuple):
    """A call, with the recording's numbers of its tensors."""

    target: int
    template: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: bytes | None


class RecordedResult(NamedTuple):
    """A tensor that the step returns: its number, place, signature and offset."""

    number: int
    place: DeviceTarget
    signature: Signature
    offset: int


@dataclass
class Recording:
    """The operations that one call has queued."""

    entries: list[Entry] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    # By target; held, because the targets must outlive the recording.
    places: dict[int, DeviceTarget] = field(default_factory=dict)
    fixed: dict[int, Any] = field(default_factory=dict)  # Refs, by number
    made: dict[int, Any] = field(default_factory=dict)  # weak references to Refs, by number
    owners: dict[int, int] = field(default_factory=dict)  # the targets of the tensors in `made`, by number
    kept: dict[int, Any] = field(default_factory=dict)  # weak references to Refs, by number
    inputs: int = 0
    returned: list[RecordedResult | None] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)  # returned values other than tensors
    spec: Any = None
    unreplayable: str = ""  # the reason why this call cannot be replayed, although the next one may

    def same(self, other: Recording) -> bool:
        """Return whether another call has queued the same operations."""
        return (
            self.entries == other.entries
            and self.fixed.keys() == other.fixed.keys()
            and all(other.fixed[number] is ref for number, ref in self.fixed.items())
            and self.kept.keys() == other.kept.keys()
            and [each and each[:3] for each in self.returned] == [each and each[:3] for each in other.returned]
            and self.spec == other.spec
        )

    def depends_on_offsets(self, master: Driver) -> bool:
        """Return whether it depends on offsets in storages, which must then be the same in each call."""
        strided = {
            str(master.operators.templates[each.template][0]).partition("as_strided")[1] for each in self.entries
        }
        return "as_strided" in strided or any(each is not None and each.offset for each in self.returned)


class Recorder:
    """Replaces the outbox's call while a step runs."""

    def __init__(self, master: Driver, name: str, inputs: Sequence[RemoteTensor]) -> None:
        self.recording = Recording(inputs=len(inputs))
        self._master = master
        self._name = name
        self._thread = threading.get_ident()
        self._places = {place.target: place for place in places() if place.master is master}
        self._numbers = {each._ref.whole.id: number for number, each in enumerate(inputs)}
        self._next = len(inputs)

    def __enter__(self) -> Recorder:
        self._master.connections.recorder = self
        self._redirect_calls(self.call)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._master.connections.recorder = None
        self._redirect_calls(self._master.connections.outbox.call)

    def _redirect_calls(self, call: Callable[..., Any]) -> None:
        for place in self._places.values():
            # A place that is created later would not be recorded, so `DeviceTable` refuses a new group during a step.
            place.call = call

    def refuse(self, why: str, always: bool) -> None:
        """Handle an action that a captured step cannot contain.

        Raises:
            UsageError: The action is never allowed.
        """
        if threading.get_ident() != self._thread:
            return
        if always:
            raise UsageError(
                f"capture: {self._name}, at {line_of(here(2))}: {why}.\n  Do this outside of the captured step."
            )
        self.recording.unreplayable = why

    def call(
        self, target: int, line: int, template: int, refs: Sequence[Any], outputs: int, values: bytes | None = None
    ) -> Any:
        made = self._master.connections.outbox.call(target, line, template, refs, outputs, values)
        # Calls of other threads pass through here, too, and are not part of the step.
        if threading.get_ident() == self._thread:
            found: Any = [] if not outputs else [made] if outputs == 1 else made
            # Results whose ids the caller passes.
            if given := self._master.operators.templates[template][3].outputs - outputs:
                refs, found = refs[:-given], refs[-given:]
            inputs = tuple([self._number(each) for each in refs])
            self.recording.entries.append(Entry(target, template, inputs, tuple(map(self._make, found)), values))
            self.recording.lines.append(line)
            self.recording.places[target] = self._places[target]
        return made

    def number_of(self, x: RemoteTensor) -> int:
        return self._number(x._ref)

    def _number(self, ref: Any) -> int:
        whole = ref.whole
        number = self._numbers.get(whole.id)
        if number is None:  # it existed before the step
            number = self._numbers[whole.id] = self._next
            self.recording.fixed[number] = whole  # held, so that its id is not reused for another tensor
            self._next += 1
        return number

    def _make(self, ref: Any) -> int:
        whole = ref.whole
        known = self._numbers.get(ref.id)
        # Another worker has created its part.
        if known in self.recording.made and self.recording.made[known]() is whole:
            return known
        number = self._numbers[ref.id] = self._next
        self.recording.made[number] = weakref.ref(whole)  # weak, to find out which tensors outlive the step
        self.recording.owners[number] = whole.target
        self._next += 1
        return number


def difference(master: Driver, before: Recording, after: Recording) -> str:
    """Describe the first difference between two calls."""
    if after.unreplayable or before.unreplayable:
        return f"{after.unreplayable or before.unreplayable}, on each call.\n  Do this outside of the captured step."

    def name(recording: Recording, at: int) -> str:
        op = master.operators.templates[recording.entries[at].template][0]
        line = line_of(recording.lines[at])
        return f"{op if isinstance(op, str) else op.name()}{f' at {line}' if line else ''}"

    for at, (old, new) in enumerate(zip(before.entries, after.entries, strict=False)):
        if old == new:
            continue
        if old.template == new.template and old.inputs == new.inputs and old.values != new.values:
            numbers = [_numbers(master, each) for each in (old, new)]
            return (
                f"a number that the master computes is {numbers[0]} and then {numbers[1]} in {name(after, at)}."
                " Its source is not visible in the step, such as a clock or a file.\n  Pass it as a tensor."
            )
        if old.template == new.template:
            return (
                f"{name(after, at)} has other operands than in the previous call, because tensors are recreated outside"
                " of the step.\n  Pass them as arguments."
            )
        return (
            f"operation {at} is {name(before, at)} and then {name(after, at)}"
            f"{' with other shapes or constants' if name(before, at) == name(after, at) else ''}{_REPEAT}"
        )
    if len(before.entries) != len(after.entries):
        return f"it queued {len(before.entries)} operations and then {len(after.entries)}{_REPEAT}"
    return f"the tensors that it reads, keeps or returns, or their structure, differ between calls{_REPEAT}"


def _numbers(master: Driver, entry: Entry) -> str:
    pack = master.operators.templates[entry.template][3].pack
    codes = pack.__self__.format  # type: ignore[attr-defined]
    return ", ".join(f"{each:.6g}" for each in struct.unpack(codes, entry.values or b""))
