"""A recording that the workers have, with a part for each.

Each worker has its part as a `RemoteProgram`, and a call is a small frame for each part.
"""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_unflatten

from allranks import _core
from allranks._base.errors import UsageError
from allranks.remote.capture.recording import RecordedResult, Recording
from allranks.remote.protocol import wire
from allranks.remote.protocol.arguments import written_by
from allranks.remote.torch_device.call_site import here
from allranks.remote.torch_device.handle import Driver, make
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["Replay"]

_ID = struct.Struct("<I")


class _ReplayPart(NamedTuple):
    """The part of a step that some workers execute in the same way."""

    target: int
    program: int
    inputs: list[int]
    outputs: list[int]


class Replay:
    """A recording that the workers have."""

    def __init__(self, master: Driver, recording: Recording, watch: _core.Watch) -> None:
        self.stale = False
        self.watch = watch
        self._parts: list[_ReplayPart] = []  # `__del__` reads it, even if a later line raises
        self.master = master
        self._recording = recording
        # `Handle._end_watch` finds these references at the Ref, and calls their callback.
        self._fixed = [weakref.ref(each, self._mark_stale) for each in recording.fixed.values()]
        self._places = list({id(each.place): each.place for each in recording.returned if each is not None}.values())
        self._written, self._changed = self._find_written()
        self._parts = self._divide()
        self._part: _ReplayPart | None = self._parts[0] if len(self._parts) == 1 else None
        only = self._part is not None and all(
            each is not None and each.number in self._part.outputs and each.place.target == self._part.target
            for each in recording.returned
        )
        self._simple = only and self._part is not None and self._part.inputs == list(range(recording.inputs))
        self._ranks = {rank for part in self._parts for rank in self._ranks_of[part.target]}
        # The calls of a lost worker are replaced (`LostWorkerCalls`), so comparing their identity detects a loss.
        self._known = [(place, place.calls) for rank in self._ranks for place in (master.devices.worker(rank),)]

    def _mark_stale(self, watch: Any) -> None:
        self.stale = True

    def dropped(self) -> int | None:
        """Return the line that made a tensor which was dropped but must outlive the step, or None."""
        for number, ref in self._recording.kept.items():
            if ref() is None:
                makers = zip(self._recording.entries, self._recording.lines, strict=True)
                return next(line for entry, line in makers if number in entry.outputs)
        return None

    def close(self) -> None:
        """Return the numbers of its programs to the cache. Idempotent."""
        self.master.operators.programs.extend(part.program for part in self._parts)
        self._parts = []

    def __del__(self) -> None:
        self.close()

    def __call__(self, tensors: Sequence[RemoteTensor]) -> Any:
        """Make the workers run the step."""
        recording, master = self._recording, self.master
        for place, calls in self._known:
            if place.calls is not calls:
                master.connections.check(place)
        line = here(2)
        if self._simple:
            assert self._part is not None
            target, program, _, outputs = self._part
            refs = [each._ref if each._ref.target == target else self._view(each._ref, target) for each in tensors]
            made: Any = master.connections.outbox.call(target, line, program, refs, len(outputs))
            found = dict(zip(outputs, [made] if len(outputs) == 1 else made or [], strict=True))
        else:
            found = self._call_parts(tensors, line)
        torch.autograd.graph.increment_version([*self._written, *(tensors[each] for each in self._changed)])
        leaves = [
            other if each is None else make(each.place, each.signature, self._ref(each, found, tensors), each.offset)
            for each, other in zip(recording.returned, recording.leaves, strict=True)
        ]
        return leaves[0] if recording.spec is None else tree_unflatten(leaves, recording.spec)

    def _ref(self, each: RecordedResult, found: dict[int, Any], tensors: Sequence[RemoteTensor]) -> Any:
        number = each.number
        ref = found.get(number)
        if ref is None:
            ref = tensors[number]._ref if number < self._recording.inputs else self._recording.fixed[number]
        return ref if ref.target == each.place.target else self._view(ref, each.place.target)

    def _view(self, ref: Any, target: int) -> Any:
        return self.master.connections.outbox.view(ref.whole, target)

    def _call_parts(self, tensors: Sequence[RemoteTensor], line: int) -> dict[int, Any]:
        outbox = self.master.connections.outbox
        found = {}
        for each in self._recording.returned:
            if (
                each is not None
                and each.number in self._recording.made
                and each.number not in self._recording.kept
                and each.number not in found
            ):
                found[each.number] = outbox.reserve(self._recording.owners[each.number], 1)[0]
        for target, program, inputs, outputs in self._parts:
            given = [tensors[each]._ref for each in inputs] + [found[each] for each in outputs]
            refs = [each if each.target == target else self._view(each, target) for each in given]
            outbox.call(target, line, program, refs, 0)
        return found

    def _divide(self) -> list[_ReplayPart]:
        """Send each worker its part. Workers with the same part share a program."""
        master, recording = self.master, self._recording
        ranks_of = {target: place.ranks for target, place in recording.places.items()}
        self._ranks_of = ranks_of
        entries_by_rank: dict[int, list[int]] = {}
        for index, entry in enumerate(recording.entries):
            for rank in ranks_of[entry.target]:
                entries_by_rank.setdefault(rank, []).append(index)
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, indices in entries_by_rank.items():
            together.setdefault(tuple(indices), []).append(rank)
        returned = {each.number for each in recording.returned if each is not None}
        parts = []
        for own, ranks in together.items():
            if not master.operators.programs:
                raise UsageError(
                    "capture: 4,096 captured steps exist, which is the limit.\n  Call reset() on one of them."
                )
            target, number = master.devices.target(ranks), master.operators.programs.pop()
            ranks_of[target] = tuple(ranks)
            entries = [recording.entries[each] for each in own]
            used = {each for entry in entries for each in entry.inputs}
            made = [each for entry in entries for each in entry.outputs]
            # With several parts, the master passes the ids of all results, because a group's result may be created in
            # several parts.
            outputs = [each for each in made if each in returned and each not in recording.kept]
            inputs = [each for each in range(recording.inputs) if each in used or len(together) == 1]
            program = wire.RemoteProgram(
                number=number,
                frames=self._frames(own, returned),
                inputs=inputs,
                outputs=outputs,
                fixed={each: ref.id for each, ref in recording.fixed.items() if each in used},
                kept={each: recording.kept[each]().id for each in made if each in recording.kept},
            )
            master.connections.outbox.put(target, wire.pack(program))
            parts.append(_ReplayPart(target, number, inputs, outputs))
        return parts

    def _frames(self, indices: Sequence[int], returned: set[int]) -> bytes:
        """Return the frames of some of the recording's calls, with a FREE after each last use."""
        recording = self._recording
        last: dict[int, int] = {}
        for index in indices:
            entry = recording.entries[index]
            last.update(dict.fromkeys((*entry.inputs, *entry.outputs), index))
        frames = bytearray()
        line = 0
        for index in indices:
            _, template, inputs, outputs, values = recording.entries[index]
            if recording.lines[index] != line:
                line = recording.lines[index]
                frames += wire.HEAD.pack(wire.LINE) + _ID.pack(line)
            frames += wire.HEAD.pack(template) + struct.pack(f"<{len(inputs) + len(outputs)}I", *inputs, *outputs)
            frames += values or b""
            freed = [
                each
                for each in dict.fromkeys((*inputs, *outputs))
                if last[each] == index
                and each in recording.made
                and each not in returned
                and each not in recording.kept
            ]
            if freed:
                frames += struct.pack(f"<HH{len(freed)}I", wire.FREE, len(freed), *freed)
        return bytes(frames)

    def _find_written(self) -> tuple[list[RemoteTensor], list[int]]:
        """Return the handles whose data a replay changes, and the positions of the step's arguments that it changes.

        Their versions must increase. Otherwise the backward of an earlier graph would use changed data.
        """
        written: set[int] = set()
        for entry in self._recording.entries:
            op, args, kwargs, _ = self.master.operators.templates[entry.template]
            written.update(entry.inputs[each] for each in written_by(op, args, kwargs))
        ids = {ref.id for number, ref in self._recording.fixed.items() if number in written}
        found = [
            each
            # Visits all objects, but only once per recording. No table of the handles of a Ref exists.
            for each in gc.get_objects()
            if type(each) is RemoteTensor and each._place.master is self.master and each._ref.whole.id in ids
        ]
        return found, sorted(each for each in written if each < self._recording.inputs)
