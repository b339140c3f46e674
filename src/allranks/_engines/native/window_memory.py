"""Memory that ranks of one host map, for windows."""

from __future__ import annotations

import ctypes
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import AllranksError
from allranks._base.forks import Descriptor

__all__ = ["Allocation", "allocate", "allocation_of", "bytes_of", "map_memory"]


class Allocation(NamedTuple):
    """Memory that other processes can map."""

    memory: Descriptor
    nbytes: int


# By address. An entry lives as long as the mapping, and the mapping as long as a tensor on it.
_allocations: dict[int, Allocation] = {}


def allocate(nbytes: int) -> Tensor:
    """Return bytes in memory that other processes of the host can map. They are zero.

    Raises:
        AllranksError: There is no memory.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = None
    try:
        memory = Descriptor.of(lambda: _core.create_memory(nbytes))
        mapping = _core.Mapping(memory.fileno(), nbytes)
    except (OSError, _core.Failure) as error:
        if memory is not None:
            memory.close()
        raise AllranksError(
            f"allocate_tensor: {nbytes} bytes of shared memory could not be allocated: {error}"
        ) from None
    _allocations[mapping.address] = Allocation(memory, nbytes)
    weakref.finalize(mapping, _release, mapping.address)
    return _bytes_at(mapping, nbytes)


def map_memory(memory: Descriptor, nbytes: int) -> Tensor | None:
    """Return the bytes of another rank's memory, and close its descriptor. None if it has none."""
    try:
        return _bytes_at(_core.Mapping(memory.fileno(), nbytes), nbytes) if nbytes else None
    finally:
        memory.close()


def _release(address: int) -> None:
    _allocations.pop(address).memory.close()


def _bytes_at(mapping: _core.Mapping, nbytes: int) -> Tensor:
    memory = (ctypes.c_ubyte * nbytes).from_address(mapping.address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # the mapping lives as long as a tensor on it does
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocation_of(tensor: Tensor) -> Allocation | None:
    """Return the memory of ``allocate`` that holds a tensor, or None."""
    return _allocations.get(tensor.untyped_storage().data_ptr())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
