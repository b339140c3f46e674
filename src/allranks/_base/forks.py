"""Forked children, such as a data loader's workers. core/base/forks.h does the same in C++.

A forked child has a copy of its parent's objects, but none of its threads. Locks stay as they were at that moment. A
child therefore leaves its copies alone:

- Sockets and other descriptors are closed in the child when it is forked. Otherwise it would hide its parent's end.
  They are closed and never shut down, which the parent would see.
- Objects that depend on their process (``follow``) are notified. A store connects anew; a group refuses.
- Nothing here takes a lock in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from allranks._base.errors import NotInitializedError

__all__ = ["Descriptor", "Socket", "follow", "forks", "guard", "leak", "refusal", "separate_from_siblings"]

guard = threading.RLock()
"""Nobody forks while it is held. Around what makes a descriptor, until something knows that a child must close it, and
around the end of a ``Descriptor``, which may hold a lock.

No other lock of ours is taken, and no other rank is waited for, while it is held.
"""


class Follower(Protocol):
    def abandon(self) -> None:
        """Called in a forked child, by its only thread. Takes no lock."""


_forks = 0
_descriptors: weakref.WeakSet[Socket | Descriptor] = weakref.WeakSet()
_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def forks() -> int:
    """How many forks lie between the process that imported this file and this one."""
    return _forks


def follow(made: Follower) -> None:
    """Notifies an object, in each forked child, that it is the parent's."""
    _followers.add(made)


_GROUPS = (
    "Call it in the parent. For a group of its own the child calls init_process_group, with an init_method or a store"
    " of its own"
)


def refusal(what: str, hint: str = _GROUPS) -> NotInitializedError:
    """The error of a call on what is the parent's.

    Args:
        what: ``all_reduce on group 'world': the group``.
        hint: what to do.
    """
    return NotInitializedError(
        f"{what} belongs to the parent process, from which this one was forked (as a data loader's worker is). A forked"
        f" child cannot use it, nor wait for what it has started.\n  {hint}"
    )


def leak(foreign: object) -> None:
    """Keeps what is not ours from being destroyed: its destructor would wait for threads of the parent's."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(foreign))


class Descriptor:
    """A descriptor that is closed in a forked child; also one that is being closed during the fork."""

    def __init__(self, fd: int) -> None:
        """Takes it over."""
        self._fd = fd
        _descriptors.add(self)

    @classmethod
    def of(cls, make: Callable[[], int]) -> Descriptor:
        """That of what is made: nobody forks meanwhile."""
        with guard:
            return cls(make())

    def fileno(self) -> int:
        """Its number; -1 when it is closed."""
        return self._fd

    def detach(self) -> int:
        """Its number, for what takes it over and closes it in a child. Called with ``guard``."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Closes it. Idempotent."""
        with guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Socket(socket.socket):
    """A socket that is closed in a forked child, as are those that it accepts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with guard:
            super().__init__(*args, **kwargs)
            _descriptors.add(self)

    def accept(self) -> tuple[Socket, Any]:
        """As ``socket.socket.accept``, of a socket that only one thread accepts from."""
        timeout = self.gettimeout()
        if timeout != 0:
            poll = select.poll()
            poll.register(self, select.POLLIN)
            if not poll.poll(None if timeout is None else max(1, timeout * 1000)):
                raise TimeoutError("timed out")
        with guard:
            fd, address = self._accept()  # type: ignore[attr-defined]
            accepted = Socket(self.family, self.type, self.proto, fileno=fd)
        if timeout:
            accepted.setblocking(True)
        return accepted, address

    def close(self) -> None:
        """As ``socket.socket.close``, which forgets the number before it closes it: a child would keep that open."""
        with guard:
            super().close()


def separate_from_siblings() -> None:
    """Replace state that a fresh interpreter draws at random, and that all forks of one process otherwise share.

    Without it, a program that sets no seed has the same initial weights and dropout masks on every rank.

    The following state needs no action. Each item was compared between forked ranks:

    - ``random``, ``tempfile``, ``uuid``, ``secrets``, OpenSSL and ``multiprocessing``'s temporary names: reseeded by
      ``os.fork``, keyed by the pid, or read from the kernel.
    - Generators of GPUs: torch creates and seeds them on the first use of the GPU, which is after the fork.
    - C's ``rand``: every process starts with seed 1, forked or not.
    - Thread pools: importing torch starts no thread, so the pools start after the fork.
    - The hash seed and ``multiprocessing``'s ``authkey``: equal on all ranks that one process has forked. These ranks
      belong to one user and one job.
    """
    # Looked up, not imported: the process may need neither, and a module that is imported later is seeded then.
    if torch_random := sys.modules.get("torch.random"):
        torch_random.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    # Python 3.11 keeps the native id of the thread that called fork.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def _in_child() -> None:
    global _forks
    _forks += 1
    for descriptor in tuple(_descriptors):
        with contextlib.suppress(OSError):  # the program has closed its number
            descriptor.close()
    _descriptors.clear()
    for follower in tuple(_followers):
        follower.abandon()
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
