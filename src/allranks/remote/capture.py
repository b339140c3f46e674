"""A whole step as one command: recorded, verified, then replayed by the workers without the master's Python.

The first calls of a captured function run as ever, and what they queue is written down. When two calls in a row have
queued the same (the first may differ: optimisers make their state in it), each worker is told its part of it, as a
`Program`, and from then on a call is one small frame for each set of workers that do the same.

A recording knows tensors by numbers of its own: those that the function is given, those that were there before
(``fixed``: parameters, states), and those that the step makes. Of these some are returned, and get new ids at each
call; some outlive the step (``kept``: gradients that are not set to None), and keep their ids; the others are freed on
the worker right behind their last use.
"""

from __future__ import annotations

import functools
import gc
import re
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from allranks import _core
from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks.remote import tensor as handles
from allranks.remote import wire
from allranks.remote.lines import here, line_of
from allranks.remote.signature import Signature
from allranks.remote.tensor import Place, RemoteTensor, make
from allranks.remote.watch import Reach, random_state
from allranks.remote.worker.interpreter import written_by
from allranks.remote.worker.orders import OPERATIONS

if TYPE_CHECKING:
    from allranks.remote.master import Master

__all__ = ["Captured", "capture"]

P = ParamSpec("P")
R = TypeVar("R")

_ATTEMPTS = 4  # calls that may differ before the step is said not to repeat
_PATIENCE = 8  # calls in a row that are not replayed, as something has changed before each, until that is said
_FORGIVEN = 1  # times that tensors which outlive the step may be dropped
_ID = struct.Struct("<I")


class _Entry(NamedTuple):
    """A call, its tensors by the recording's numbers."""

    target: int
    template: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: bytes | None


class _Returned(NamedTuple):
    """A tensor that the step returns: which number, and how it looks."""

    number: int
    place: Place
    looks: Signature
    offset: int


@dataclass
class _Recording:
    """What one call has queued."""

    entries: list[_Entry] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # by target: they must not end before this does
    fixed: dict[int, Any] = field(default_factory=dict)  # Refs, by number
    made: dict[int, Any] = field(default_factory=dict)  # weak references to Refs, by number
    owners: dict[int, int] = field(default_factory=dict)  # the targets of these
    kept: dict[int, Any] = field(default_factory=dict)  # weak references to Refs, by number
    inputs: int = 0
    returned: list[_Returned | None] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)  # what is returned beside tensors
    spec: Any = None
    unsettled: str = ""  # why this call cannot be replayed, though the next may

    def same(self, other: _Recording) -> bool:
        """Whether another call has queued the same."""
        return (
            self.entries == other.entries
            and self.fixed.keys() == other.fixed.keys()
            and all(other.fixed[number] is ref for number, ref in self.fixed.items())
            and self.kept.keys() == other.kept.keys()
            and [each and each[:3] for each in self.returned] == [each and each[:3] for each in other.returned]
            and self.spec == other.spec
        )

    def is_placed(self, master: Master) -> bool:
        """Whether it tells where in a storage tensors are: the arguments must then be there at each call."""
        strided = {str(master.templates[each.template][0]).partition("as_strided")[1] for each in self.entries}
        return "as_strided" in strided or any(each is not None and each.offset for each in self.returned)


class _Recorder:
    """Stands in the place of the outbox's call while a step runs."""

    def __init__(self, master: Master, name: str, inputs: Sequence[RemoteTensor]) -> None:
        self.recording = _Recording(inputs=len(inputs))
        self._master = master
        self._name = name
        self._thread = threading.get_ident()
        self._places = {place.target: place for place in handles.places() if place.master is master}
        self._numbers = {each._ref.whole.id: number for number, each in enumerate(inputs)}
        self._next = len(inputs)

    def __enter__(self) -> _Recorder:
        self._master.recorder = self
        self._point(self.call)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._master.recorder = None
        self._point(self._master.outbox.call)

    def _point(self, call: Callable[..., Any]) -> None:
        for place in self._places.values():
            place.call = call

    def refuse(self, why: str, always: bool) -> None:
        """Hears of what a captured step cannot do.

        Raises:
            UsageError: it can never.
        """
        if threading.get_ident() != self._thread:
            return
        if always:
            raise UsageError(f"capture: {self._name}, at {line_of(here(2))}: {why}. Do it outside of the captured step")
        self.recording.unsettled = why

    def call(
        self, target: int, line: int, template: int, refs: Sequence[Any], outputs: int, values: bytes | None = None
    ) -> Any:
        made = self._master.outbox.call(target, line, template, refs, outputs, values)
        if threading.get_ident() == self._thread:
            found: Any = [] if not outputs else [made] if outputs == 1 else made
            if given := self._master.templates[template][3].outputs - outputs:  # results that have an id
                refs, found = refs[:-given], refs[-given:]
            inputs = tuple([self._number(each) for each in refs])
            self.recording.entries.append(_Entry(target, template, inputs, tuple(map(self._make, found)), values))
            self.recording.lines.append(line)
            self.recording.places[target] = self._places[target]
        return made

    def number_of(self, x: RemoteTensor) -> int:
        return self._number(x._ref)

    def _number(self, ref: Any) -> int:
        whole = ref.whole
        number = self._numbers.get(whole.id)
        if number is None:  # it was there before
            number = self._numbers[whole.id] = self._next
            self.recording.fixed[number] = whole
            self._next += 1
        return number

    def _make(self, ref: Any) -> int:
        whole = ref.whole
        known = self._numbers.get(ref.id)
        if known in self.recording.made and self.recording.made[known]() is whole:  # by another worker
            return known
        number = self._numbers[ref.id] = self._next
        self.recording.made[number] = weakref.ref(whole)
        self.recording.owners[number] = whole.target
        self._next += 1
        return number


class _Part(NamedTuple):
    """What some workers do of a step, all the same."""

    target: int
    program: int
    inputs: list[int]
    outputs: list[int]


class _Replay:
    """A recording that the workers know."""

    def __init__(self, master: Master, recording: _Recording, watch: _core.Watch) -> None:
        self.stale = False
        self.watch = watch
        self._parts: list[_Part] = []
        self._master = master
        self._recording = recording
        self._fixed = [weakref.ref(each, self._left) for each in recording.fixed.values()]
        self._places = list({id(each.place): each.place for each in recording.returned if each is not None}.values())
        self._written, self._changed = self._find_written()
        self._parts = self._divide()
        self._part: _Part | None = self._parts[0] if len(self._parts) == 1 else None
        only = self._part is not None and all(
            each is not None and each.number in self._part.outputs and each.place.target == self._part.target
            for each in recording.returned
        )
        self._simple = only and self._part is not None and self._part.inputs == list(range(recording.inputs))
        self._ranks = {rank for part in self._parts for rank in self._ranks_of[part.target]}
        self._known = [(place, place.calls) for rank in self._ranks for place in (master.places[(rank,)],)]

    def _left(self, watch: Any) -> None:
        self.stale = True

    def dropped(self) -> int | None:
        """The line that made a tensor that was to outlive the step and has not; None where all have."""
        for number, ref in self._recording.kept.items():
            if ref() is None:
                makers = zip(self._recording.entries, self._recording.lines, strict=True)
                return next(line for entry, line in makers if number in entry.outputs)
        return None

    def close(self) -> None:
        """Gives the numbers of its programs back. Idempotent."""
        self._master.programs.extend(part.program for part in self._parts)
        self._parts = []

    def __del__(self) -> None:
        self.close()

    def __call__(self, tensors: Sequence[RemoteTensor]) -> Any:
        """Has the workers run the step."""
        recording, master = self._recording, self._master
        for place, calls in self._known:
            if place.calls is not calls:
                master.check(place)
        line = here(2)
        if self._simple:
            assert self._part is not None
            target, program, _, outputs = self._part
            refs = [each._ref if each._ref.target == target else self._view(each._ref, target) for each in tensors]
            made: Any = master.outbox.call(target, line, program, refs, len(outputs))
            found = dict(zip(outputs, [made] if len(outputs) == 1 else made or [], strict=True))
        else:
            found = self._call_parts(tensors, line)
        torch.autograd.graph.increment_version([*self._written, *(tensors[each] for each in self._changed)])
        leaves = [
            other if each is None else make(each.place, each.looks, self._ref(each, found, tensors), each.offset)
            for each, other in zip(recording.returned, recording.leaves, strict=True)
        ]
        return leaves[0] if recording.spec is None else tree_unflatten(leaves, recording.spec)

    def _ref(self, each: _Returned, found: dict[int, Any], tensors: Sequence[RemoteTensor]) -> Any:
        number = each.number
        ref = found.get(number)
        if ref is None:
            ref = tensors[number]._ref if number < self._recording.inputs else self._recording.fixed[number]
        return ref if ref.target == each.place.target else self._view(ref, each.place.target)

    def _view(self, ref: Any, target: int) -> Any:
        return self._master.outbox.view(ref.whole, target)

    def _call_parts(self, tensors: Sequence[RemoteTensor], line: int) -> dict[int, Any]:
        outbox = self._master.outbox
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

    def _divide(self) -> list[_Part]:
        """Tells each worker its part; those with the same part together."""
        master, recording = self._master, self._recording
        ranks_of = {target: place.ranks for target, place in recording.places.items()}
        self._ranks_of = ranks_of
        mine: dict[int, list[int]] = {}
        for index, entry in enumerate(recording.entries):
            for rank in ranks_of[entry.target]:
                mine.setdefault(rank, []).append(index)
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, indices in mine.items():
            together.setdefault(tuple(indices), []).append(rank)
        returned = {each.number for each in recording.returned if each is not None}
        parts = []
        for own, ranks in together.items():
            if not master.programs:
                raise UsageError("capture: there are 4,096 captured steps; drop one by its reset()")
            target, number = master.target(ranks), master.programs.pop()
            ranks_of[target] = tuple(ranks)
            entries = [recording.entries[each] for each in own]
            used = {each for entry in entries for each in entry.inputs}
            made = [each for entry in entries for each in entry.outputs]
            # More than one part: the ids of all results are given, as those of a group's may be made in several.
            outputs = [each for each in made if each in returned and each not in recording.kept]
            inputs = [each for each in range(recording.inputs) if each in used or len(together) == 1]
            program = wire.Program(
                number=number,
                frames=self._frames(own, returned),
                inputs=inputs,
                outputs=outputs,
                fixed={each: ref.id for each, ref in recording.fixed.items() if each in used},
                kept={each: recording.kept[each]().id for each in made if each in recording.kept},
            )
            master.outbox.put(target, wire.pack(program))
            parts.append(_Part(target, number, inputs, outputs))
        return parts

    def _frames(self, indices: Sequence[int], returned: set[int]) -> bytes:
        """The frames of some of the recording's calls, with a FREE behind each last use."""
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
        """The handles whose data a replay changes, and which of the step's arguments are among them.

        Their versions must go up, or a graph that was made before would run backward on data that have changed.
        """
        written: set[int] = set()
        for entry in self._recording.entries:
            op, args, kwargs, _ = self._master.templates[entry.template]
            if not isinstance(op, str):
                written.update(entry.inputs[each] for each in written_by(op, args, kwargs))
            elif OPERATIONS[op.partition("::")[2]][1]:
                written.update(entry.inputs)
        ids = {ref.id for number, ref in self._recording.fixed.items() if number in written}
        found = [
            each
            for each in gc.get_objects()
            if type(each) is RemoteTensor and each._place.master is self._master and each._ref.whole.id in ids
        ]
        return found, sorted(each for each in written if each < self._recording.inputs)


def _is_same(watch: _core.Watch, seen: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # else to read a gradient takes twice as long
        return watch.same(seen)


@dataclass
class _Past:
    """The calls of one kind of arguments since the last replay.

    Attributes:
        watch: what the step could see after the last of them.
        recording: what the last has queued; None where something has changed since.
        calls: how many in a row were recorded.
        changes: before how many in a row something had changed.
        unrecorded: that the step changes what it reads is known: its calls are ordinary ones.
    """

    watch: _core.Watch | None = None
    recording: _Recording | None = None
    calls: int = 0
    changes: int = 0
    unrecorded: bool = False


class Captured(Generic[P, R]):
    """A function whose calls become one command each; see `capture`.

    Attributes:
        recordings: how many recordings it has: one for each kind of arguments, and of what else it reads.
    """

    def __init__(self, function: Callable[P, R], max_recordings: int) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._most = max_recordings
        self._replays: dict[Any, list[_Replay]] = {}  # by key, the last one that was used first
        self._past: dict[Any, _Past] = {}
        self._placed: set[Any] = set()  # keys of arguments whose place in their storage matters, too
        self._reach = Reach()
        self._dropped = 0

    @property
    def recordings(self) -> int:
        return sum(map(len, self._replays.values()))

    def reset(self) -> None:
        """Forgets what is recorded: the next calls are recorded anew."""
        for replays in self._replays.values():
            for each in replays:
                each.close()
        self._replays.clear()
        self._past.clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key: Any = None
        tensors: Sequence[Any] = args
        seen: Any = self._function
        if not kwargs:
            key = _key_of(args)
        if key is None:
            key, tensors, seen = self._key(args, kwargs)
        if placed := key in self._placed:
            key = (key, tuple([each._off for each in tensors]))
        for replay in self._replays.get(key, ()):
            if not _is_same(replay.watch, seen):
                continue
            if replay._master.recorder is not None:
                replay._master.recorder.refuse(f"{self._name}, which is captured itself, is called", True)
            dropped = replay.dropped()
            if dropped is None and not replay.stale:
                if replay is not self._replays[key][0]:
                    self._replays[key].remove(replay)
                    self._replays[key].insert(0, replay)
                return replay(tensors)  # type: ignore[no-any-return]
            replay.stale = True
            if dropped is not None:
                self._dropped += 1
                if self._dropped > _FORGIVEN:
                    self._drop_stale(key)
                    raise UsageError(
                        f"capture: {self._name} leaves a tensor behind that is dropped before the next call, made at"
                        f" {line_of(dropped)}. A replay does not make Python's objects anew. Do within the step all"
                        " that uses what it leaves"
                    )
            break
        for replay in self._replays.get(key, ()):
            # A tensor that is no longer where it was is not held here.
            replay.stale |= any(isinstance(each[1], torch.Tensor) for each in replay.watch.changes(seen))
        self._drop_stale(key)
        return self._call_unreplayed(key, placed, tensors, seen, args, kwargs)

    def _drop_stale(self, key: Any) -> None:
        for each in [each for each in self._replays.get(key, ()) if each.stale]:
            each.close()
            self._replays[key].remove(each)
        if not self._replays.get(key, True):
            del self._replays[key]

    def _key(self, args: Any, kwargs: Any) -> tuple[Any, list[RemoteTensor], Any]:
        """What arguments have in common with those of other calls, the tensors in them, and what the step can see."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, RemoteTensor)]
        parts: list[Any] = [spec, *_state(tensors)]
        seen: list[Any] = [self._function]
        first: dict[int, int] = {}
        for each in leaves:
            if isinstance(each, RemoteTensor):
                number = first.setdefault(each._ref.whole.id, len(first))
                parts.append((each._sig, each._place, each.requires_grad, number))
            elif isinstance(each, torch.Tensor):
                raise UsageError(
                    f"capture: {self._name} is given a tensor of the master's; send it first, with .to() or scatter()"
                )
            elif isinstance(each, float):  # of which some compare equal that differ
                parts.append((type(each), each.hex()))
            else:
                parts.append((type(each), each))
                if not isinstance(each, int | str | None):
                    seen.append(each)
        try:
            hash(key := tuple(parts))
        except TypeError as error:
            raise UsageError(
                f"capture: {self._name} is given what cannot be compared from call to call: {error}"
            ) from None
        return key, tensors, seen if len(seen) > 1 else self._function

    def _call_unreplayed(
        self, key: Any, placed: bool, tensors: Sequence[RemoteTensor], seen: Any, args: Any, kwargs: Any
    ) -> R:
        past = self._past.get(key)
        if past is None:
            if key not in self._replays and len(self._replays.keys() | self._past.keys()) >= self._most:
                raise UsageError(
                    f"capture: {self._name} is called with more than {self._most} kinds of arguments (shapes, dtypes,"
                    " workers, other values). Pad shapes to a few, give a number that changes as a tensor on the"
                    " worker, or raise max_recordings="
                )
            past = self._past[key] = _Past()
        if past.unrecorded:
            return self._function(*args, **kwargs)
        if past.watch is None or past.watch.same(seen):
            return self._record(key, past, placed, tensors, seen, args, kwargs)
        changes = past.watch.changes(seen)
        past.recording, past.calls, past.changes = None, 0, past.changes + 1
        if past.changes == _PATIENCE:
            self._warn(f"{_described(changes)} changes before each call", 4)
        try:
            return self._function(*args, **kwargs)
        finally:
            past.watch = self._reach.watch(seen)

    def _warn(self, why: str, depth: int) -> None:
        warnings.warn(
            f"capture: {self._name} is not replayed, as {why}: its calls take as long as without capture.\n"
            "  What changes can be a tensor on the worker, as lr=torch.tensor(0.1, device=...), and a counter can be"
            " outside of the step.\n  torch.optim's Adam and others count there with fused=True or capturable=True."
            " optimizer.step() and zero_grad() belong into the step",
            stacklevel=depth,
        )

    def _record(
        self, key: Any, past: _Past, placed: bool, tensors: Sequence[RemoteTensor], seen: Any, args: Any, kwargs: Any
    ) -> R:
        master = _master_of(tensors)
        if master.recorder is not None:
            master.recorder.refuse(f"{self._name}, which is captured itself, is called", True)
        watch = past.watch or self._reach.watch(seen)
        drawn = random_state()
        with _Recorder(master, self._name, tensors) as recorder:
            result = self._function(*args, **kwargs)
            recording = recorder.recording
            self._take_result(recorder, result)
        gc.collect()  # handles that only a cycle holds do not outlive the step
        returned = {each.number for each in recording.returned if each is not None}
        for number, made in recording.made.items():
            if made() is not None and number not in returned:
                recording.kept[number] = made
        why = self._changed(recording, watch.changes(seen), drawn)
        before, past.changes = past.recording, 0
        if not watch.same(seen):
            watch = self._reach.watch(seen)
        if not placed and recording.is_placed(master):
            self._placed.add(key)
            del self._past[key]
            key = (key, tuple([each._off for each in tensors]))
            past = self._past.setdefault(key, past)
        settled = before is not None and not before.unsettled and not recording.unsettled and not why
        if settled and before is not None and before.same(recording):
            del self._past[key]
            replays = self._replays.setdefault(key, [])
            replays.insert(0, _Replay(master, recording, watch))
            for each in replays[self._most :]:
                each.close()
            del replays[self._most :]
            return result
        past.recording, past.watch, past.calls = recording, watch, past.calls + 1
        if past.calls >= _ATTEMPTS and why:
            past.unrecorded = True
            past.recording = past.watch = None
            self._warn(why, 4)
        elif past.calls >= _ATTEMPTS:
            del self._past[key]
            assert before is not None
            raise UsageError(f"capture: {self._name} does not repeat itself: {_difference(master, before, recording)}")
        return result

    def _changed(self, recording: _Recording, changes: list[tuple[str, Any, Any]], drawn: Any) -> str:
        """What a call has changed of what it reads, in words: a replay would not. "" where nothing."""
        if self._reach.iterators:
            return f"it can see the iterator {self._reach.iterators[0]}, and none can tell what that gives next"
        made = {id(each()) for each in recording.made.values()}

        def is_made(found: Any) -> bool:
            ref = found._ref if isinstance(found, RemoteTensor) else found
            return type(ref) is _core.Ref and id(ref.whole) in made

        # A tensor of which the step makes another each time is that of the last recording, and replays write to it.
        changes = [each for each in changes if each[1] is None or not is_made(each[2])]

        if changes:
            return f"it changes {_described(changes)} at each call"
        return "" if drawn == random_state() else "it draws random numbers of the master's at each call"

    def _take_result(self, recorder: _Recorder, result: Any) -> None:
        recording = recorder.recording
        leaves, recording.spec = ([result], None) if isinstance(result, RemoteTensor) else tree_flatten(result)
        for each in leaves:
            if isinstance(each, RemoteTensor):
                if each.requires_grad:
                    raise UsageError(
                        f"capture: {self._name} returns a tensor that autograd goes on from, which a replay cannot"
                        " give: return it with .detach()"
                    )
                recording.returned.append(_Returned(recorder.number_of(each), each._place, each._sig, each._off))
                recording.leaves.append(None)
            elif isinstance(each, torch.Tensor):
                raise UsageError(f"capture: {self._name} returns a tensor of the master's, which a replay cannot give")
            else:
                recording.returned.append(None)
                recording.leaves.append(each)


def _key_of(args: Sequence[Any]) -> Any:
    """The key of arguments that are different tensors on workers; None for others."""
    if not all(type(each) is RemoteTensor for each in args):
        return None
    key: list[Any] = _state(args)
    ids = set()
    for each in args:
        if each.requires_grad:
            return None
        key.append(each._sig)
        key.append(each._place)
        ids.add(each._ref.whole.id)
    return tuple(key) if len(ids) == len(args) else None


def _master_of(tensors: Sequence[RemoteTensor]) -> Master:
    if tensors:
        return tensors[0]._place.master
    from allranks.remote.start import master_of_this_process

    return master_of_this_process()


def _state(tensors: Sequence[RemoteTensor]) -> list[Any]:
    """What of torch's state a recording depends on: its flags, what `torch.autocast` casts to, what autograd follows,
    and where factories make tensors."""
    dtype = torch.get_autocast_dtype("worker") if torch.is_autocast_enabled("worker") else None
    modes = None
    if torch._C._len_torch_function_stack():
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        modes = tuple([(type(each), getattr(each, "device", None)) for each in stack])
    return [
        _master_of(tensors).state, dtype, modes, handles._current[0],
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
    ]  # fmt: skip


_SHORT = 60


def _described(changes: list[tuple[str, Any, Any]]) -> str:
    """One of several changes, in words: of a number, if one is among them."""
    numbers = [each for each in changes if isinstance(each[1], int | float | str) and type(each[2]) is type(each[1])]
    path, before, after = (numbers or changes)[0]
    told = f" ({before!r}, then {after!r})"
    told = told if numbers and len(told) < _SHORT and not path.endswith("_version") else ""
    path = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path)
    return re.sub(r"\.(?:_ref|_version)$", "", path) + told


def _difference(master: Master, before: _Recording, after: _Recording) -> str:
    """The first difference between two calls, in words."""
    if after.unsettled or before.unsettled:
        return f"{after.unsettled or before.unsettled}, at each call"

    def name(recording: _Recording, at: int) -> str:
        op = master.templates[recording.entries[at].template][0]
        line = line_of(recording.lines[at])
        return f"{op if isinstance(op, str) else op.name()}{f' at {line}' if line else ''}"

    for at, (old, new) in enumerate(zip(before.entries, after.entries, strict=False)):
        if old == new:
            continue
        if old.template == new.template and old.inputs == new.inputs and old.values != new.values:
            numbers = [_numbers(master, each) for each in (old, new)]
            return (
                f"a number that the master computes is {numbers[0]} and then {numbers[1]} in {name(after, at)}.\n"
                "  It comes of what cannot be seen from the step, as a clock or a file: pass it as a tensor"
            )
        if old.template == new.template:
            return (
                f"{name(after, at)} has other operands than the time before: tensors are made anew outside of the step"
            )
        return (
            f"operation {at} was {name(before, at)} and is then {name(after, at)}"
            f"{' of other shapes or constants' if name(before, at) == name(after, at) else ''}"
        )
    if len(before.entries) != len(after.entries):
        return f"it had {len(before.entries)} operations and then {len(after.entries)}"
    return "what it works on, leaves behind or returns is another tensor, or of another kind, each time"


def _numbers(master: Master, entry: _Entry) -> str:
    pack = master.templates[entry.template][3].pack
    codes = pack.__self__.format  # type: ignore[attr-defined]
    return ", ".join(f"{each:.6g}" for each in struct.unpack(codes, entry.values or b""))


def capture(function: Callable[P, R] | None = None, *, max_recordings: int = 8) -> Any:
    """Makes each call of a training step one small command for the workers (master-worker mode).

    The step's first calls run as they are; as soon as two in a row have queued the same, all further ones are replays:
    the workers repeat what was recorded, on the tensors that are given, and none of the function's Python runs.

    What that Python reads is compared before each replay: variables that it names and what can be reached from them,
    as ``param_groups``, attributes and flags of modules, hooks, numbers in containers. After a change the step is
    recorded anew. A step that changes itself what it reads (a counter, a list that it appends to), draws random numbers
    of the master's, or reads from an iterator, runs as without capture, and a warning names what it is. A number that
    changes from call to call, as a learning rate, can be a tensor on the worker. What cannot be seen: clocks, files,
    the environment, what objects of extensions hold.

    Args:
        function: takes and returns tensors on workers, in any nesting; other arguments are part of what is recorded.
        max_recordings: for so many kinds of arguments (shapes, dtypes, places, other values) it is recorded, and for so
            many states of what it reads with each.

    Returns:
        The function, captured, with ``recordings`` and ``reset()``; or, with ``function`` left out, a decorator.

    Raises:
        UsageError: when it is called: the step fetches a value, sends tensors of the master's, depends on data for a
            shape, returns what requires grad, or does not repeat itself; says what, and at which line. Or it can see
            more than 200,000 objects.

    Cost:
        on the master some 10 us a call, 20 ns for each value that is compared (some 200 for a network of three layers
        and its optimizer), and 2 bytes and 4 for each tensor given or returned, for each set of workers
        that do the same.

    Example:
        @allranks.capture
        def step(x, y):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
    """
    if function is None:
        return functools.partial(capture, max_recordings=max_recordings)
    if not callable(function):
        raise UsageError(f"capture: expected a function, not {type(function).__name__}")
    if not max_recordings >= 1:
        raise UsageError(f"capture: max_recordings={max_recordings!r}: expected 1 or more")
    return Captured(function, max_recordings)


publish(globals())
