"""The description of an engine before it is created. It does not import torch, because the launcher lists engines.

An installed package provides an engine by an entry point of the group ``allranks.engines``. ``registry`` finds both
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from allranks._engines.base import Engine, Parent
    from allranks._rendezvous.rendezvous import Member

__all__ = ["INTERFACE", "OLDEST", "RECORD_BYTES", "EngineSpec", "Exchange", "GroupSetup", "Meeting"]

INTERFACE = 1
"""The version of the interface between allranks and an engine. It increases with each incompatible change."""

OLDEST = 1
"""The oldest version that this allranks accepts."""

# The native engine needs all of it: a name (7 bytes), a token (16), a port (2) and the number of a fabric (1).
RECORD_BYTES = 26
"""The maximum size in bytes of a record for an `Exchange`. The data that new_group gathers grows with it."""

Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Gives every rank of the group the records of all ranks, by rank."""


class GroupSetup(NamedTuple):
    """The group for which an engine is created.

    Attributes:
        rank: The rank of this process in the group.
        members: The members, by rank: ``machine``, ``host``, ``pid``, ``addresses``, and ``rank`` in the world.
        exchange: Gives the members each other's addresses. It takes a record of at most 26 bytes. It returns the
            records of all members by rank, each padded to 26 bytes with zeros. It is called at most once.
        group_name: The name of the group for error messages.
        timeout_s: The timeout of the connection and of every later call, in seconds.
        parent: The group from which this one is created, on every rank. None for the world.
    """

    rank: int
    members: Sequence[Member]
    exchange: Exchange
    group_name: str
    timeout_s: float
    parent: Parent | None = None


class Meeting(Protocol):
    """A completed rendezvous of all ranks of a job: the result of an engine's ``meets_by``.

    Attributes:
        rank: The rank of this process in the job.
        members: All processes, by rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def members(self) -> Sequence[Member]: ...

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Give every rank the records of all ranks, by rank."""

    def close(self) -> None:
        """Release resources after the world was created, or failed to be created."""


def always() -> bool:
    """Return True: the engine is part of every installation."""
    return True


@dataclass(frozen=True)
class EngineSpec:
    """An engine, described without importing it or torch.

    Attributes:
        name: Its name in ``init_process_group(backend=...)``: lower-case letters, digits and underscores.
        make: Connects an engine with the other members of a group. It imports what it needs when it is called.
        interface: The version of the interface for which it is written. A package writes a number here.
        devices: The types of device whose tensors it transfers. Empty: any.
        available: Whether it can be used here. It is called often, and should import as little as possible.
        missing: Why not, as the rest of the sentence "backend 'NAME' ...", and what the user should install.
        meets_by: The rendezvous of the ranks of a world on this engine, from rank, world size (-1: not set) and timeout
            in seconds. None: by ``init_method``.
    """

    name: str
    make: Callable[[GroupSetup], Engine]
    interface: int
    devices: tuple[str, ...] = ()
    available: Callable[[], bool] = always
    missing: str = "is not available here"
    meets_by: Callable[[int, int, float], Meeting] | None = None
