"""Which members of a group are still there: for engines that say that a connection broke, but not whose.

Each member binds an abstract unix datagram socket that others can name; the kernel closes it with its process. Who
leaves says so to the others, which tells it from one that died. Members on other hosts cannot be asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks._rendezvous import Member

__all__ = ["Presence"]

_CLOSING_S = 0.3  # a process that dies closes its descriptors one after the other
_PAUSE_S = 0.01
_RANK = struct.Struct("!I")


class Presence:
    """This rank's sign in a group, and a look for those of the others."""

    def __init__(self, rank: int, members: Sequence[Member], secret: bytes) -> None:
        """``secret`` is known to the members only."""
        self._rank = rank
        self._near = [r for r, member in enumerate(members) if r != rank and member.machine == members[rank].machine]
        self._key = hashlib.sha256(secret).hexdigest()[:32]
        self._sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(self._name(rank))
        self._sign.setblocking(False)
        self._left: set[int] = set()

    def gone(self) -> tuple[list[int], list[int]]:
        """The ranks that died, and those that left, of those on this host. Waits a moment where there are none."""
        deadline = time.monotonic() + _CLOSING_S
        while not (missing := [rank for rank in self._near if not self._there(rank)]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self._hear()
        return [rank for rank in missing if rank not in self._left], [rank for rank in missing if rank in self._left]

    def leave(self) -> None:
        """Says to the others that this rank leaves, and takes the sign down."""
        for rank in self._near:
            # It is gone itself, or hears nobody: it will find the sign missing, and think that this rank died.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                self._sign.sendto(_RANK.pack(self._rank), self._name(rank))
        self.close()

    def close(self) -> None:
        """In a forked child: lets go of the parent's sign, which stays."""
        self._sign.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no more of them
            while True:
                self._left.update(_RANK.unpack(self._sign.recv(_RANK.size)))

    def _there(self, rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._name(rank))
            except ConnectionRefusedError:
                return False
        return True

    def _name(self, rank: int) -> str:
        return f"\0allranks-{self._key}-{rank}"
