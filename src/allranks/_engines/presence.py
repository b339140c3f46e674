"""Which members of a group are still there: for engines that say that a connection broke, but not whose.

Each member binds an abstract unix datagram socket that others can name; the kernel closes it with its process. It
carries no data. Members on other hosts cannot be asked.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks._rendezvous import Member

__all__ = ["Presence"]

_CLOSING_S = 0.3  # a process that dies closes its descriptors one after the other
_PAUSE_S = 0.01


class Presence:
    """This rank's sign in a group, and a look for those of the others."""

    def __init__(self, rank: int, members: Sequence[Member], secret: bytes) -> None:
        """``secret`` is known to the members only."""
        self._rank = rank
        self._near = [r for r, member in enumerate(members) if r != rank and member.boot_id == members[rank].boot_id]
        self._key = hashlib.sha256(secret).hexdigest()[:32]
        self._sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sign.bind(self._name(rank))

    def gone(self) -> list[int]:
        """The ranks that have died or left, of those on this host. Waits a moment where there are none."""
        deadline = time.monotonic() + _CLOSING_S
        while not (missing := [rank for rank in self._near if not self._there(rank)]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return missing

    def close(self) -> None:
        """Takes the sign down. In a forked child the parent's stays."""
        self._sign.close()

    def _there(self, rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._name(rank))
            except ConnectionRefusedError:
                return False
        return True

    def _name(self, rank: int) -> str:
        return f"\0allranks-{self._key}-{rank}"
