"""Detects, in the first steps, state of the training that State does not cover.

A program may change only three kinds of objects from one step to the next: parts of the State, variables of the loop
that State carries, and objects that it has declared as ``local``. A repeated step would change anything else twice, and
a process that replaces a lost rank would lack it. The training would then produce other weights without any error. The
audit therefore raises an error in the first steps, which names the variable and the line to add.

The audit finds objects from the variables of the functions that run the loop and from the globals of the program's
modules. Values that only one step uses do not count: variables that each step assigns again, and objects that it
creates.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from allranks._call.digests import PLAIN, digest
from allranks._elastic.training import variables
from allranks._elastic.training.coverage import plain_values
from allranks._elastic.training.reachable import Boundary, Reached, is_user_module, reach

__all__ = ["Audit", "loop_frame", "program_frames", "surroundings"]

_LARGE = 64 << 20  # bytes: the content of larger arrays and tensors is not compared, only a tensor's version


def loop_frame() -> FrameType:
    """Return the frame of the function that runs the loop: the innermost frame on the stack of the program's own code.

    If the program is installed as a package, this is the innermost frame outside allranks, torch, contextlib and tqdm.
    """
    frame: FrameType | None = sys._getframe(1)
    outside: FrameType | None = None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_user_module(name):
            return frame
        if outside is None and name.partition(".")[0] not in {"allranks", "torch", "contextlib", "tqdm"}:
            outside = frame
        frame = frame.f_back
    assert outside is not None
    return outside


def program_frames(frame: FrameType) -> list[FrameType]:
    """Return a frame, followed by the frames of its callers that are the program's own code."""
    found, outer = [frame], frame.f_back
    while outer is not None:
        if is_user_module(outer.f_globals.get("__name__", "")):
            found.append(outer)
        outer = outer.f_back
    return found


def _roots(frames: Sequence[FrameType]) -> dict[str, Any]:
    """Return the variables of the functions that run the loop, then the globals of the program's modules."""
    found: dict[str, Any] = {}
    for each in frames:
        if each.f_locals is not each.f_globals:
            for name, value in each.f_locals.items():
                if found.setdefault(name, value) is not value:  # each method has its own self
                    found.setdefault(f"{name} of {each.f_code.co_name}()", value)
    for name in sorted(sys.modules):
        if is_user_module(name):
            prefix = "" if name == "__main__" else f"{name}."
            # A copy, because another thread may assign in the module during the loop.
            values = list(vars(sys.modules[name]).items())
            for key, value in values:
                if not key.startswith("__"):
                    found.setdefault(prefix + key, value)
    return found


def surroundings(frame: FrameType, local: Sequence[Any]) -> Reached:
    """Find everything that the variables of a program reference."""
    return reach(
        _roots(program_frames(frame)),
        Boundary(skip=[each for each in local if not isinstance(each, str)]),
        closures=True,
    )


class Audit:
    """A record of the values of a program's variables at the start of a step.

    Args:
        frames: Frames of the function that runs the loop, and of its callers. While a step runs, the first frame may be
            a generator that has yielded the step. A suspended generator has no reference to its caller.
        covered: Objects that State covers, and their contents.
        local: Names and objects that the program has declared as local.
    """

    def __init__(self, frames: Sequence[FrameType], covered: Sequence[Any], local: Sequence[Any]) -> None:
        self._covered = covered
        self._local = [each for each in local if not isinstance(each, str)]
        self._names = {each for each in local if isinstance(each, str)}
        reached = self._reach(frames)
        self._reached = reached  # keeps the objects alive, so that no new object gets the id of one of them
        self._values = {id(value): _detect(value) for value in _values(reached)}
        found = variables.LoopVariables(frames)
        self._carried = found.read(found.assigned)
        self._plain = _plain_values(frames)

    def _reach(self, frames: Sequence[FrameType]) -> Reached:
        skip = [
            *self._covered,
            *self._local,
            # State restores the position in the data itself, so the position of a loader or sampler may change.
            *(v for v in _roots(frames).values() if isinstance(v, (DataLoader, Sampler))),
        ]
        return reach(_roots(frames), Boundary(skip=skip), closures=True)

    def around(self, frames: Sequence[FrameType]) -> dict[str, int]:
        """Return hashes of the tensors, arrays and plain values that are not covered, by path."""
        reached = self._reach(frames)
        found = {path: digest(t) for path, t in reached.tensors.items() if t.nbytes <= _LARGE and not t.is_meta}
        found |= {path: digest(array) for path, array in reached.arrays.items() if array.nbytes <= _LARGE}
        found |= {path: digest(plain_values(container)) for path, container in reached.containers.items()}
        # A variable that the loop assigns references another object in each step.
        skip = self._names | variables.LoopVariables(frames).rebound
        return {path: value for path, value in found.items() if _root(path) not in skip}

    def complaints(self, frames: Sequence[FrameType], step: object) -> list[str]:
        """Return a sentence for the user about each uncovered object that has changed since the start of the step."""
        reached = self._reach(frames)
        roots, sentences = _roots(frames), dict[str, str]()
        for path, value in _paths(reached):
            before = self._values.get(id(value))
            key, name = _first(path), _root(path)
            # An object that did not exist at the start of the step belongs to this step only.
            if before is None or name in self._names or path in self._names or key in sentences:
                continue
            after = _detect(value)
            if before != after:
                sentences[key] = _sentence(path, roots.get(key), value, before, after, reached)
        found = [*sentences.values(), *self._plain_changes(frames), *self._rebound(frames, step)]
        counter = variables.miscounted(frames[0], step)
        if counter is not None and counter not in self._names:
            found.append(
                f"{counter} is counted by the loop around State.steps(), and begins at 0 in a process that replaces a"
                f" lost rank.\n  Write `for step in state.steps(...)` and use step.index instead of {counter}."
            )
        return found

    def _plain_changes(self, frames: Sequence[FrameType]) -> Iterator[str]:
        """Yield complaints about plain values of globals that functions other than the loop's function assign."""
        now = _plain_values(frames)
        for name in sorted(now.keys() & self._plain.keys()):
            if now[name] != self._plain[name] and name not in self._names:
                yield (
                    f"{name} is a global variable that functions assign, but it is not part of the State.\n"
                    f"  Keep it in a dict: State(counts={{{name!r}: 0}}); or, if the training does not depend on it,"
                    f' declare it: State(local=["{name}"]).'
                )

    def _rebound(self, frames: Sequence[FrameType], step: object) -> Iterator[str]:
        """Yield complaints about variables that a step reads and assigns, if State cannot send their values."""
        skip = {id(each) for each in (*self._covered, *self._local)}
        found = variables.LoopVariables(frames)
        now = found.read(found.assigned)
        for key, value in now.items():
            name = key.rpartition(".")[2]
            if name in self._names or key not in self._carried or value is self._carried[key]:
                continue
            if variables.can_be_carried(value) or value is step or id(value) in skip:
                continue
            if type(value).__module__.startswith("allranks."):
                continue
            yield (
                f"{name} is assigned in the loop (line {found.line(key)}) and read by the next step. It"
                f" is a {type(value).__name__}, which State cannot restore.\n  Keep it in a part: State({name}=...),"
                f" and change the part in place; or, if the training does not depend on it, declare it:"
                f' State(local=["{name}"]).'
            )


def _plain_values(frames: Sequence[FrameType]) -> dict[str, Any]:
    """Return the plain values of globals that functions assign, without those that the module's own code assigns."""
    running = {id(each.f_locals): variables.assigned_by(each.f_code) for each in frames}
    own = variables.assigned_by(frames[0].f_code)
    found: dict[str, Any] = {}
    for name in sorted(sys.modules):
        if is_user_module(name):
            values = vars(sys.modules[name])
            skip = running.get(id(values), set()) | (own if values is frames[0].f_globals else set())
            prefix = "" if name == "__main__" else f"{name}."
            found |= {
                prefix + key: value
                for key, value in values.items()
                if type(value) in PLAIN and not key.startswith("__") and key not in skip
            }
    return found


def _first(path: str) -> str:
    """Return the key of ``_roots`` at the start of a path."""
    return path.split(".", 1)[0].split("[", 1)[0]


def _root(path: str) -> str:
    """Return the variable at the start of a path."""
    return _first(path).partition(" of ")[0]


def _paths(reached: Reached) -> Iterator[tuple[str, Any]]:
    yield from reached.tensors.items()
    yield from reached.arrays.items()
    yield from reached.iterators.items()
    yield from reached.containers.items()


def _values(reached: Reached) -> Iterator[Any]:
    return (value for _, value in _paths(reached))


def _detect(value: Any) -> Any:
    """Return a value that differs if the object has changed."""
    if isinstance(value, Tensor):
        # Inference tensors have no version counter.
        if value.nbytes > _LARGE or value.is_meta:
            return 0 if value.is_inference() else value._version
        return digest(value)
    if hasattr(value, "__array_interface__"):
        return digest(value) if value.nbytes <= _LARGE else 0
    if isinstance(value, dict):
        return {_key(key): _token(each) for key, each in list(value.items())}
    if isinstance(value, (list, deque)):
        # Only the length of longer lists is compared, which limits the cost of a learning step.
        return len(value), tuple(map(_token, value)) if len(value) <= 10_000 else ()
    if isinstance(value, set):
        return len(value), hash(frozenset(map(_key, value)))
    return _progress(value)


def _key(value: Any) -> Any:
    return value if type(value) in PLAIN else (type(value).__name__, id(value))


def _token(value: Any) -> Any:
    """Return a plain value, or the id of an object. An object that each step recreates gets a constant instead."""
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_token, value))
    # A program may recreate a lambda or bound method in each step, with another id but the same meaning.
    if callable(value) and not isinstance(value, nn.Module):
        return "callable"
    if isinstance(value, Tensor) and not value.is_leaf:
        return "result"
    return id(value)


def _progress(iterator: Any) -> Any:
    """Return the position of an iterator, if it can be determined."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        return frame.f_lasti, {name: _token(value) for name, value in frame.f_locals.items()}
    known = getattr(iterator, "__dict__", {})
    # The iterators of torch's DataLoader count their batches in this attribute.
    if "_num_yielded" in known:
        return known["_num_yielded"]
    try:
        return iterator.__length_hint__()
    except Exception:  # noqa: BLE001 - an iterator without a length cannot be compared
        return {name: _token(value) for name, value in known.items()}


def _sentence(path: str, root: Any, value: Any, before: Any, after: Any, reached: Reached) -> str:
    name, owner = _root(path), reached.owners.get(path)
    path = name + path[len(_first(path)) :]
    if hasattr(type(value), "__next__") and not isinstance(value, (dict, list)):
        return (
            f"{path} is an iterator that a step advances. State cannot transfer its position.\n  Pass it to"
            " State.steps(), as zip(loader, other); or, if the training does not depend on it, declare it:"
            f' State(local=["{name}"]).'
        )
    what = f"a {type(value if owner is None else owner).__name__}"
    if isinstance(value, dict):
        changed = sorted(str(key) for key in before.keys() | after.keys() if before.get(key, "") != after.get(key, ""))
        names = ", ".join(changed[:3]) + (" and others" if len(changed) > 3 else "")
        what += f"; changed {'attributes' if owner is not None else 'keys'}: {names}"
    whole = hasattr(root, "load_state_dict") or (owner is not None and owner is not root and owner is not value)
    target = name if whole and hasattr(root, "load_state_dict") else path
    part, declared = name, f'"{name}"'
    if name == "self" and not isinstance(root, type(None)):
        # The user adds the line inside a method, so the text names an attribute of self that can be passed there.
        attribute = path.split(".")[1].split("[")[0] if "." in path else ""
        part, target = (attribute, f"self.{attribute}") if attribute else (type(root).__name__.lower(), "self")
        declared = target
    elif "[" in target:
        target = name
    return (
        f"{path} ({what}) is changed by the loop, but is not part of the State.\n  Add it: State({part}={target}, ...);"
        f" or, if the training does not depend on it, declare it: State(local=[{declared}])."
    )
