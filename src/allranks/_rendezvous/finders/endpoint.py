"""The record with which rank 0 publishes where it serves the store: in a file, or over PMI."""

from __future__ import annotations

import msgspec

from allranks._rendezvous.finders.interface import NotYet
from allranks._rendezvous.join_protocol import Member

__all__ = ["Endpoint"]


class Endpoint(msgspec.Struct, frozen=True):
    """Where rank 0 serves the store.

    Attributes:
        address: for ranks of its host.
        token: the secret of the store.
        host: its host's name.
        machine: as in ``Member``.
        far: addresses for other hosts, once one has asked for them.
        trouble: why there are none; "" otherwise.
    """

    address: str
    token: str
    host: str
    machine: str
    far: tuple[str, ...] = ()
    trouble: str = ""

    def address_for(self, me: Member, attempt: int) -> str:
        """The address to dial. Of several, each attempt takes another one.

        Raises:
            NotYet: rank 0 cannot be reached from this host.
        """
        if self.machine == me.machine:
            return self.address
        if not self.far:
            raise NotYet(f"rank 0, on host {self.host}, listens on its host only")
        return self.far[attempt % len(self.far)]
