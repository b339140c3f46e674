"""Traversal of the objects that can be reached from a value: contents of a State's parts, and of variables.

The same traversal serves three purposes. It finds the tensors and containers that must be restored when a step is
undone, the values that a replacement process must receive, and the objects that a step changes although State does not
cover them.

It stops at objects whose state a training cannot depend on (classes, modules, functions, open files, locks, threads).
It also stops at objects of foreign packages, whose attributes allranks must not copy. `Boundary` defines both limits.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from allranks._call.digests import PLAIN
from allranks._plugin.adapt import TORCHS_DDP
from allranks.parallel.ddp import DistributedDataParallel

__all__ = [
    "WRAPPERS",
    "Boundary",
    "Reached",
    "is_array",
    "is_generator",
    "is_user_module",
    "reach",
]

WRAPPERS: tuple[Any, ...] = (*TORCHS_DDP, DistributedDataParallel)
"""Types of modules that synchronize the gradients of another module: torch's and allranks's."""

_MOST = 200_000  # objects: the traversal of a larger graph would take more than 0.5 s
_LONG = 10_000  # elements: a longer container, such as a data set in a list, is not traversed

# Packages whose objects only report. A training does not depend on their state.
_REPORTING = frozenset(
    {
        "tqdm",
        "rich",
        "logging",
        "tensorboard",
        "tensorboardX",
        "wandb",
        "mlflow",
        "aim",
        "comet_ml",
        "neptune",
        "psutil",
    }
)
_OPAQUE = (
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.BuiltinFunctionType,
    types.TracebackType,
    torch.device,
    torch.dtype,
    weakref.ref,
)
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_array(value: object) -> bool:
    """Return whether a value is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_generator(value: object) -> bool:
    """Return whether a value is a random number generator that a program has created."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


@functools.cache
def is_user_module(name: str) -> bool:
    """Return whether a module belongs to the program: not to a library, the standard library, or this package."""
    if name == "__main__":
        return True
    if not name:
        return False
    if name.partition(".")[0] in {"allranks", "torch", "numpy"} or name in sys.builtin_module_names:
        return False
    if name not in sys.modules:
        return True  # its functions were pickled by value, as cloudpickle does
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and not file.startswith(_LIBRARIES) and "-packages/" not in file


class Boundary:
    """The objects that the traversal enters.

    Args:
        skip: Objects that are left out, by identity.
        roots: The parts of a State. The traversal enters objects of the packages of their classes although these are
            foreign.
    """

    def __init__(self, skip: Iterable[object] = (), roots: Iterable[object] = ()) -> None:
        self._skipped = list(skip)  # keeps the objects alive, so that no new object gets the id of one of them
        self.skip = {id(value) for value in self._skipped}
        self._packages = {_package(type(root)) for root in roots} - {"allranks"}

    def enters(self, value: object) -> bool:
        """Return whether the traversal visits the attributes of an object."""
        kind = type(value)
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            return True
        if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            return False
        package = _package(kind)
        if package in _REPORTING or package == "allranks":
            return False
        if kind.__module__.startswith("torch."):
            return hasattr(value, "load_state_dict") or isinstance(value, torch.optim.lr_scheduler.LRScheduler)
        return is_user_module(kind.__module__) or package in self._packages


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@dataclass
class Reached:
    """The objects that a traversal has found, by path.

    Attributes:
        tensors: Leaves, which are not results of a computation graph. Only these survive a step.
        arrays: NumPy arrays.
        generators: Random number generators.
        containers: Dicts, lists, sets, deques, and the attribute dicts of objects. They contain the plain values.
        iterators: Objects with a position that cannot be read.
        wrappers: DistributedDataParallel objects, torch's and allranks's. Only the wrapped module is traversed.
        owners: The object of each attribute dict.
        unvisited: Containers with more than 10,000 elements, which the traversal does not enter. If there are more than
            200,000 objects, also the first object beyond this number.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    iterators: dict[str, Any] = field(default_factory=dict)
    wrappers: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    unvisited: dict[str, Any] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _alive: list[Any] = field(default_factory=list)  # so that no id is reused during the traversal


def reach(
    roots: Mapping[str, Any],
    boundary: Boundary,
    *,
    closures: bool = False,
    name_of: Callable[[Tensor], str | None] = lambda tensor: None,
    into: Reached | None = None,
) -> Reached:
    """Traverse everything that can be reached from some values, breadth first, each object once.

    Args:
        roots: The values by name.
        boundary: The limits of the traversal.
        closures: Also enter the closures of the program's functions.
        name_of: Returns the name of a tensor that is a key of a dict. The state of an optimizer has parameters as keys.
        into: An earlier result to extend.

    Returns:
        The objects by path: ``model.fc.weight``, ``history['lines']``.

    Cost:
        about 1 us for each object.
    """
    found = Reached() if into is None else into
    # Breadth first: the path of an object in error messages is then its shortest one.
    queue: collections.deque[tuple[str, Any]] = collections.deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if type(value) in PLAIN or id(value) in found._seen or id(value) in boundary.skip:
            continue
        if len(found._seen) >= _MOST:
            found.unvisited[path] = value
            break
        found._seen.add(id(value))
        found._alive.append(value)
        if isinstance(value, Tensor):
            if value.is_leaf:
                found.tensors[path] = value
        elif isinstance(value, (dict, list, set, collections.deque)):
            found.containers[path] = value
            _visit_items(path, value, found, queue, name_of)
        elif isinstance(value, tuple):
            _visit_items(path, value, found, queue, name_of)
        elif is_array(value):
            found.arrays[path] = value
        elif is_generator(value):
            found.generators[path] = value
        elif isinstance(value, types.FunctionType):
            if closures and is_user_module(value.__module__ or ""):
                cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                queue.extend((f"{path}.{name}", _cell(cell)) for name, cell in cells)
        elif isinstance(value, types.MethodType):
            queue.append((path.rpartition(".")[0], value.__self__))
        elif isinstance(value, functools.partial):
            queue.extend(_items(path, value.args, name_of))
            queue.extend(_items(path, value.keywords, name_of))
        elif isinstance(value, _OPAQUE):
            continue
        elif isinstance(value, WRAPPERS):
            # A replacement process may have another wrapper, so names must not contain it.
            found.wrappers[path] = value
            queue.append((path, value.module))
        # A file object has __next__ as well, but its position does not belong to the training.
        elif hasattr(type(value), "__next__") and not hasattr(value, "read"):
            found.iterators[path] = value
        elif boundary.enters(value):
            _enter(path, value, found, queue)
    return found


def _enter(path: str, value: Any, found: Reached, queue: collections.deque[tuple[str, Any]]) -> None:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        found.containers[path] = attributes
        found.owners[path] = value
        found._seen.add(id(attributes))
        for name, each in attributes.items():
            # The tensors and submodules of a module get the names that programs use for them.
            if name in ("_parameters", "_buffers", "_modules") and isinstance(each, dict):
                found.containers[f"{path}.{name}"] = each
                found._seen.add(id(each))
                queue.extend((f"{path}.{key}", inner) for key, inner in each.items())
            elif not (name.endswith("_hooks") or "_hooks_" in name):
                queue.append((f"{path}.{name}", each))
    for kind in type(value).__mro__:
        for name in _slots(kind):
            if hasattr(value, name):
                queue.append((f"{path}.{name}", getattr(value, name)))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (
        (slots,) if isinstance(slots, str) else tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
    )


def _visit_items(
    path: str,
    value: Any,
    found: Reached,
    queue: collections.deque[tuple[str, Any]],
    name_of: Callable[[Tensor], str | None],
) -> None:
    if len(value) > _LONG:
        found.unvisited[path] = value
    else:
        queue.extend(_items(path, value, name_of))


def _items(path: str, value: Any, name_of: Callable[[Tensor], str | None]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            label = (
                name_of(key) or "?" if isinstance(key, Tensor) else repr(key) if type(key) in PLAIN else str(type(key))
            )
            yield f"{path}[{label}]", each
        return
    # A list of plain values has nothing to traverse. The container itself is recorded.
    if isinstance(value, (list, tuple)) and PLAIN.issuperset(map(type, value)):
        return
    for number, each in enumerate(value):
        yield f"{path}[{number}]", each


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
