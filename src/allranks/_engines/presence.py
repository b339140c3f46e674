"""Detection of lost members, for engines that report a broken connection but not which rank is lost.

Each member binds an abstract unix datagram socket whose name the other members can compute. The kernel closes it when
the process exits. A member that leaves notifies the others, which distinguishes it from a member that died. Members on
other hosts cannot be queried.
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

_CLOSING_S = 0.3  # seconds; a dying process closes its descriptors one after the other
_PAUSE_S = 0.01  # seconds between two checks
_GOODBYE = struct.Struct("!IQ")  # the rank that leaves, and its number of collectives
_QUEUE = 10  # number of goodbyes that are kept for a rank that does not read them; Linux's default
# More calls than any rank makes: the number is unknown, so the rank counts as having done its part.
_UNKNOWN = (1 << 64) - 1


class Presence:
    """The presence socket of this rank in a group, and the check for those of the other ranks."""

    def __init__(self, rank: int, members: Sequence[Member], secret: bytes) -> None:
        """Bind the socket of this rank. Only the members have ``secret``."""
        self._rank = rank
        # Only ranks of this host: abstract unix sockets do not reach other hosts.
        self._near = [r for r, member in enumerate(members) if r != rank and member.machine == members[rank].machine]
        # Only the members can compute the names, so another process cannot take a name in advance.
        self._key = hashlib.sha256(secret).hexdigest()[:32]
        # The kernel closes the socket at any exit, also after SIGKILL. A pid could be reused, and differs between
        # containers.
        self._sign = Socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(self._name(rank))
        # A full queue of a rank that does not read must not delay a leaving rank.
        self._sign.setblocking(False)
        self._left: dict[int, int] = {}

    def gone(self, patience_s: float = _CLOSING_S) -> tuple[list[int], dict[int, int]]:
        """Return the ranks of this host that died, and those that left with their number of collectives.

        Waits for at most ``patience_s`` seconds until there is such a rank.
        """
        deadline = time.monotonic() + patience_s
        while not (missing := [rank for rank in self._near if not self._there(rank)]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if missing and self._hear() >= _QUEUE:
            # More ranks may have sent a goodbye than the queue can hold. Any missing rank may be one of them.
            self._left = dict.fromkeys(missing, _UNKNOWN) | self._left
        left = {rank: self._left[rank] for rank in missing if rank in self._left}
        return [rank for rank in missing if rank not in left], left

    def leave(self, calls: int = 0) -> None:
        """Notify the other ranks that this rank leaves after this number of collectives, and close the socket."""
        for rank in self._near:
            # The other rank has exited, or does not read. In the second case it will find that the socket is missing.
            with contextlib.suppress(ConnectionRefusedError, BlockingIOError):
                self._sign.sendto(_GOODBYE.pack(self._rank, calls), self._name(rank))
        self.close()

    def close(self) -> None:
        """Close the socket. In a forked child, the socket of the parent stays open."""
        self._sign.close()

    def _hear(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):  # no more goodbyes
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
