"""Filling a state in three steps, so that a foreseeable failure changes nothing.

First, the state is compared with the tree of the checkpoint, and all required files are opened. Second, the values that
are not tensors are built from the checkpoint. Third, the tensors of the state are read in place, and the other values
are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks.checkpoint.manifest import Saved
from allranks.checkpoint.part_descriptions import local_part
from allranks.checkpoint.values import Shard, Tree, bare, has_state, tensors_in

__all__ = ["StateRestorer", "StateSource"]


class StateSource(Protocol):
    """Source from which a state is filled; see ``loading.BlockReader``."""

    def build(self, tree: Tree, like: Mapping[str, Any] | None = None) -> Any: ...
    def find(self, name: object) -> Saved: ...
    @property
    def where(self) -> str: ...
    def open_for(self, saved: Saved, target: Tensor | Shard | None) -> None: ...
    def read(self, saved: Saved, into: Tensor | Shard) -> None: ...


class _BuiltValue:
    """A value that is built from the checkpoint, and does not reuse the memory of an existing one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.value: Any = None

    def __call__(self) -> Any:
        return self.value


class StateRestorer:
    """A state that is being filled. The constructor compares it and opens files; call ``build``, then ``finish``.

    Args:
        reader: Reader of the checkpoint.
        into: The state. None: create a new one.
        tree: Tree of the checkpoint that fills it.

    Raises:
        UsageError: The state has a value that the checkpoint lacks, or a tensor of another shape or dtype.
        CheckpointError: A file cannot be opened.
    """

    def __init__(self, reader: StateSource, into: Any, tree: Tree) -> None:
        self._reader = reader
        self._reads: list[tuple[Saved, Tensor | Shard]] = []
        self._builds: list[_BuiltValue] = []
        self._finish_root = self._plan_new(tree) if into is None else self._plan(into, tree, "")

    def build(self) -> None:
        """Build the values that are not filled in place. The state does not change."""
        for built in self._builds:
            built.value = built.make()

    def finish(self) -> Any:
        """Fill the tensors, set the other values, and return the state."""
        for saved, target in self._reads:
            self._reader.read(saved, target)
        return self._finish_root()

    def _plan_new(self, tree: Tree, like: Mapping[str, Any] | None = None) -> _BuiltValue:
        for name in tensors_in(tree):
            saved, model = self._reader.find(name), None if like is None else like.get(name)
            # If the shapes differ, `build` creates the whole tensor, and needs all its files.
            fits = model is not None and tuple(model.shape) == saved.shape
            self._reader.open_for(saved, model if fits else None)
        built = _BuiltValue(lambda: self._reader.build(tree, like))
        self._builds.append(built)
        return built

    def _plan(self, into: Any, tree: Tree, path: str) -> Callable[[], Any]:
        """Compare a value with a tree. Return a function that finishes it and returns its replacement.

        The replacement is `into` itself if that object can be changed in place.
        """
        if isinstance(into, (Tensor, Shard)):
            saved = self._reader.find(_tagged(tree, "tensor", path, "a tensor"))
            _require_fit(saved, into, self._reader.where)
            self._reader.open_for(saved, into)
            self._reads.append((saved, into))
            return lambda: into
        if isinstance(into, nn.Module):
            return self._plan_module(into, tree, path)
        if isinstance(into, torch.optim.Optimizer):
            return self._plan_optimizer(into, tree, path)
        if has_state(into):
            built = self._plan_new(tree)
            return lambda: _set(into, built(), path)
        if isinstance(into, dict):
            return self._plan_dict(into, tree, path)
        if isinstance(into, (list, tuple)) and type(into) in (list, tuple):
            return self._plan_items(into, tree, path)
        return self._plan_new(tree)

    def _plan_items(self, into: list[Any] | tuple[Any, ...], tree: Tree, path: str) -> Callable[[], Any]:
        items = tree if isinstance(into, list) else _tagged(tree, "tuple", path, "a tuple")
        if not isinstance(items, list) or len(items) != len(into):
            raise UsageError(
                f"checkpoint.load: {path or 'the state'!r} has {len(into)} items in the state to fill, but"
                f" {len(items) if isinstance(items, list) else 'is not a list'} in the checkpoint.{_STRUCTURE}"
            )
        finishers = [
            self._plan(target, item, f"{path}.{number}" if path else str(number))
            for number, (target, item) in enumerate(zip(into, items, strict=True))
        ]

        def finish_value() -> Any:
            filled = [finish_item() for finish_item in finishers]
            if isinstance(into, tuple):
                return tuple(filled)
            # In place, because the program references this list.
            into[:] = filled
            return into

        return finish_value

    def _plan_dict(self, into: dict[Any, Any], tree: Tree, path: str) -> Callable[[], Any]:
        saved_items = self._pairs(tree, path)
        if into and (missing := [key for key in into if key not in saved_items]):
            raise UsageError(f"{_missing_text(path, missing, list(saved_items))}.{_STRUCTURE}")
        finishers: dict[Any, Callable[[], Any]] = {}
        for key, item in (into or saved_items).items():
            inner = f"{path}.{key}" if path else str(key)
            finishers[key] = self._plan(item, saved_items[key], inner) if into else self._plan_new(saved_items[key])

        def finish_value() -> Any:
            # In place, because the program references this dict.
            into.update({key: finish_item() for key, finish_item in finishers.items()})
            return into

        return finish_value

    def _plan_module(self, module: nn.Module, tree: Tree, path: str) -> Callable[[], Any]:
        """Plan a module: fill its tensors in place, and pass the rest to load_state_dict."""
        inner = bare(module)
        target_items, saved_items = inner.state_dict(), self._pairs(tree, path)
        if inner is not module and saved_items.keys() == {
            f"module.{key}" for key in target_items
        }:  # state_dict() of the wrapper
            saved_items = {key.removeprefix("module."): item for key, item in saved_items.items()}
        missing, unexpected = (
            [key for key in target_items if key not in saved_items],
            [key for key in saved_items if key not in target_items],
        )
        if missing or unexpected:
            more = f"; the checkpoint has {_few(unexpected)}, which the module lacks" if unexpected else ""
            what = (
                f"{_missing_text(path, missing, list(saved_items))}{more}"
                if missing
                else f"checkpoint.load: {path!r} is a different module in the checkpoint{more}"
            )
            raise UsageError(f"{what}.\n  Create the module with the configuration of the saved module.")
        extra: dict[str, _BuiltValue] = {}
        for key, value in target_items.items():
            if isinstance(value, Tensor):
                self._plan(value, saved_items[key], f"{path}.{key}" if path else key)
            else:
                extra[key] = self._plan_new(saved_items[key])

        def finish_value() -> Any:
            if extra:
                # strict=False: the tensors are already filled, and only the other entries are passed.
                _set(inner, {key: built() for key, built in extra.items()}, path, strict=False)
            return module

        return finish_value

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer, tree: Tree, path: str) -> Callable[[], Any]:
        """Plan an optimizer: use load_state_dict. The state of a DTensor parameter gets the parameter's layout."""
        entries = _tagged(tree, "dict", path, "an optimizer")
        names = _parameters(self._reader.build(entries.get("param_groups")), path)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(names) != len(parameters):
            raise UsageError(
                f"checkpoint.load: optimizer {path!r} has {len(parameters)} parameters in the state to fill, but"
                f" {len(names)} in the checkpoint.\n  Create the optimizer with the parameters of the saved optimizer."
            )
        saved_states = self._pairs(entries.get("state"), path)
        states = {_number(key, names): item for key, item in saved_states.items()}
        likes: dict[str, Any] = {}
        for name, parameter in zip(names, parameters, strict=True):
            values = states.get(name)
            if hasattr(parameter, "_local_tensor") and isinstance(values, dict):
                for value in values.get("dict", {}).values():
                    if isinstance(value, dict) and isinstance(tensor := value.get("tensor"), str):
                        likes[tensor] = parameter.detach()
        rest = {key: self._plan_new(item) for key, item in entries.items() if key != "state"}
        built = {name: self._plan_new(item, likes) for name, item in states.items()}

        def finish_value() -> Any:
            state = {key: finish_item() for key, finish_item in rest.items()}
            return _set(
                optimizer, {**state, "state": {name: finish_item() for name, finish_item in built.items()}}, path
            )

        return finish_value

    def _pairs(self, tree: Tree, path: str) -> dict[Any, Tree]:
        if isinstance(tree, dict) and "items" in tree:
            return {self._reader.build(key): item for key, item in tree["items"]}
        found: dict[Any, Tree] = _tagged(tree, "dict", path, "a dict")
        return found


_STRUCTURE = "\n  Pass into= with the structure of the saved state. To see that structure, load without into=."


def _require_fit(saved: Saved, into: Tensor | Shard, where: str) -> None:
    part, _, shape = local_part(saved.name, into)
    for what, in_checkpoint, in_state in (
        ("shape", list(saved.shape), list(shape)),
        ("dtype", saved.dtype, str(part.dtype).removeprefix("torch.")),
    ):
        if in_checkpoint != in_state:
            raise UsageError(
                f"checkpoint.load: tensor {saved.name!r} has {what} {in_checkpoint} in {where}, but {in_state} in the"
                f" state to fill.\n  Create the tensor with the {what} of the checkpoint, or load without into= and"
                " convert the tensor."
            )


def _set(target: Any, state: Any, path: str, **options: Any) -> Any:
    """Load a state into an object, and return the object."""
    try:
        target.load_state_dict(state, **options)
    # Errors of allranks already have a text for the user.
    except AllranksError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"checkpoint.load: {path or 'the state'!r}: {type(target).__name__}.load_state_dict rejected the"
            f" state of the checkpoint: {error!r:.500}\n"
            "  Load without into=, convert this state, and pass it to load_state_dict."
        ) from error
    return target


def _parameters(groups: Any, path: str) -> list[Any]:
    """Return the numbers or names of all parameters."""
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups or [None]]
    names = [name for each in lists for name in (each if isinstance(each, list) else [None])]
    if not all(isinstance(name, (int, str)) for name in names):
        raise UsageError(
            f"checkpoint.load: {path!r} is an optimizer in the state to fill, but not in the checkpoint.{_STRUCTURE}"
        )
    return names


def _number(key: Any, names: list[Any]) -> Any:
    """Return the number of a parameter. torch's distributed checkpoint has converted it to a string."""
    is_number = isinstance(key, str) and key not in names and key.isdecimal() and len(key) < 18
    return int(key) if is_number else key


def _tagged(tree: Tree, tag: str, path: str, what: str) -> Any:
    if not isinstance(tree, dict) or tag not in tree:
        raise UsageError(
            f"checkpoint.load: {path or 'the state'!r} is {what} in the state to fill, but not in the checkpoint."
            f"{_STRUCTURE}"
        )
    return tree[tag]


def _missing_text(path: str, missing: list[Any], there: list[Any]) -> str:
    where = f" at {path!r}" if path else ""
    return f"checkpoint.load: the checkpoint has no {_few(missing)}{where}; it has {_few(there)}"


def _few(names: list[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
