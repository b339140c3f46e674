"""A whole step as one command: recorded, verified, then replayed by the workers without the master's Python.

The first calls of a captured function run normally, and the operations that they queue are recorded. When two calls in
a row have queued the same operations, each worker receives its part as a `RemoteProgram`. (The first call may differ,
because optimizers create their state in it.) From then on a call is one small frame for each set of workers that do the
same.
"""

from __future__ import annotations

import functools
import gc
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten

from allranks import _core
from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks.remote.capture.recording import RecordedResult, Recorder, Recording, difference
from allranks.remote.capture.replay import Replay
from allranks.remote.capture.watch import ReachableValues, random_state
from allranks.remote.master.connections import LostWorkerCalls
from allranks.remote.torch_device.call_site import line_of
from allranks.remote.torch_device.devices import CURRENT
from allranks.remote.torch_device.handle import DeviceTarget, Driver
from allranks.remote.torch_device.tensor import RemoteTensor

__all__ = ["Captured", "capture"]

P = ParamSpec("P")
R = TypeVar("R")

_MAX_RECORDED_CALLS = 4  # calls that may differ before an error states that the step does not repeat
_MAX_CHANGES = 8  # calls in a row after a change, which are not replayed, before a warning
_MAX_OBJECTS = 8  # objects for which the captured method is kept
_MAX_DROPPED_TENSORS = 1  # times that tensors which must outlive the step may be dropped


def _is_same(watch: _core.Watch, watched: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # otherwise reading a gradient takes twice as long
        return watch.same(watched)


@dataclass
class _CallHistory:
    """The calls with one kind of arguments since the last replay.

    Attributes:
        watch: The values that the step could read after the last call.
        recording: The operations that the last call has queued; None if a value has changed since.
        calls: The number of calls in a row that were recorded.
        changes: The number of calls in a row before which a value had changed.
        unrecorded: The step changes values that it reads, so its calls are no longer recorded.
    """

    watch: _core.Watch | None = None
    recording: Recording | None = None
    calls: int = 0
    changes: int = 0
    unrecorded: bool = False


class Captured(Generic[P, R]):
    """A function whose calls become one command each. See `capture`.

    Attributes:
        recordings: The number of recordings: one for each kind of arguments, and of other values that the step reads.
    """

    def __init__(self, function: Callable[P, R], max_recordings: int) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._max_recordings = max_recordings
        self._replays: dict[Any, list[Replay]] = {}  # by key; the first is the last one that was used
        self._histories: dict[Any, _CallHistory] = {}
        self._offset_keys: set[Any] = set()  # keys of arguments whose offset in their storage matters, too
        self._reachable_values = ReachableValues()
        self._dropped = 0
        self._bound: OrderedDict[int, tuple[Any, Captured[..., Any]]] = OrderedDict()  # methods of objects, by id

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Return the captured function itself for a class, and a captured method for an object.

        A method is recorded for each object separately. Only the latest objects are held, because a program may create
        trainers in a loop. If an object is used again later, its method is recorded again.
        """
        if owner is None or not hasattr(self._function, "__get__"):
            return self
        if id(owner) not in self._bound:
            method = self._function.__get__(owner, kind)
            # With the owner, so that its id is not reused.
            self._bound[id(owner)] = owner, Captured(method, self._max_recordings)
            if len(self._bound) > _MAX_OBJECTS:
                self._bound.popitem(last=False)[1][1].reset()
        self._bound.move_to_end(id(owner))
        return self._bound[id(owner)][1]

    @property
    def recordings(self) -> int:
        return sum(map(len, self._replays.values()))

    def reset(self) -> None:
        """Forget all recordings. The next calls are recorded again."""
        for replays in self._replays.values():
            for each in replays:
                each.close()
        self._replays.clear()
        self._histories.clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key: Any = None
        tensors: Sequence[Any] = args
        watched: Any = self._function
        if not kwargs:  # fast path: no `tree_flatten`
            key = _key_of(args)
        if key is None:
            key, tensors, watched = self._key(args, kwargs)
        if uses_offsets := key in self._offset_keys:
            key = (key, tuple([each._off for each in tensors]))
        for replay in self._replays.get(key, ()):
            if not _is_same(replay.watch, watched):
                continue
            if replay.master.connections.recorder is not None:
                replay.master.connections.recorder.refuse(f"the step calls {self._name}, which is also captured", True)
            dropped = replay.dropped()
            if dropped is None and not replay.stale:
                if replay is not self._replays[key][0]:
                    self._replays[key].remove(replay)
                    # The next call compares this replay first, and the last one is dropped at the limit.
                    self._replays[key].insert(0, replay)
                return replay(tensors)  # type: ignore[no-any-return]
            replay.stale = True
            if dropped is not None:
                self._dropped += 1
                if self._dropped > _MAX_DROPPED_TENSORS:
                    self._drop_stale(key)
                    raise UsageError(
                        f"capture: {self._name} keeps a tensor, created at {line_of(dropped)}, that is deleted before"
                        " the next call. A replay does not recreate Python objects.\n  Move all uses of this tensor"
                        " into the step."
                    )
            break
        for replay in self._replays.get(key, ()):
            # A replay whose tensors have been replaced is dropped, so that it does not keep the old tensors alive.
            replay.stale |= any(isinstance(each[1], torch.Tensor) for each in replay.watch.changes(watched))
        self._drop_stale(key)
        return self._call_unreplayed(key, uses_offsets, tensors, watched, args, kwargs)

    def _drop_stale(self, key: Any) -> None:
        for each in [each for each in self._replays.get(key, ()) if each.stale]:
            each.close()
            self._replays[key].remove(each)
        if not self._replays.get(key, True):
            del self._replays[key]

    def _drop_lost(self) -> None:
        """Drop recordings on lost workers. Their replacements are other kinds of arguments."""
        for key in [each for each in self._replays if _is_lost(each)]:
            for replay in self._replays.pop(key):
                replay.close()
        for key in [each for each in self._histories if _is_lost(each)]:
            del self._histories[key]

    def _key(self, args: Any, kwargs: Any) -> tuple[Any, list[RemoteTensor], Any]:
        """Return the key of a call's arguments, their tensors, and the values that the step can read."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, RemoteTensor)]
        parts: list[Any] = [spec, *_state(tensors)]
        watched: list[Any] = [self._function]
        first: dict[int, int] = {}
        for each in leaves:
            if isinstance(each, RemoteTensor):
                number = first.setdefault(each._ref.whole.id, len(first))
                parts.append((each._sig, each._place, each.requires_grad, number))
            elif isinstance(each, torch.Tensor):
                raise UsageError(
                    f"capture: an argument of {self._name} is a tensor of the master.\n"
                    "  Send it to the workers first, with .to() or scatter()."
                )
            elif isinstance(each, float):  # different floats may compare equal, such as 0.0 and -0.0
                parts.append((type(each), each.hex()))
            else:
                parts.append((type(each), each))
                if not isinstance(each, int | str | None):
                    watched.append(each)
        try:
            hash(key := tuple(parts))
        except TypeError as error:
            raise UsageError(
                f"capture: an argument of {self._name} cannot be compared between calls: {error}.\n"
                "  Pass a hashable value, or a tensor on the worker."
            ) from None
        return key, tensors, watched if len(watched) > 1 else self._function

    def _call_unreplayed(
        self, key: Any, uses_offsets: bool, tensors: Sequence[RemoteTensor], watched: Any, args: Any, kwargs: Any
    ) -> R:
        history = self._histories.get(key)
        if history is None:
            # Before the limit is checked: a job that loses many workers must not reach it with keys of lost workers.
            self._drop_lost()
            if key not in self._replays and len(self._replays.keys() | self._histories.keys()) >= self._max_recordings:
                raise UsageError(
                    f"capture: {self._name} was called with more than {self._max_recordings} kinds of arguments"
                    " (shapes, dtypes, workers, other values).\n  Pad tensors to a few shapes, pass a changing number"
                    " as a tensor on the worker, or raise max_recordings=."
                )
            history = self._histories[key] = _CallHistory()
        if history.unrecorded:
            return self._function(*args, **kwargs)
        if history.watch is None or history.watch.same(watched):
            return self._record(key, history, uses_offsets, tensors, watched, args, kwargs)
        changes = history.watch.changes(watched)
        # Calls before and after a change are not comparable, so two further calls must agree.
        history.recording, history.calls, history.changes = None, 0, history.changes + 1
        if history.changes == _MAX_CHANGES:  # not `>=`: one warning is enough
            self._warn(f"{_describe_change(changes)} changes before each call", 4)
        try:
            return self._function(*args, **kwargs)
        finally:
            # After the call, so that only changes between two calls count.
            history.watch = self._reachable_values.watch(watched)

    def _warn(self, why: str, depth: int) -> None:
        warnings.warn(
            f"capture: {self._name} is not replayed, because {why}. Its calls take as long as without capture.\n"
            "  Store a changing value in a tensor on the worker, such as lr=torch.tensor(0.1, device=...), or move a"
            " counter out of the step.\n  Pass fused=True or capturable=True to Adam and other optimizers of"
            " torch.optim, so that they count on the worker.\n  Call optimizer.step() and zero_grad() in the step.",
            stacklevel=depth,
        )

    def _record(
        self,
        key: Any,
        history: _CallHistory,
        uses_offsets: bool,
        tensors: Sequence[RemoteTensor],
        watched: Any,
        args: Any,
        kwargs: Any,
    ) -> R:
        master = _master_of(tensors)
        if master.connections.recorder is not None:
            master.connections.recorder.refuse(f"the step calls {self._name}, which is also captured", True)
        watch = history.watch or self._reachable_values.watch(watched)
        random_before = random_state()
        with Recorder(master, self._name, tensors) as recorder:
            result = self._function(*args, **kwargs)
            recording = recorder.recording
            self._take_result(recorder, result)
        # Frees handles that only a reference cycle keeps alive, so that they do not seem to outlive the step.
        gc.collect()
        returned = {each.number for each in recording.returned if each is not None}
        for number, made in recording.made.items():
            if made() is not None and number not in returned:
                recording.kept[number] = made
        why = self._changed(recording, watch.changes(watched), random_before)
        before, history.changes = history.recording, 0
        if not watch.same(watched):
            watch = self._reachable_values.watch(watched)
        if not uses_offsets and recording.depends_on_offsets(master):
            self._offset_keys.add(key)
            del self._histories[key]
            # The next calls find `_offset_keys` and use this key, so the history of the calls moves to it.
            key = (key, tuple([each._off for each in tensors]))
            history = self._histories.setdefault(key, history)
        settled = before is not None and not before.unreplayable and not recording.unreplayable and not why
        if settled and before is not None and before.same(recording):
            del self._histories[key]
            replays = self._replays.setdefault(key, [])
            replays.insert(0, Replay(master, recording, watch))
            for each in replays[self._max_recordings :]:
                each.close()
            del replays[self._max_recordings :]
            return result
        history.recording, history.watch, history.calls = recording, watch, history.calls + 1
        if history.calls >= _MAX_RECORDED_CALLS and why:
            history.unrecorded = True
            history.recording = history.watch = None
            self._warn(why, 4)
        elif history.calls >= _MAX_RECORDED_CALLS:
            del self._histories[key]
            assert before is not None
            raise UsageError(
                f"capture: {self._name} does not repeat the same operations: {difference(master, before, recording)}"
            )
        return result

    def _changed(self, recording: Recording, changes: list[tuple[str, Any, Any]], random_before: Any) -> str:
        """Describe a change of values that the step reads, which a replay would not make; "" if there is none."""
        if self._reachable_values.iterators:
            return f"it uses the iterator {self._reachable_values.iterators[0]}, whose next value cannot be predicted"
        made = {id(each()) for each in recording.made.values()}

        def is_made(found: Any) -> bool:
            ref = found._ref if isinstance(found, RemoteTensor) else found
            return type(ref) is _core.Ref and id(ref.whole) in made

        # A tensor that the step recreates on each call is the one of the last recording, and replays write to it.
        changes = [each for each in changes if each[1] is None or not is_made(each[2])]

        if changes:
            return f"it changes {_describe_change(changes)} on each call"
        return "" if random_before == random_state() else "it draws random numbers of the master on each call"

    def _take_result(self, recorder: Recorder, result: Any) -> None:
        recording = recorder.recording
        leaves, recording.spec = ([result], None) if isinstance(result, RemoteTensor) else tree_flatten(result)
        for each in leaves:
            if isinstance(each, RemoteTensor):
                if each.requires_grad:
                    raise UsageError(
                        f"capture: {self._name} returns a tensor that requires grad, which a replay cannot return.\n"
                        "  Return it with .detach()."
                    )
                recording.returned.append(RecordedResult(recorder.number_of(each), each._place, each._sig, each._off))
                recording.leaves.append(None)
            elif isinstance(each, torch.Tensor):
                raise UsageError(
                    f"capture: {self._name} returns a tensor of the master, which a replay cannot return.\n"
                    "  Create it outside of the captured step, or on a worker."
                )
            else:
                recording.returned.append(None)
                recording.leaves.append(each)


def _key_of(args: Sequence[Any]) -> Any:
    """Return the key of arguments that are different tensors on workers, or None for other arguments."""
    if not all(type(each) is RemoteTensor for each in args):
        return None
    key: list[Any] = _state(args)
    ids = set()
    for each in args:
        if each.requires_grad:  # `_key` adds this to the key
            return None
        key.append(each._sig)
        key.append(each._place)
        ids.add(each._ref.whole.id)
    return tuple(key) if len(ids) == len(args) else None


def _master_of(tensors: Sequence[RemoteTensor]) -> Driver:
    if tensors:
        return tensors[0]._place.master
    from allranks.remote.master.start import master_of_this_process

    return master_of_this_process()


def _state(tensors: Sequence[RemoteTensor]) -> list[Any]:
    """Return the state of torch that a recording depends on.

    It contains torch's flags, the dtype of `torch.autocast`, the modes of autograd, and the device of factories.
    """
    dtype = torch.get_autocast_dtype("worker") if torch.is_autocast_enabled("worker") else None
    modes = None
    if torch._C._len_torch_function_stack():
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        modes = tuple([(type(each), getattr(each, "device", None)) for each in stack])
    return [
        _master_of(tensors).connections.state, dtype, modes, CURRENT[0],
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
    ]  # fmt: skip


_SHORT = 60


def _describe_change(changes: list[tuple[str, Any, Any]]) -> str:
    """Describe one of several changes. A number is preferred."""
    numbers = [each for each in changes if isinstance(each[1], int | float | str) and type(each[2]) is type(each[1])]
    path, before, after = (numbers or changes)[0]
    values_text = f" ({before!r}, then {after!r})"
    values_text = values_text if numbers and len(values_text) < _SHORT and not path.endswith("_version") else ""
    path = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path)
    return re.sub(r"\.(?:_ref|_version)$", "", path) + values_text


def _is_lost(key: Any) -> bool:
    """Return whether a key contains a target with a worker that is lost or has been replaced."""
    if isinstance(key, tuple):
        return any(map(_is_lost, key))
    return isinstance(key, DeviceTarget) and isinstance(key.calls, LostWorkerCalls)


def capture(function: Callable[P, R] | None = None, *, max_recordings: int = 8) -> Any:
    """Make each call of a training step one small command for the workers (master-worker mode).

    The step's first calls run normally. When two in a row have queued the same operations, all further calls are
    replays: the workers repeat the recorded operations on the tensors of the call, and the function's Python code does
    not run.

    The values that this Python code reads are compared before each replay. These are the variables that it names and
    the values that can be reached from them: ``param_groups``, attributes and flags of modules, hooks, numbers in
    containers. After a change the step is recorded again. Some steps run without capture, and a warning names the
    reason: a step that changes values that it reads (a counter, a list that it appends to), draws random numbers of the
    master, or reads from an iterator. A number that changes from call to call, such as a learning rate, can be a tensor
    on the worker. Changes of clocks, files, the environment, and the contents of extension objects are not detected.

    Args:
        function: A function that takes and returns tensors on workers, in any nesting. Other arguments are part of the
            recording.
        max_recordings: The maximum number of kinds of arguments (shapes, dtypes, places, other values) that are
            recorded, and of states of the values that the step reads for each kind.

    Returns:
        The captured function, with ``recordings`` and ``reset()``. Without ``function``, a decorator.

    Raises:
        UsageError: Raised by a call: the step fetches a value, sends tensors of the master, has a shape that depends on
            data, returns a tensor that requires grad, or does not repeat itself. The message contains the reason and
            the line. Also raised if the step can read more than 200,000 objects.

    Cost:
        On the master about 10 us per call, and 20 ns for each value that is compared (about 200 values for a network of
        three layers and its optimizer). 2 bytes, and 4 for each tensor passed or returned, for each set of workers that
        do the same.

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
