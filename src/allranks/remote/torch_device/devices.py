"""The workers that a device stands for, by the index of the device.

torch identifies a device by its type and its index, in the whole process. The table therefore belongs to the process,
not to a master.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from allranks._base.errors import UsageError
from allranks.remote.torch_device.handle import DeviceTarget

__all__ = ["CURRENT", "end_device", "index_is_free", "make_device", "place_of", "places"]


def _nowhere() -> None:
    """A reference to no workers."""


CURRENT = [1]
"""The worker that ``device="worker"`` stands for."""

_places: list[Callable[[], DeviceTarget | None]] = [_nowhere] * 128  # torch's indices: a signed byte
"""Weak references by the index of a device. They are weak because a group ends when it is no longer used."""


def places() -> list[DeviceTarget]:
    """Return the targets that devices stand for."""
    return [found for each in list(_places) if (found := each()) is not None]


def place_of(device: torch.device | None) -> DeviceTarget:
    """Return the workers of a device. Without an index, return the current worker.

    Raises:
        UsageError: No worker has this index. This includes index 0.
    """
    index = device.index if device is not None else None
    if index == 0:
        raise UsageError(
            "worker:0: rank 0 is the master, and the first worker is worker:1.\n"
            "  Use 'worker' for the current worker, which torch.worker.set_device() sets."
        )
    if index is None:
        index = CURRENT[0]
    if index < 0:  # torch stores the index in a signed byte
        index += 256
    place = _places[index]() if index < len(_places) else None
    if place is None:
        there = [each.index for each in places() if each.index == each.ranks[0]]
        if not there:
            raise UsageError(
                f"worker:{index}: this process has no workers.\n  Call allranks.init_master_worker() first."
            )
        was = index < len(_places) and _places[index] is not _nowhere
        ended = ". A group's device exists only as long as the group.\n  Keep the result of group()." if was else ""
        raise UsageError(f"worker:{index} does not exist; expected worker:{min(there)} to worker:{max(there)}{ended}")
    return place


def make_device(target: DeviceTarget) -> None:
    """Assign workers to the device of their index, until they are no longer used."""
    _places[target.index] = weakref.ref(target)


def end_device(index: int) -> None:
    """Remove the workers of a device."""
    _places[index] = _nowhere


def index_is_free(index: int) -> bool:
    """Return whether the device of an index has no workers."""
    return _places[index]() is None
