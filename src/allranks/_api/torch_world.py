"""torch.distributed's default group, created around the allranks world when torch first requests one.

After ``init_process_group``, torch's own tools find a world: DistributedDataParallel, DistributedSampler, checkpoints,
meshes. Creating it takes some tens of milliseconds, most of them for imports of torch modules. A program that does not
use torch.distributed saves this time. Every function of torch reads the default group from one object
(``distributed_c10d._world``). This module replaces the class of that object until the group is created, or torch has
created another one.

Creating the group sends nothing to other ranks. Each rank creates it at its first use, or never.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from allranks._cluster.env import read_int

__all__ = ["is_possible", "is_wanted", "offer", "withdraw"]

_lock = threading.RLock()  # reentrant: creating the group accesses the default group, too
_make: Callable[[], object] | None = None


def is_possible() -> bool:
    """Return whether torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def is_wanted() -> bool:
    """Return whether torch.distributed should receive a default group.

    Raises:
        ConfigError: ALLRANKS_TORCH_WORLD is neither 0 nor 1.
    """
    return read_int(os.environ, "ALLRANKS_TORCH_WORLD", 0, 1) != 0 and is_possible()


def offer(make: Callable[[], object]) -> None:
    """Let torch.distributed call ``make`` when its default group is requested and does not exist."""
    from torch.distributed import c10d_logger

    global _make
    c10d = _c10d()
    withdraw()  # in a forked child: the offer of the parent
    with _lock:
        if c10d._world.default_pg is None:
            looking = inspect.unwrap(c10d.init_process_group).__code__, c10d_logger._get_msg_dict.__code__
            c10d._world.__class__ = _offered(type(c10d._world), looking)
            _make = make


def withdraw() -> None:
    """Withdraw an offer that has not been used."""
    global _make
    with _lock:
        if _make is not None:
            _make = None
            _restore()


def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def _offered(torchs: Any, looking: tuple[object, ...]) -> type:
    """Return a subclass of torch's class that creates the default group on demand, except for code in ``looking``."""

    class World(torchs):  # type: ignore[misc]
        @property
        def default_pg(self) -> Any:
            with _lock:
                if _make is not None and not _too_early(sys._getframe(1), looking):
                    _take()
            return torchs.default_pg.fget(self)

        @default_pg.setter
        def default_pg(self, group: Any) -> None:
            if group is not None:
                # torch has created another default group, so the offer is obsolete.
                withdraw()
            torchs.default_pg.fset(self, group)

    return World


def _take() -> None:
    """Create the group. Other threads that request it concurrently wait for it."""
    global _make
    # Clear the offer first: make() itself accesses the default group, and must not start another creation.
    make, _make = _make, None
    assert make is not None
    try:
        make()
    except BaseException:
        # A later request tries again.
        _make = make
        raise
    _restore()


def _restore() -> None:
    world = _c10d()._world
    # The base of the replacing class is torch's own class.
    world.__class__ = type(world).__base__


def _too_early(frame: FrameType | None, looking: tuple[object, ...]) -> bool:
    """Return whether torch only checks for a default group, or is importing its own modules.

    torch checks it in its init_process_group, to raise an error, and when it logs errors. Modules of torch use the
    default group as the default value of an argument, for which None is equivalent. A half-imported module cannot be
    used to create the group.
    """
    while frame is not None:
        importing = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("torch.")
        if importing or frame.f_code in looking:
            return True
        frame = frame.f_back
    return False


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A forked child, such as a data loader's worker, may request the rank. The thread that held the lock may not exist in
# the child.
os.register_at_fork(after_in_child=_renew_lock)
