"""Which workers a device means, by the index of the device.

torch knows a device by its type and its index, in the whole process. So the table is the process's, not a master's.
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
"""The worker that ``device="worker"`` means."""

_places: list[Callable[[], DeviceTarget | None]] = [_nowhere] * 128
"""By index of device: weak references, as a group ends when nothing uses it any more."""


def places() -> list[DeviceTarget]:
    """Those that devices mean."""
    return [found for each in list(_places) if (found := each()) is not None]


def place_of(device: torch.device | None) -> DeviceTarget:
    """The workers that a device means; the current one's where it has no index.

    Raises:
        UsageError: there are none of that index, as of 0.
    """
    index = device.index if device is not None else None
    if index == 0:
        raise UsageError(
            "worker:0: rank 0 is the master, and the first worker is worker:1. 'worker' alone is the current one,"
            " of torch.worker.set_device()"
        )
    if index is None:
        index = CURRENT[0]
    if index < 0:  # torch keeps it in eight bits
        index += 256
    place = _places[index]() if index < len(_places) else None
    if place is None:
        there = [each.index for each in places() if each.index == each.ranks[0]]
        if not there:
            raise UsageError(f"worker:{index}: there are no workers. Call allranks.init_master_worker() first")
        was = index < len(_places) and _places[index] is not _nowhere
        ended = "; a group's device ends with it: hold what group() returned" if was else ""
        raise UsageError(f"there is no worker:{index}; there are worker:{min(there)} to worker:{max(there)}{ended}")
    return place


def make_device(target: DeviceTarget) -> None:
    """From now on the device of its index means these workers, as long as something uses them."""
    _places[target.index] = weakref.ref(target)


def end_device(index: int) -> None:
    """From now on the device of an index means no workers."""
    _places[index] = _nowhere


def index_is_free(index: int) -> bool:
    """Whether the device of an index means no workers."""
    return _places[index]() is None
