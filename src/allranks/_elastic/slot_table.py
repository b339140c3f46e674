"""Membership of an elastic job, as its launcher decides it: the table of rank slots in the launcher's store.

The number of a rank slot is the rank that the launcher started first for it. It does not change if another process
takes the slot. If the process of a slot is lost, another process may take the slot; it is the next start of the slot. A
host that joins later adds new slots, or takes the slots of a lost host. The launcher is the parent of all ranks, or of
their agents, and detects every exit. It writes the table whenever a slot changes. Ranks read the table when they decide
on the next generation (``membership_change``). They wait for a slot that is ``STARTING``, and continue without a slot
that is ``GONE``. They include an ``OPTIONAL`` slot if its process is present.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["ELASTIC", "GONE", "OPTIONAL", "RUNNING", "START", "STARTING", "TABLE_KEY", "RankSlot", "SlotTable"]

ELASTIC = "ALLRANKS_ELASTIC"
"""Name of the variable that is 1 in the ranks of a job whose launcher writes the table."""

START = "ALLRANKS_START"
"""Name of the variable with the number of processes that had this rank slot before."""

TABLE_KEY = "allranks/elastic/slots"
"""Key of the table in the launcher's store."""

RUNNING = "running"
STARTING = "starting"
OPTIONAL = "optional"
GONE = "gone"


class RankSlot(msgspec.Struct, frozen=True, array_like=True):
    """One rank slot of the job.

    Attributes:
        number: The rank as which the launcher started it.
        start: The number of processes that had the slot before the present one.
        state: ``RUNNING``. ``STARTING``: its next process will join, and the ranks wait for it. ``OPTIONAL``: its
            process joins later than the others, and the ranks wait for it only after it has become a member. ``GONE``:
            no process will join.
        done: Its process has exited with code 0.
    """

    number: int
    start: int = 0
    state: str = RUNNING
    done: bool = False


class SlotTable(msgspec.Struct, frozen=True, array_like=True):
    """All rank slots of a job.

    Attributes:
        version: Increases with every change.
        least: The number of ranks without which the job does not continue.
        slots: The slots, by number.
    """

    version: int
    least: int
    slots: tuple[RankSlot, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SlotTable:
        return msgspec.msgpack.decode(data, type=cls)

    def find(self, number: int) -> RankSlot | None:
        return next((slot for slot in self.slots if slot.number == number), None)

    def changed(self, slots: Iterable[RankSlot]) -> SlotTable:
        """Return the next table, in which these slots replace the slots with the same numbers."""
        found = {slot.number: slot for slot in self.slots} | {slot.number: slot for slot in slots}
        return SlotTable(self.version + 1, self.least, tuple(found[number] for number in sorted(found)))
