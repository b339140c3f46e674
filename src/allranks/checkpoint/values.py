"""Conversion of a state to a tree that JSON can hold, and to its tensors by name.

The format has no pickle: a checkpoint cannot run code, and a reader in another language can use it. In the tree, a JSON
list is a list, and every JSON object is a tag with its value: ``{"tensor": NAME}``, ``{"tuple": [...]}``. If a value
has neither a JSON representation nor a tag, an error names its position in the state.

The name of a tensor is its path in the state: ``model.layer.weight``. Memory that occurs twice in a state (tied
weights) has one name.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks._call.bytes import bytes_of

__all__ = [
    "Flat",
    "Shard",
    "Tree",
    "bare",
    "flatten",
    "has_state",
    "require_dense",
    "state_of",
    "tensors_in",
    "tree_problem",
    "unflatten",
]

Tree = Any
"""Any value that JSON can represent."""

_DEEPEST = 200  # levels; the limit stops at a state that contains itself
_WORD = 1 << 63  # integers outside of [-2**63, 2**63) are stored as strings
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
_NUMPY = re.compile(r"[<|=]?[biufc]\d{1,2}")


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a tensor whose other parts are on other ranks. torch's DTensors do not need it.

    Args:
        tensor: The part.
        offsets: Position of the part in the whole tensor, in each dimension.
        shape: Shape of the whole tensor.

    Raises:
        UsageError: The part is not inside the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        own = tuple(self.tensor.shape)
        fits = len(own) == len(self.offsets) == len(self.shape) and all(
            begin >= 0 and begin + length <= whole
            for begin, length, whole in zip(self.offsets, own, self.shape, strict=True)
        )
        if not fits:
            raise UsageError(
                f"Shard: a tensor of shape {list(own)} at {list(self.offsets)} is not inside a tensor of shape"
                f" {list(self.shape)}"
            )


@dataclass
class Flat:
    """A state, split into a tree and its tensors.

    Attributes:
        tree: Everything except the tensors.
        tensors: Tensors and shards, by name.
    """

    tree: Tree = None
    tensors: dict[str, Tensor | Shard] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, path: str, tensor: Tensor | Shard) -> str:
        """Add a tensor. Return its name: the earlier name if the same memory was added before."""
        plain = tensor.tensor if isinstance(tensor, Shard) else tensor
        require_dense(path, plain)
        memory = _memory_of(tensor)
        # Tied weights are written once, and are one tensor again after a load without `into`.
        if memory is not None and memory in self._names:
            return self._names[memory]
        name, number = path, 1
        while name in self.tensors:  # {"a.b": x, "a": {"b": y}}
            number += 1
            name = f"{path}~{number}"
        self.tensors[name] = tensor
        if memory is not None:
            self._names[memory] = name
        return name


def require_dense(path: str, tensor: Tensor) -> None:
    """Reject a tensor whose values are not stored as plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind, action = (
            ("quantized", "Save its dequantize().")
            if tensor.is_quantized
            else ("meta", "Allocate it before the save, for example with Module.to_empty(device=...).")
            if tensor.device.type == "meta"
            else (str(tensor.layout), "Save its to_dense().")
        )
        raise UsageError(
            f"checkpoint: tensor {path!r} is {kind}; only dense tensors with memory can be saved.\n  {action}"
        )


def _memory_of(tensor: Tensor | Shard) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors with the same values at the same position of the same whole.

    It is None if the tensor has no memory with an address.
    """
    plain, whole = (tensor.tensor, (tensor.offsets, tensor.shape)) if isinstance(tensor, Shard) else (tensor, None)
    local: Tensor = getattr(plain, "_local_tensor", plain)
    # Empty tensors, and tensors of a device without addresses, have address 0 without being the same tensor.
    address = local.data_ptr() if local.numel() else 0
    if not address:
        return None
    # A conjugate or negative view has the memory of its base, but other values.
    lazy = (local.is_conj(), local.is_neg(), plain.is_conj(), plain.is_neg())
    spread = (getattr(plain, "device_mesh", None), getattr(plain, "placements", None), tuple(plain.shape), whole)
    return address, tuple(local.shape), local.stride(), local.dtype, local.device, lazy, spread


def flatten(state: object, path: str = "") -> Flat:
    """Split a state into a tree and its tensors.

    Args:
        state: Nested dicts, lists and tuples of tensors, shards, NumPy arrays, numbers, strings, bytes, None, dtypes,
            devices; and any object with ``state_dict``.
        path: Position in a larger state.

    Raises:
        UsageError: The state has a value of another type.
    """
    flat = Flat()
    flat.tree = _encode(state, path, flat, 0)
    return flat


def state_of(value: Any) -> Any:
    """Return the state of an object with ``state_dict``; any other value itself."""
    return bare(value).state_dict() if has_state(value) else value


def bare(value: Any) -> Any:
    """Return the module inside a wrapper for data parallelism or of torch.compile; any other value itself.

    The wrapper only changes the names. A checkpoint therefore does not depend on how a model was trained.
    """
    while isinstance(value, nn.Module) and type(value).__name__ in _WRAPPERS:
        inner = getattr(value, _WRAPPERS[type(value).__name__], None)
        if not isinstance(inner, nn.Module):
            break
        value = inner
    return value


def has_state(value: object) -> bool:
    """Return whether a value saves and loads its own state, as a module or an optimizer does."""
    return not isinstance(value, (Tensor, type)) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _encode(value: Any, path: str, flat: Flat, depth: int) -> Tree:
    if depth > _DEEPEST:
        raise UsageError(
            f"checkpoint: the state is nested more than {_DEEPEST} levels deep at {path[:80]!r}.\n"
            "  Flatten the state, or remove a container that contains itself."
        )
    value = state_of(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (Tensor, Shard)):
        return {"tensor": flat.add(path or "tensor", value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, flat, depth)
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    # Exact types only: a namedtuple would become a plain tuple, so it is refused below.
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [_encode(item, _join(path, index), flat, depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    return _encode_scalar(value, path, flat)


def _encode_mapping(value: Mapping[Any, Any], path: str, flat: Flat, depth: int) -> Tree:
    if all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, _join(path, key), flat, depth + 1) for key, item in value.items()}}
    pairs = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (bool, int, float, str))):
            raise UsageError(
                f"checkpoint: the key {key!r:.60} at {path!r} of the state is a {type(key).__name__}; expected a string"
                " or a number"
            )
        pairs.append([_encode_scalar(key, path, flat), _encode(item, _join(path, key), flat, depth + 1)])
    return {"items": pairs}


def _encode_scalar(value: Any, path: str, flat: Flat) -> Tree:
    if value is None or type(value) in (bool, str):
        return value
    # Exact types below: NumPy's float64 is a subclass of float, and must keep its type.
    if type(value) is int:
        return value if -_WORD <= value < _WORD else {"int": str(value)}
    if type(value) is float:
        # JSON has no NaN and no infinity.
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex) and type(value) is complex:
        return {"complex": [_encode_scalar(value.real, path, flat), _encode_scalar(value.imag, path, flat)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _encode_numpy(value, path, flat)
    raise UsageError(
        f"checkpoint: {path or 'the state'!r} is a {type(value).__name__}, which a checkpoint cannot store.\n  Use"
        " tensors, NumPy arrays, numbers, strings, bytes, None, lists, tuples and dicts of these, or objects with"
        " state_dict() and load_state_dict()."
    )


def _encode_numpy(value: Any, path: str, flat: Flat) -> Tree:
    """Encode an array or a scalar of NumPy."""
    if value.dtype.kind not in "biufc" or value.dtype.byteorder == ">":
        raise UsageError(f"checkpoint: {path!r} is a NumPy array of {value.dtype}; expected numbers")
    raw = (
        torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        if value.nbytes
        else torch.empty(0, device="cpu").byte()
    )
    described = [value.dtype.str, list(value.shape)]
    if not value.shape and type(value).__name__ != "ndarray":
        return {"numpy_scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    return {"numpy": [*described, flat.add(path or "array", raw)]}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def tree_problem(tree: Tree) -> str:
    """Return the problem of a tree that was read; "" for none. ``unflatten`` checks values of torch and NumPy."""
    # A list instead of recursion, so that a damaged tree cannot exhaust the stack.
    todo: list[tuple[Tree, int]] = [(tree, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > _DEEPEST + 1:
            return f"its state is nested more than {_DEEPEST} levels deep"
        if item is None or isinstance(item, (bool, int, float, str)):
            continue
        inner = item if isinstance(item, list) else _inside(item)
        if inner is None:
            return f"its state has an invalid value: {str(item)[:80]}"
        todo += [(each, depth + 1) for each in inner]
    return ""


def _inside(item: dict[str, Any]) -> list[Tree] | None:
    """Return the trees in a value with a tag; None if it is not a valid value with a tag."""
    if len(item) != 1:
        return None
    ((tag, value),) = item.items()
    match tag:
        case "dict" if isinstance(value, dict):
            return list(value.values())
        case "items" if isinstance(value, list) and all(map(_is_entry, value)):
            return [each for _, each in value]
        case "tuple" if isinstance(value, list):
            return value
        case "tensor" | "int" | "float" | "bytes" | "dtype" | "device" if isinstance(value, str):
            return []
        case "size" if _is_shape(value):
            return []
        case "complex" if isinstance(value, list) and len(value) == 2 and all(map(_is_key, value)):
            return []
        case "numpy" if isinstance(value, list) and len(value) == 3:
            kind, shape, name = value
            return [] if _is_kind(kind) and _is_shape(shape) and isinstance(name, str) else None
        case "numpy_scalar" if isinstance(value, list) and len(value) == 2:
            return [] if _is_kind(value[0]) and isinstance(value[1], str) else None
    return None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and _is_key(entry[0])


def _is_key(key: Any) -> bool:
    """Return whether a value is a valid key of a dict. All numbers are valid keys."""
    if isinstance(key, dict):
        return len(key) == 1 and all(tag in ("int", "float") and isinstance(value, str) for tag, value in key.items())
    return not isinstance(key, list)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(length) is int and 0 <= length < _WORD for length in shape)


def _is_kind(kind: Any) -> bool:
    return isinstance(kind, str) and _NUMPY.fullmatch(kind) is not None


def tensors_in(tree: Tree) -> Iterator[str]:
    """Yield the names of the tensors in a tree."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        ((tag, value),) = tree.items()
        if tag == "tensor":
            yield value
        elif tag == "numpy":
            yield value[2]
        elif tag == "dict":
            yield from tensors_in(list(value.values()))
        elif tag == "items":
            yield from tensors_in([item for _, item in value])
        elif tag == "tuple":
            yield from tensors_in(value)


def unflatten(tree: Tree, tensor: Callable[[str], Any], where: str = "the manifest") -> Any:
    """Build a state from a tree. It is the inverse of ``flatten``.

    Args:
        tree: Tree of a manifest.
        tensor: Returns a tensor by name.
        where: The manifest or file that contains the tree, for error messages.

    Raises:
        CheckpointError: It is not a valid tree.
    """
    if problem := tree_problem(tree):
        raise CheckpointError(f"{where} is damaged: {problem}")
    try:
        return _decode(tree, tensor)
    except AllranksError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(f"{where} is damaged: its state cannot be read: {error!r:.200}") from error


def _decode(tree: Tree, tensor: Callable[[str], Any]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, list):
        return [_decode(item, tensor) for item in tree]
    ((tag, value),) = tree.items()
    match tag:
        case "dict":
            return {key: _decode(item, tensor) for key, item in value.items()}
        case "items":
            return {_decode(key, tensor): _decode(item, tensor) for key, item in value}
        case "tuple":
            return tuple(_decode(item, tensor) for item in value)
        case "tensor":
            return tensor(value)
        case "size":
            return torch.Size(value)
        case "int" | "float":
            return {"int": int, "float": float}[tag](value)
        case "complex":
            real, imaginary = (_decode(part, tensor) for part in value)
            return complex(real, imaginary)
        case "bytes":
            # Without `validate`, b64decode ignores invalid characters.
            return base64.b64decode(value, validate=True)
        case "dtype":
            return _dtype(value)
        case "device":
            return torch.device(value)
        case "numpy" | "numpy_scalar":
            return _decode_numpy(value, tensor)
        case _:
            raise ValueError(f"unknown tag {tag!r}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


def _decode_numpy(value: list[Any], tensor: Callable[[str], Any]) -> Any:
    try:
        import numpy
    except ImportError:
        raise UsageError(
            "checkpoint: this state has NumPy arrays, but NumPy is not installed.\n  Run: pip install numpy"
        ) from None
    if len(value) == 2:
        kind, raw = value
        return numpy.frombuffer(base64.b64decode(raw, validate=True), dtype=numpy.dtype(kind))[0]
    kind, shape, name = value
    # A copy, because an array over bytes is read-only.
    return numpy.frombuffer(bytes_of(tensor(name)), dtype=numpy.dtype(kind)).reshape(shape).copy()
