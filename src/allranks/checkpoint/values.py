"""A state as a tree that JSON can hold, and the tensors in it, by name.

No pickle: nothing in a checkpoint can run code, and a reader in another language finds what it needs. In the tree a
JSON list is a list, and every JSON object is a tag with its value: ``{"tensor": NAME}``, ``{"tuple": [...]}``. What
JSON cannot hold, and no tag stands for, is an error that says where in the state it is.

A tensor's name is its path in the state: ``model.layer.weight``. The same memory, twice in a state (tied weights), has
one name.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks._call.bytes import bytes_of

__all__ = ["Flat", "Shard", "Tree", "flatten", "require_dense", "state_of", "unflatten"]

Tree = Any
"""What JSON can hold."""

_DEEPEST = 200  # levels: a state that contains itself would have no end
_WORD = 1 << 63


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a tensor, of which other ranks have the rest. torch's DTensors need no such help.

    Args:
        tensor: the part.
        offsets: where it begins in the whole, in each dimension.
        shape: of the whole.

    Raises:
        UsageError: it does not lie in the whole.
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
                f"Shard: a tensor of shape {list(own)} at {list(self.offsets)} does not lie in one of shape"
                f" {list(self.shape)}"
            )


@dataclass
class Flat:
    """A state, taken apart.

    Attributes:
        tree: all but the tensors.
        tensors: those, and shards of them, by name.
    """

    tree: Tree = None
    tensors: dict[str, Tensor | Shard] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, path: str, tensor: Tensor | Shard) -> str:
        """Takes a tensor. Returns its name: that of the same memory, if it was here before."""
        plain = tensor.tensor if isinstance(tensor, Shard) else tensor
        require_dense(path, plain)
        memory = _memory_of(plain)
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
    """Refuses a tensor whose bytes are not its values."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.device.type == "meta" else str(tensor.layout)
        raise UsageError(f"checkpoint: tensor {path!r} is {kind}; only dense tensors with memory can be saved")


def _memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    local = getattr(tensor, "_local_tensor", tensor)
    if not local.numel():
        return None
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device, tuple(tensor.shape)


def flatten(state: object, path: str = "") -> Flat:
    """Takes a state apart.

    Args:
        state: nested dicts, lists and tuples of tensors, shards, NumPy arrays, numbers, strings, bytes, None, dtypes,
            devices; and whatever has ``state_dict``.
        path: its place in a larger state.

    Raises:
        UsageError: there is something else in it.
    """
    flat = Flat()
    flat.tree = _encode(state, path, flat, 0)
    return flat


def state_of(value: Any) -> Any:
    """What an object with ``state_dict`` saves; any other value itself."""
    return value.state_dict() if has_state(value) else value


def has_state(value: object) -> bool:
    """Whether it is a module, an optimizer or anything else that saves and loads its state by itself."""
    return not isinstance(value, (Tensor, type)) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _encode(value: Any, path: str, flat: Flat, depth: int) -> Tree:
    if depth > _DEEPEST:
        raise UsageError(f"checkpoint: the state is nested more than {_DEEPEST} levels deep at {path[:80]!r}")
    if has_state(value):
        value = value.state_dict()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (Tensor, Shard)):
        return {"tensor": flat.add(path or "tensor", value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, flat, depth)
    if isinstance(value, torch.Size):
        return {"size": list(value)}
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
    if type(value) is int:
        return value if -_WORD <= value < _WORD else {"int": str(value)}
    if type(value) is float:
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
        f"checkpoint: {path or 'the state'!r} is a {type(value).__name__}, which a checkpoint cannot hold. Expected"
        " tensors, NumPy arrays, numbers, strings, bytes, None, lists, tuples and dicts of these, or objects with"
        " state_dict() and load_state_dict()"
    )


def _encode_numpy(value: Any, path: str, flat: Flat) -> Tree:
    """An array, or a scalar of NumPy."""
    if value.dtype.kind not in "biufc" or value.dtype.byteorder == ">":
        raise UsageError(f"checkpoint: {path!r} is a NumPy array of {value.dtype}; expected numbers")
    raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0).byte()
    described = [value.dtype.str, list(value.shape)]
    if not value.shape and type(value).__name__ != "ndarray":
        return {"numpy_scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    return {"numpy": [*described, flat.add(path or "array", raw)]}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(tree: Tree, tensor: Callable[[str], Any]) -> Any:
    """The opposite of ``flatten``.

    Args:
        tree: that of a manifest.
        tensor: gives a tensor by name.

    Raises:
        CheckpointError: it is not such a tree.
    """
    try:
        return _decode(tree, tensor)
    except AllranksError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(f"the manifest's state is damaged: {error!r:.200}") from error


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
            return base64.b64decode(value, validate=True)
        case "dtype":
            return _dtype(value)
        case "device":
            return torch.device(value)
        case "numpy" | "numpy_scalar":
            return _decode_numpy(value, tensor)
        case _:
            raise ValueError(f"there is no tag {tag!r}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _decode_numpy(value: list[Any], tensor: Callable[[str], Any]) -> Any:
    try:
        import numpy
    except ImportError:
        raise UsageError("checkpoint: this state has NumPy arrays: pip install numpy") from None
    if len(value) == 2:
        kind, raw = value
        return numpy.frombuffer(base64.b64decode(raw, validate=True), dtype=numpy.dtype(kind))[0]
    kind, shape, name = value
    return numpy.frombuffer(bytes_of(tensor(name)), dtype=numpy.dtype(kind)).reshape(shape).copy()
