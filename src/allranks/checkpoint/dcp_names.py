"""Conversion between the flat names of torch's distributed checkpoint and allranks's tree of the same state.

torch splits a state into values with flat names, ``optimizer.param_groups.0.lr``. It splits every dict. It splits a
list only if the list contains a tensor, a dict, or another list of this kind. Everything else is one value. Keys become
strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from allranks._base.errors import CheckpointError
from allranks.checkpoint.values import Tree, unflatten

__all__ = ["Path", "leaves_of", "nested"]

Path = tuple[str | int, ...]
"""Path of a value: keys of dicts, and indexes of lists."""


def nested(leaves: Iterable[tuple[Path, Tree]]) -> Tree:
    """Combine values and their paths into one tree. A gap in a list is None; it is the position of an empty dict."""
    inside: dict[str | int, list[tuple[Path, Tree]]] = {}
    for path, tree in leaves:
        if not path:
            return tree
        inside.setdefault(path[0], []).append((path[1:], tree))
    if any(isinstance(key, int) for key in inside):
        length = 1 + max(key for key in inside if isinstance(key, int))
        return [nested(inside[index]) if index in inside else None for index in range(length)]
    return {"dict": {str(key): nested(items) for key, items in inside.items()}}


def leaves_of(tree: Tree) -> dict[str, tuple[Path, Tree]]:
    """Split a state into its values, as torch does. Return the path and the tree of each value by torch's name.

    Raises:
        CheckpointError: The state is not a dict, or two values have the same name.
    """
    if _entries(tree) is None:
        raise CheckpointError(
            "torch's distributed checkpoint loads only dicts, and this state is not a dict.\n"
            "  Use checkpoint.load instead."
        )
    found: dict[str, tuple[Path, Tree]] = {}
    for path, leaf in _walk((), tree):
        name = ".".join(map(str, path))
        if name in found:
            raise CheckpointError(
                f"torch's distributed checkpoint has one name for {list(path)} and {list(found[name][0])} of this"
                " state.\n  Use checkpoint.load instead."
            )
        found[name] = (path, leaf)
    return found


def _walk(path: Path, tree: Tree) -> Iterator[tuple[Path, Tree]]:
    if (entries := _entries(tree)) is not None:
        for key, item in entries.items():
            yield from _walk((*path, key), item)
    elif isinstance(tree, list) and _is_taken_apart(tree):
        for index, item in enumerate(tree):
            yield from _walk((*path, index), item)
    else:
        yield path, tree


def _entries(tree: Tree) -> Mapping[str, Tree] | None:
    """Return the entries of a dict; None for any other tree."""
    if isinstance(tree, dict) and "dict" in tree:
        entries: dict[str, Tree] = tree["dict"]
        return entries
    if isinstance(tree, dict) and "items" in tree:
        return {str(unflatten(key, _no_tensor)): item for key, item in tree["items"]}
    return None


def _is_taken_apart(items: list[Any]) -> bool:
    return any(
        _is_taken_apart(item)
        if isinstance(item, list)
        else isinstance(item, dict) and not item.keys().isdisjoint(_OPEN)
        for item in items
    )


_OPEN = {"dict", "items", "tensor"}


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"the manifest is damaged: tensor {name[:200]!r} is a key of a dict")
