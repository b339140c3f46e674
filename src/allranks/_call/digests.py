"""Hashes of values, which are equal in every process if the values are: tensors, arrays, containers, plain values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from allranks._call.bytes import view_of

__all__ = ["PLAIN", "digest", "is_dtensor", "is_plain", "local_of", "shard_of"]

PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
"""Types of immutable values without references."""

_CHUNK = 1 << 22  # elements of 8 bytes: limits the temporary memory on a device to some times 32 MiB
_MIX = -0x61C8864680B583EB  # the odd number next to 2**64 / golden ratio, as a signed number; any odd number is correct


def is_plain(value: object) -> bool:
    """Return whether a value is immutable and references only values of this kind."""
    return type(value) in PLAIN or (isinstance(value, tuple) and type(value) is tuple and all(map(is_plain, value)))


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without this module, no DTensor can exist
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's local memory of a tensor, detached."""
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def shard_of(tensor: Tensor) -> str:
    """Return a text that identifies this rank's shard of a DTensor, or "" for any other tensor."""
    if not is_dtensor(tensor):
        return ""
    found: Any = tensor
    coordinates = found.device_mesh.get_coordinate() or ()
    return str([c for c, p in zip(coordinates, found.placements, strict=False) if not p.is_replicate()])


def digest(value: Any) -> int:
    """Return a hash of the value of a tensor, array, or container. Equal values have equal hashes in every process.

    Hashes of tensors on different types of devices differ.

    Cost:
        10 GB/s for tensors on the CPU and arrays. A tensor on another device is hashed there, and is not copied.
    """
    hasher = xxhash.xxh3_64()
    _feed(hasher, value, 0, set())
    return hasher.intdigest()


def _parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse tensor consists of. Equal COO tensors may have another order."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]  # mkldnn


def _hash_on_device(words: Tensor) -> int:
    """Return a 64-bit hash of the elements of an int64 tensor, calculated on its device.

    Each element is combined with its index, mixed by an invertible function, and added modulo 2**64. A change of one
    element therefore always changes the hash.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = (chunk ^ torch.arange(start, start + len(chunk), device=words.device) * _MIX) * _MIX
        # Without this step, equal changes of the highest bit in two elements would cancel each other.
        mixed = (mixed ^ (mixed >> 29)) * _MIX
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total)


def _feed(hasher: Any, value: Any, depth: int, above: set[int]) -> None:
    if isinstance(value, Tensor):
        tensor = local_of(value)
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.is_meta:  # it has no values
            return
        if tensor.layout != torch.strided:
            # Not the text of the tensor, which torch abbreviates above 1,000 elements.
            hasher.update(str(tensor.layout).encode())
            for part in _parts_of_sparse(tensor):
                _feed(hasher, part, depth + 1, above)
            return
        # Conjugate and negative views are lazy bits in torch: equal values could have different bytes.
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        if not flat.is_cpu and flat.nbytes >= 8:
            words = flat.nbytes // 8
            if flat.storage_offset() * flat.itemsize % 8:
                flat = flat.clone()  # a view of words must be aligned
            data = flat.reshape(-1).view(torch.uint8)
            hasher.update(_hash_on_device(data[: words * 8].view(torch.int64)).to_bytes(8, "little", signed=True))
            flat = data[words * 8 :].cpu()
        if flat.nbytes:
            hasher.update(view_of(flat.cpu()))
    elif is_plain(value):
        # repr distinguishes 1, 1.0 and True, and makes NaN equal to itself.
        hasher.update(repr(value).encode())
    elif hasattr(value, "__array_interface__"):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(value.tobytes())
    elif id(value) in above or depth > 20:  # a cycle, or nested too deeply
        return
    elif isinstance(value, Mapping):
        # The order of keys is the order of their first assignment, which load_state_dict() does not preserve.
        for key, each in sorted(value.items(), key=lambda item: repr(item[0]) if type(item[0]) in PLAIN else ""):
            hasher.update((repr(key) if type(key) in PLAIN else str(type(key))).encode())
            _feed(hasher, each, depth + 1, above | {id(value)})
    elif isinstance(value, (set, frozenset)):
        # The iteration order of a set depends on the hash seed of the process.
        hasher.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, (list, tuple, deque)):
        hasher.update(f"{type(value).__name__}{len(value)}".encode())
        for each in value:
            _feed(hasher, each, depth + 1, above | {id(value)})
    else:
        hasher.update(type(value).__qualname__.encode())
