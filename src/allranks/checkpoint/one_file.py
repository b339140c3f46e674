"""A state from one file, which `save(obj, path)`, `torch.save` or `export` wrote, or any other safetensors file.

A safetensors file has only tensors, with flat names. The names are used as paths in the state that is filled. The file
has no hashes, so its header is only checked against the size of the file.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor, nn

from allranks._base.errors import CheckpointError, UsageError
from allranks._call.bytes import in_huge_pages, view_of
from allranks.checkpoint import single_file
from allranks.checkpoint.folders import PathLike
from allranks.checkpoint.manifest import Saved, dtype_of
from allranks.checkpoint.part_descriptions import local_part
from allranks.checkpoint.parts import DTYPES_KEY, SAFETENSORS_DTYPES
from allranks.checkpoint.restoring import StateRestorer
from allranks.checkpoint.values import Shard, Tree, bare, flatten, unflatten

__all__ = ["load_file"]

_LONGEST = 100 << 20  # maximum bytes of a header, as in safetensors
_DTYPES = {
    **{kind: dtype for dtype, kind in SAFETENSORS_DTYPES.items()},
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def load_file(path: PathLike, map_location: Any, weights_only: bool, into: Any) -> Any:
    """Read one file, and fill a state with it; see ``allranks.checkpoint.load``."""
    with open(path, "rb") as file:
        if _is_safetensors(file):
            tensors = _Safetensors(file, os.fspath(path))
            if into is None:
                return {name: tensors.tensor(name).to(map_location) for name in tensors.names}
            return _filled(tensors, into, tensors.tree_for(into, ""))
    if into is None:
        return single_file.load(path, map_location, weights_only)
    flat = flatten(single_file.load(path, "cpu", weights_only))
    whole = {name: value for name, value in flat.tensors.items() if isinstance(value, Tensor)}
    return _filled(_Memory(whole, os.fspath(path)), into, flat.tree)


def _filled(source: _Source, into: Any, tree: Tree) -> Any:
    restorer = StateRestorer(source, into, tree)
    restorer.build()
    return restorer.finish()


class _Source:
    """Named tensors that fill a state: a ``restoring.StateSource``."""

    def __init__(self, where: str) -> None:
        self.where = where

    def find(self, name: object) -> Saved:
        """See ``loading.BlockReader``."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        raise NotImplementedError

    def open_for(self, saved: Saved, target: Tensor | Shard | None) -> None:
        """Do nothing: the file is open."""

    def build(self, tree: Tree, like: Mapping[str, Any] | None = None) -> Any:
        """See ``loading.BlockReader``."""

        def create(name: str) -> Tensor:
            whole, model = self.tensor(name), None if like is None else like.get(name)
            if model is None or model.shape != whole.shape:
                return whole.clone()
            part = torch.empty_like(model, dtype=whole.dtype)
            self.read(self.find(name), part)
            return part

        return unflatten(tree, create, where=self.where)

    def read(self, saved: Saved, into: Tensor | Shard) -> None:
        """See ``loading.BlockReader``."""
        part, offsets, _ = local_part(saved.name, into)
        with torch.no_grad():
            place = tuple(slice(begin, begin + n) for begin, n in zip(offsets, part.shape, strict=True))
            part.copy_(self.tensor(saved.name)[place])


class _Memory(_Source):
    """Tensors of an object that torch.load has created."""

    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        super().__init__(where)
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def find(self, name: object) -> Saved:
        tensor = self._tensors[str(name)]
        return Saved(str(name), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())


class _Entry(msgspec.Struct, frozen=True):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Safetensors(_Source):
    """Tensors of a safetensors file. Each is read when it is needed."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        super().__init__(where)
        self._file = file
        self._begin, self._entries = _head_of(file, where)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def find(self, name: object) -> Saved:
        saved, _ = self._entries[str(name)]
        return saved

    def tensor(self, name: str) -> Tensor:
        saved, begin = self._entries[name]
        made = in_huge_pages(torch.empty(saved.shape, dtype=dtype_of(saved.dtype), device="cpu"))
        if made.nbytes:
            self._file.seek(self._begin + begin)
            if self._file.readinto(view_of(made, writable=True)) != made.nbytes:  # type: ignore[attr-defined]
                raise CheckpointError(f"{self.where} is damaged: it ends within tensor {name!r}.{_COPY_AGAIN}")
        return made

    def tree_for(self, into: Any, path: str) -> Tree:
        """Return the tree of a state that has tensors of these names.

        Raises:
            UsageError: The state has a value that is not a tensor, or a tensor that the file lacks.
        """
        into = bare(into)
        if isinstance(into, (Tensor, Shard)):
            return {"tensor": self._required(path)}
        if isinstance(into, nn.Module):
            return self._tree_of_module(into, path)
        if isinstance(into, dict):
            return {"dict": {str(key): self.tree_for(item, _join(path, key)) for key, item in into.items()}}
        if type(into) in (list, tuple):
            items = [self.tree_for(item, _join(path, number)) for number, item in enumerate(into)]
            return items if isinstance(into, list) else {"tuple": items}
        raise UsageError(
            f"checkpoint.load: {path or 'the state'!r} is a {type(into).__name__}, but {self.where} is a safetensors"
            " file, which contains only tensors.\n  Load a checkpoint, or remove this value from the state."
        )

    def _tree_of_module(self, module: nn.Module, path: str) -> Tree:
        """Return the tree with all names below the module, so that unexpected names are detected.

        A tensor that a module shares under several names (tied weights) is in the file once.
        """
        begin = _join(path, "")
        found = {name[len(begin) :]: {"tensor": name} for name in self._entries if name.startswith(begin)}
        first: dict[str, str] = {}
        tied = flatten(module.state_dict()).tree["dict"]
        for key, leaf in tied.items():
            if isinstance(leaf, dict) and "tensor" in leaf:
                owner = first.setdefault(leaf["tensor"], key)
                if key not in found and owner in found:
                    found[key] = found[owner]
        return {"dict": found}

    def _required(self, name: str) -> str:
        if name not in self._entries:
            few = ", ".join(map(repr, self.names[:5])) + (f" and {len(self.names) - 5} more" if self.names[5:] else "")
            raise UsageError(
                f"checkpoint.load: {self.where} has no tensor {name!r}; it has {few or 'none'}.\n"
                "  Remove it from the state to fill (into=), or rename it there."
            )
        return name


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_safetensors(file: BinaryIO) -> bool:
    """Return whether the file begins with a length and JSON. A zip archive does not."""
    start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and not start.startswith(b"PK")


_COPY_AGAIN = "\n  Copy or download the file again."


def _head_of(file: BinaryIO, where: str) -> tuple[int, dict[str, tuple[Saved, int]]]:
    """Return the position of the tensors of a safetensors file, and the description and relative position of each."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    # Checked before the header is read, so that a damaged length does not allocate memory.
    if length > min(_LONGEST, size - 8):
        raise CheckpointError(
            f"{where} is not a safetensors file: its header would have {length} of {size} bytes.{_COPY_AGAIN}"
        )
    found: dict[str, tuple[Saved, int]] = {}
    ends: list[tuple[int, int]] = []
    try:
        # Raw, because the type of "__metadata__" differs from that of the tensors.
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        others = msgspec.json.decode(about.get(DTYPES_KEY, "{}"), type=dict[str, tuple[str, tuple[int, ...]]])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is a damaged safetensors file: {error}.{_COPY_AGAIN}") from error
    for name, entry in entries.items():
        # Files of a checkpoint store dtypes that safetensors lacks as bytes, with the real dtype in the metadata.
        dtype, shape = others.get(name, (_DTYPES.get(entry.dtype), entry.shape))
        begin, end = entry.data_offsets
        if dtype is None:
            raise CheckpointError(
                f"{where}: tensor {name!r} has dtype {entry.dtype!r}, which torch does not support.\n"
                "  Store the tensor with a dtype of torch."
            )
        nbytes = math.prod(shape) * dtype_of(dtype).itemsize
        if any(n < 0 for n in shape) or end - begin != nbytes or not 0 <= begin <= end <= size - 8 - length:
            raise CheckpointError(
                f"{where} is a damaged safetensors file: tensor {name!r} does not fit into bytes {begin} to {end}."
                f"{_COPY_AGAIN}"
            )
        found[name] = Saved(name, dtype, shape, ()), begin
        ends.append((begin, end))
    ends.sort()
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends)):
        raise CheckpointError(f"{where} is a damaged safetensors file: two tensors share bytes.{_COPY_AGAIN}")
    return 8 + length, found
