"""Loading: any layout from any other, by byte ranges, and nothing that has not been checked.

Each rank reads what it needs of each tensor: the rows, in the first dimension, of the pieces that its part touches. A
state that is filled keeps its memory; parts of DTensors and of ``Shard`` are read alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allranks._base.errors import CheckpointError, UsageError
from allranks._call.bytes import view_of
from allranks.checkpoint import folders, parts
from allranks.checkpoint.background import company_apart
from allranks.checkpoint.choosing import Chosen, agreed
from allranks.checkpoint.company import Company
from allranks.checkpoint.fetching import Rounds
from allranks.checkpoint.manifest import MANIFEST, Manifest, Piece, Saved, dtype_of
from allranks.checkpoint.offers import local_part
from allranks.checkpoint.values import Shard, Tree, has_state, unflatten

__all__ = ["Reader", "load_folder", "load_here"]

_CHUNK = 64 << 20  # bytes that are read at a time, where they are copied on


def load_folder(path: folders.PathLike, into: Any, step: int | None, company: Company) -> Any:
    """Reads a checkpoint. All ranks call it.

    Args:
        path: a checkpoint, or a folder of them.
        into: what is filled; None: a new state is made.
        step: which of a folder; None: the newest.
        company: the ranks.

    Returns:
        The state: ``into``, or the new one.

    Raises:
        UsageError: ``into`` has what the checkpoint has not, or tensors of another shape.
        CheckpointError: there is none, or something is damaged.
        OSError: a file cannot be read.
    """
    try:
        chosen = agreed(path, step, company)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.load: {error}") from error
    if chosen.is_everywhere(company.size):
        return load_here(chosen, into, company.rank)
    rounds = Rounds(chosen, company_apart(company))
    try:
        state = load_here(chosen, into, company.rank, rounds)
    except Exception as error:
        rounds.finish(error)
        raise
    rounds.finish()
    return state


def load_here(chosen: Chosen, into: Any, rank: int, rounds: Rounds | None = None) -> Any:
    """Reads a checkpoint as a rank. ``rounds`` has the files that are not here."""
    with Reader(chosen, rank, rounds) as reader:
        tree = reader.manifest.tree(rank)
        if into is None:
            return reader.build(tree)
        return _fill(into, tree, "", reader)


class Reader:
    """A checkpoint that is being read. Its files are opened when they are needed."""

    def __init__(self, chosen: Chosen, rank: int, rounds: Rounds | None = None) -> None:
        self._folder, self._here, self._rounds = chosen.folder, chosen.here, rounds
        self.manifest: Manifest = chosen.manifest
        self._tensors = self.manifest.tensors_of(rank)
        self._open = contextlib.ExitStack()
        self._files: dict[int, parts.Source] = {}
        self._made: dict[str, Tensor] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def build(self, tree: Tree, like: Mapping[str, Any] | None = None) -> Any:
        """A new state. ``like``: a DTensor, for tensors of these names that are to be parts in the same way."""
        return unflatten(tree, lambda name: self.tensor(name, None if like is None else like.get(name)))

    def tensor(self, name: str, like: Any = None) -> Tensor:
        """A new tensor on the CPU; or a DTensor laid out as another one. The same object for the same name."""
        if name not in self._made:
            saved = self.find(name)
            if like is not None and tuple(like.shape) == saved.shape:
                made = torch.empty_like(like, dtype=dtype_of(saved.dtype))
            else:
                made = torch.empty(saved.shape, dtype=dtype_of(saved.dtype))
            self.read(saved, made)
            self._made[name] = made
        return self._made[name]

    def find(self, name: object) -> Saved:
        """The description of a tensor."""
        saved = self._tensors.get(name) if isinstance(name, str) else None
        if saved is None:
            raise CheckpointError(f"{self._folder / MANIFEST} is damaged: it has no tensor {str(name)[:200]!r}")
        return saved

    def read(self, saved: Saved, into: Tensor | Shard) -> None:
        """Fills a tensor, or the part of it that a shard or DTensor has.

        Raises:
            UsageError: it has another shape.
        """
        part, offsets, shape = local_part(saved.name, into)
        if shape != saved.shape:
            raise UsageError(
                f"checkpoint.load: tensor {saved.name!r} has shape {list(saved.shape)} in {self._folder}, and"
                f" {list(shape)} here"
            )
        if part.numel():
            with torch.no_grad():
                for piece in saved.pieces:
                    self._read_piece(saved, piece, part, offsets)

    def _read_piece(self, saved: Saved, piece: Piece, part: Tensor, offsets: tuple[int, ...]) -> None:
        low = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.shape, offsets, part.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        dtype = dtype_of(saved.dtype)
        target = part[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
        first, last = (low[0] - piece.offsets[0], high[0] - piece.offsets[0]) if low else (0, 1)
        row = math.prod(piece.shape[1:]) * dtype.itemsize
        source = self._file(piece.file)
        whole_rows = tuple(target.shape[1:]) == tuple(piece.shape[1:])
        if whole_rows and target.is_cpu and target.dtype == dtype and target.is_contiguous():
            view = view_of(target, writable=True)
            parts.read_rows(source, self.manifest, saved, piece, first * row, last * row, view)
            return
        inner = tuple(slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], piece.offsets[1:], strict=True))
        step = max(1, _CHUNK // row)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            rows = torch.empty((end - begin, *piece.shape[1:]) if low else (), dtype=dtype)
            view = view_of(rows, writable=True)
            parts.read_rows(source, self.manifest, saved, piece, begin * row, end * row, view)
            if low:
                target[begin - first : end - first].copy_(rows[(slice(None), *inner)])
            else:
                target.copy_(rows)

    def _file(self, number: int) -> parts.Source:
        if number not in self._files:
            file = self.manifest.files[number]
            if file.share in self._here:
                self._files[number] = self._open.enter_context(parts.open_part(self._here[file.share], file))
            else:
                assert self._rounds is not None
                self._files[number] = self._rounds.file(number)
        return self._files[number]


# Filling what is there.


def _fill(into: Any, tree: Tree, path: str, reader: Reader) -> Any:
    """What takes the place of ``into``: itself, where it can be changed."""
    if isinstance(into, (Tensor, Shard)):
        name = _tagged(tree, "tensor", path, "a tensor")
        reader.read(reader.find(name), into)
        return into
    if isinstance(into, nn.Module):
        _fill_module(into, tree, path, reader)
        return into
    if isinstance(into, torch.optim.Optimizer):
        _fill_optimizer(into, tree, path, reader)
        return into
    if has_state(into):
        into.load_state_dict(reader.build(tree))
        return into
    if isinstance(into, dict):
        return _fill_dict(into, tree, path, reader)
    if isinstance(into, (list, tuple)) and type(into) in (list, tuple):
        items = tree if isinstance(into, list) else _tagged(tree, "tuple", path, "a tuple")
        if not isinstance(items, list) or len(items) != len(into):
            raise UsageError(f"checkpoint.load: {path or 'the state'!r} has {len(into)} items here, and others there")
        filled = [
            _fill(mine, item, f"{path}.{n}", reader) for n, (mine, item) in enumerate(zip(into, items, strict=True))
        ]
        if isinstance(into, tuple):
            return tuple(filled)
        into[:] = filled
        return into
    return reader.build(tree)


def _fill_dict(into: dict[Any, Any], tree: Tree, path: str, reader: Reader) -> dict[Any, Any]:
    theirs = _pairs(tree, path, reader)
    if not into:
        into.update({key: reader.build(item) for key, item in theirs.items()})
        return into
    if missing := [key for key in into if key not in theirs]:
        raise UsageError(_not_there(path, missing, list(theirs)))
    for key, mine in into.items():
        into[key] = _fill(mine, theirs[key], f"{path}.{key}" if path else str(key), reader)
    return into


def _fill_module(module: nn.Module, tree: Tree, path: str, reader: Reader) -> None:
    """Its tensors get their values where they are; what it saves beside them goes through load_state_dict."""
    mine, theirs = module.state_dict(), _pairs(tree, path, reader)
    missing, unexpected = [key for key in mine if key not in theirs], [key for key in theirs if key not in mine]
    if missing or unexpected:
        more = f"; it has {_few(unexpected)}, which the module has not" if unexpected else ""
        what = _not_there(path, missing, list(theirs)) if missing else f"checkpoint.load: {path!r} is another module"
        raise UsageError(what + more)
    extra = {}
    for key, value in mine.items():
        if isinstance(value, Tensor):
            _fill(value, theirs[key], f"{path}.{key}", reader)
        else:
            extra[key] = reader.build(theirs[key])
    if extra:
        module.load_state_dict(extra, strict=False)


def _fill_optimizer(optimizer: torch.optim.Optimizer, tree: Tree, path: str, reader: Reader) -> None:
    """Through load_state_dict, with states that are laid out as the parameters: DTensors, where those are."""
    groups = reader.build(_tagged(tree, "dict", path, "an optimizer").get("param_groups"))
    names = [name for group in groups or [] for name in group["params"]]
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(names) != len(mine):
        raise UsageError(
            f"checkpoint.load: optimizer {path!r} has {len(mine)} parameters here, and {len(names)} in the checkpoint"
        )
    states = {_number(key, names): item for key, item in _pairs(tree["dict"].get("state"), path, reader).items()}
    likes: dict[str, Any] = {}
    for name, parameter in zip(names, mine, strict=True):
        values = states.get(name)
        if hasattr(parameter, "_local_tensor") and isinstance(values, dict):
            for value in values.get("dict", {}).values():
                if isinstance(value, dict) and isinstance(tensor := value.get("tensor"), str):
                    likes[tensor] = parameter.detach()
    rest = {key: reader.build(item) for key, item in tree["dict"].items() if key != "state"}
    state = {name: reader.build(item, likes) for name, item in states.items()}
    optimizer.load_state_dict({**rest, "state": state})


def _number(key: Any, names: list[Any]) -> Any:
    """The number of a parameter, which torch's distributed checkpoint has made a string."""
    return int(key) if isinstance(key, str) and key not in names and key.isdecimal() else key


def _pairs(tree: Tree, path: str, reader: Reader) -> dict[Any, Tree]:
    if isinstance(tree, dict) and "items" in tree:
        return {reader.build(key): item for key, item in tree["items"]}
    found: dict[Any, Tree] = _tagged(tree, "dict", path, "a dict")
    return found


def _tagged(tree: Tree, tag: str, path: str, what: str) -> Any:
    if not isinstance(tree, dict) or tag not in tree:
        raise UsageError(
            f"checkpoint.load: {path or 'the state'!r} is {what} here, and something else in the checkpoint"
        )
    return tree[tag]


def _not_there(path: str, missing: list[Any], there: list[Any]) -> str:
    where = f" at {path!r}" if path else ""
    return f"checkpoint.load: the checkpoint has no {_few(missing)}{where}; it has {_few(there)}"


def _few(names: list[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
