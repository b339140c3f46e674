"""Forked children, such as a data loader's workers. core/base/forks.h does the same in C++.

A forked child has a copy of its parent's objects, but none of its threads. Locks stay as they were at that moment. A
child therefore leaves its copies alone:

- Sockets and other descriptors are closed in the child when it is forked. Otherwise peers would not notice the exit of
  the parent. The child never shuts a socket down, because this would affect the parent's connection.
- Objects that depend on their process (``follow``) are notified. A store connects again; a group raises an error.
- This module waits for no lock in the child. The thread that forked already holds ``guard``, which is reentrant.
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
"""Prevents forks while a thread holds it.

A thread holds it while it creates a descriptor, until the descriptor is registered for closing in children. A thread
also holds it while it closes a ``Descriptor``, which may own a file lock.

A holder takes no other lock of allranks, and does not wait for another rank. Otherwise a fork, which acquires this lock
first, could deadlock.
"""


class Follower(Protocol):
    def abandon(self) -> None:
        """Reset the object in a forked child. The child's only thread calls it. It must not take a lock."""


_forks = 0
# Weak, so that the registration does not keep a socket open that its owner has dropped.
_descriptors: weakref.WeakSet[Socket | Descriptor] = weakref.WeakSet()
_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def forks() -> int:
    """Return the number of forks between the process that imported this module and the current process."""
    return _forks


def follow(made: Follower) -> None:
    """Call ``made.abandon()`` in each forked child, where the object is a copy of the parent's."""
    _followers.add(made)


_GROUPS = (
    "Call it in the parent, or create a separate group in the child: call init_process_group there with a separate"
    " init_method or store."
)


def refusal(what: str, hint: str = _GROUPS) -> NotInitializedError:
    """Return the error of a call in a child on an object of the parent.

    Args:
        what: The call and the object, for example ``all_reduce on group 'world': the group``.
        hint: What the user should do.
    """
    return NotInitializedError(
        f"{what} belongs to the parent process, from which this process was forked (for example by a data loader). A"
        f" forked child can neither use it nor wait for its calls.\n  {hint}"
    )


def leak(foreign: object) -> None:
    """Prevent the destruction of a foreign object in a child: its destructor would wait for threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(foreign))


class Descriptor:
    """A descriptor that is closed in a forked child, even if a thread of the parent closes it during the fork."""

    def __init__(self, fd: int) -> None:
        """Take ownership of ``fd``."""
        self._fd = fd
        _descriptors.add(self)

    @classmethod
    def of(cls, make: Callable[[], int]) -> Descriptor:
        """Create a descriptor with ``make`` and take ownership of it. No thread can fork in between."""
        with guard:
            return cls(make())

    def fileno(self) -> int:
        """Return its number; -1 if it is closed."""
        return self._fd

    def detach(self) -> int:
        """Give up ownership, and return the number. The new owner closes it in a child. The caller holds ``guard``."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Close it. Idempotent."""
        with guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Socket(socket.socket):
    """A socket that is closed in a forked child. The same holds for the sockets that it accepts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with guard:
            super().__init__(*args, **kwargs)
            _descriptors.add(self)

    def accept(self) -> tuple[Socket, Any]:
        """Accept a connection. See ``socket.socket.accept``. Only one thread may accept from a socket."""
        timeout = self.gettimeout()
        # Waits before it takes `guard`: the wait may be long, and no thread could fork until it ends.
        if timeout != 0:
            poll = select.poll()
            poll.register(self, select.POLLIN)
            # In milliseconds. At least 1, because a rounded 0 would not wait.
            if not poll.poll(None if timeout is None else max(1, timeout * 1000)):
                raise TimeoutError("timed out")
        with guard:
            fd, address = self._accept()  # type: ignore[attr-defined]
            accepted = Socket(self.family, self.type, self.proto, fileno=fd)
        # As in `socket.accept`: on some systems, an accepted socket inherits non-blocking mode from the listener.
        if timeout:
            accepted.setblocking(True)
        return accepted, address

    def close(self) -> None:
        """Close it under ``guard``: Python clears the number first, and a child forked then would keep it open."""
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
        with contextlib.suppress(OSError):  # the user's program has closed this number
            descriptor.close()
    _descriptors.clear()
    for follower in tuple(_followers):
        follower.abandon()
    # The child's only thread is a copy of the thread that acquired `guard` before the fork.
    guard.release()


# The thread that forks holds `guard` across the fork, so no other thread is in a guarded section at that moment.
os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
