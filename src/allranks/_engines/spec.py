"""What allranks knows of an engine before it makes one. Torch is not imported here: the launcher lists engines.

An installed package brings an engine by an entry point of the group ``allranks.engines``. ``registry`` finds both.
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
"""The version of the interface between allranks and an engine. It grows with each change that breaks an engine."""

OLDEST = 1
"""The oldest version that this allranks takes."""

RECORD_BYTES = 26
"""The most that an engine gives to an `Exchange`. What new_group gathers grows with it."""

Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Gives every rank of the group every rank's record, by rank."""


class GroupSetup(NamedTuple):
    """The group that an engine is made for.

    Attributes:
        rank: this process in the group.
        members: who is in the group, by rank: ``machine``, ``host``, ``pid``, ``addresses``, and ``rank`` in the world.
        exchange: gives the members each other's addresses. It takes a record of at most 26 bytes, and returns
            those of all members by rank, each filled up to 26 bytes with zeros. It is called at most once.
        group_name: for errors.
        timeout_s: of the connecting and of every later call, in seconds.
        parent: the group from which this one is made, on every rank; None for the world.
    """

    rank: int
    members: Sequence[Member]
    exchange: Exchange
    group_name: str
    timeout_s: float
    parent: Parent | None = None


class Meeting(Protocol):
    """All ranks of a job have met: what an engine's ``meets_by`` returns.

    Attributes:
        rank: this process in the job.
        members: all processes, by rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def members(self) -> Sequence[Member]: ...

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's record, by rank."""

    def close(self) -> None:
        """The world is made, or was not."""


def always() -> bool:
    """The engine is in every installation."""
    return True


@dataclass(frozen=True)
class EngineSpec:
    """An engine, described without importing it or torch.

    Attributes:
        name: what ``init_process_group(backend=...)`` calls it: small letters, digits and underscores.
        make: connects an engine with the other members of a group. It imports what it needs when it is called.
        interface: the version of the interface that it is written for. A package writes a number here.
        devices: the types of device whose tensors it moves; empty: any.
        available: whether it can be used here. It is asked often, and imports no more than it must.
        missing: why not, as the rest of the sentence "backend 'NAME' ...", and what to install.
        meets_by: how the ranks of a world on this engine meet, from rank, world size (-1: not given) and timeout in
            seconds; None: by ``init_method``.
    """

    name: str
    make: Callable[[GroupSetup], Engine]
    interface: int
    devices: tuple[str, ...] = ()
    available: Callable[[], bool] = always
    missing: str = "is not available here"
    meets_by: Callable[[int, int, float], Meeting] | None = None
