"""Which members of a group are still there: for engines that report that a connection broke, but not whose.

Each member binds an abstract unix datagram socket that others can name; the kernel closes it with its process. Who
leaves reports it to the others, which distinguishes it from one that died. Members on other hosts cannot be asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks._base.forks import Socket

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["Presence"]

_CLOSING_S = 0.3  # a process that dies closes its descriptors one after the other
_PAUSE_S = 0.01
_GOODBYE = struct.Struct("!IQ")  # who leaves, after how many collectives
_QUEUE = 10  # so many goodbyes are kept for a rank that does not listen; Linux's default
_UNKNOWN = (1 << 64) - 1


class Presence:
    """This rank's sign in a group, and a look for those of the others."""

    def __init__(self, rank: int, members: Sequence[Member], secret: bytes) -> None:
        """``secret`` is known to the members only."""
        self._rank = rank
        self._near = [r for r, member in enumerate(members) if r != rank and member.machine == members[rank].machine]
        self._key = hashlib.sha256(secret).hexdigest()[:32]
        self._sign = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(self._name(rank))
        self._sign.setblocking(False)
        self._left: dict[int, int] = {}

    def gone(self, patience_s: float = _CLOSING_S) -> tuple[list[int], dict[int, int]]:
        """The ranks of this host that died, and those that left, with the number of collectives they had called.

        Waits so long where there are none.
        """
        deadline = time.monotonic() + patience_s
        while not (missing := [rank for rank in self._near if not self._there(rank)]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if missing and self._hear() >= _QUEUE:
            # More may have sent a goodbye than the queue can hold. Whoever is missing may be one of them.
            self._left = dict.fromkeys(missing, _UNKNOWN) | self._left
        left = {rank: self._left[rank] for rank in missing if rank in self._left}
        return [rank for rank in missing if rank not in left], left

    def leave(self, calls: int = 0) -> None:
        """Says to the others that this rank leaves, after so many collectives, and takes the sign down."""
        for rank in self._near:
            # It has ended itself, or reads nothing: it will find the socket missing.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                self._sign.sendto(_GOODBYE.pack(self._rank, calls), self._name(rank))
        self.close()

    def close(self) -> None:
        """Takes the sign down. In a forked child: the parent's stays."""
        self._sign.close()

    def _hear(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):  # no more of them
            while True:
                self._left.update([_GOODBYE.unpack(self._sign.recv(_GOODBYE.size))])
                count += 1
        return count

    def _there(self, rank: int) -> bool:
        with Socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._name(rank))
            except ConnectionRefusedError:
                return False
        return True

    def _name(self, rank: int) -> str:
        return f"\0allranks-{self._key}-{rank}"
