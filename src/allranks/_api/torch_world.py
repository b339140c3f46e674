"""torch.distributed's default group, made around our world when torch is first asked for one.

After ``init_process_group`` torch's own tools find a world: DistributedDataParallel, DistributedSampler, checkpoints,
meshes. To make it takes some tens of milliseconds, most of them for modules of torch's, which a program that uses
nothing of torch.distributed does without. Every function of torch's reads the default group from one object
(``distributed_c10d._world``), whose class is replaced here until the group has been made, or another one by torch.

Making it sends nothing to other ranks: each does so when it comes to it, or never.
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

_lock = threading.RLock()
_make: Callable[[], object] | None = None


def is_possible() -> bool:
    """Whether torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def is_wanted() -> bool:
    """Whether it is to have a default group.

    Raises:
        ConfigError: ALLRANKS_TORCH_WORLD is neither 0 nor 1.
    """
    return read_int(os.environ, "ALLRANKS_TORCH_WORLD", 0, 1) != 0 and is_possible()


def offer(make: Callable[[], object]) -> None:
    """Lets torch.distributed call ``make`` when it is asked for its default group and has none."""
    from torch.distributed import c10d_logger

    global _make
    c10d = _c10d()
    withdraw()  # a forked child's parent's
    with _lock:
        if c10d._world.default_pg is None:
            looking = inspect.unwrap(c10d.init_process_group).__code__, c10d_logger._get_msg_dict.__code__
            c10d._world.__class__ = _offered(type(c10d._world), looking)
            _make = make


def withdraw() -> None:
    """Ends an offer that has not been taken."""
    global _make
    with _lock:
        if _make is not None:
            _make = None
            _restore()


def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def _offered(torchs: Any, looking: tuple[object, ...]) -> type:
    """torch's class, whose instance makes a default group when it is asked for one, but by code that only looks."""

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
                withdraw()
            torchs.default_pg.fset(self, group)

    return World


def _take() -> None:
    """Makes the group. Other threads that ask meanwhile wait for it."""
    global _make
    make, _make = _make, None
    assert make is not None
    try:
        make()
    except BaseException:
        _make = make
        raise
    _restore()


def _restore() -> None:
    world = _c10d()._world
    world.__class__ = type(world).__base__


def _too_early(frame: FrameType | None, looking: tuple[object, ...]) -> bool:
    """Whether torch only looks, or imports modules of its own.

    It looks in its init_process_group, for the sake of an error, and when it logs errors. Modules of torch's name the
    default group as the default of an argument, where None means the same; what is imported halfway cannot be used.
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


# A child can ask for its parent's rank: a data loader's worker does. The thread that held the lock may not exist there.
os.register_at_fork(after_in_child=_renew_lock)
