"""The record with which rank 0 publishes the address of its store: in a file, or over PMI."""

from __future__ import annotations

import msgspec

from allranks._rendezvous.finders.interface import NotYet
from allranks._rendezvous.join_protocol import Member

__all__ = ["Endpoint"]


class Endpoint(msgspec.Struct, frozen=True):
    """The address at which rank 0 serves the store.

    Attributes:
        address: The address for ranks of its host.
        token: The secret of the store.
        host: The name of its host.
        machine: As in ``Member``.
        far: Addresses for other hosts, once a rank of another host has requested them.
        trouble: Why there are no such addresses, else "".
    """

    address: str
    token: str
    host: str
    machine: str
    far: tuple[str, ...] = ()
    trouble: str = ""

    def address_for(self, me: Member, attempt: int) -> str:
        """Return the address to dial. If there are several, each attempt returns the next one.

        Raises:
            NotYet: Rank 0 cannot be reached from this host.
        """
        if self.machine == me.machine:
            return self.address
        if not self.far:
            raise NotYet(f"rank 0, on host {self.host}, listens on that host only")
        return self.far[attempt % len(self.far)]
