"""Who belongs to an elastic job, as its launcher decides: the table of seats in the launcher's store.

A seat is a rank's place in the job: its number (the rank that the launcher started it as) stays the same, whoever sits
there. A seat whose process was lost may be taken by another process, which is its next start. A host that comes later
brings new seats, or takes those of a host that was lost. The launcher is the parent of all ranks, or of their agents,
and learns of every exit; it writes the table whenever a seat changes. Ranks read it where they decide who goes on
(``succession``): they wait for a seat that is ``STARTING``, go on without one that is ``GONE``, and take one that is
``OPTIONAL`` if its process is there.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["ELASTIC", "GONE", "OPTIONAL", "RUNNING", "START", "STARTING", "TABLE_KEY", "Seat", "SeatTable"]

ELASTIC = "ALLRANKS_ELASTIC"
"""Set to 1 in the ranks of a job whose launcher writes the table."""

START = "ALLRANKS_START"
"""The number of processes that had this rank's seat before it."""

TABLE_KEY = "allranks/elastic/seats"
"""The key of the table in the launcher's store."""

RUNNING = "running"
STARTING = "starting"
OPTIONAL = "optional"
GONE = "gone"


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place in the job.

    Attributes:
        number: the rank as which the launcher started it.
        start: how many processes had the seat before the present one.
        state: ``RUNNING``; ``STARTING``: its next process will come, and is to be waited for; ``OPTIONAL``: its process
            comes later than the others, and is waited for only once it is a member; ``GONE``: nobody will come.
        done: its process has ended with code 0.
    """

    number: int
    start: int = 0
    state: str = RUNNING
    done: bool = False


class SeatTable(msgspec.Struct, frozen=True, array_like=True):
    """All seats of a job.

    Attributes:
        version: grows with every change.
        least: the number of ranks without which the job does not go on.
        seats: by number.
    """

    version: int
    least: int
    seats: tuple[Seat, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SeatTable:
        return msgspec.msgpack.decode(data, type=cls)

    def find(self, number: int) -> Seat | None:
        return next((seat for seat in self.seats if seat.number == number), None)

    def changed(self, seats: Iterable[Seat]) -> SeatTable:
        """The next table, in which these seats have taken the place of those with the same numbers."""
        found = {seat.number: seat for seat in self.seats} | {seat.number: seat for seat in seats}
        return SeatTable(self.version + 1, self.least, tuple(found[number] for number in sorted(found)))
