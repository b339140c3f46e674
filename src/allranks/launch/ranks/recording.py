"""The memory in which a rank records its calls, as its agent holds it: it outlives the rank.

A rank that hangs in a call begins no other one. So an agent only compares, once in a while, how many calls each rank
has begun, and reads more where that number has not changed for a while.
"""

from __future__ import annotations

import mmap
import os
import time

from allranks._trace.memory import create_memory
from allranks._trace.reader import Reader, TraceError

__all__ = ["Recording"]


class Recording:
    """The memory for the calls of one rank.

    Args:
        world_size: of the job.

    Attributes:
        fd: its descriptor, which only this process has.
    """

    def __init__(self, world_size: int) -> None:
        self.fd = create_memory(world_size)
        self._map: mmap.mmap | None = None
        self._reader: Reader | None = None
        self._pid = 0
        self._count = -1
        self._since = 0.0

    @property
    def path(self) -> str:
        """By which the rank opens it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def reader(self) -> Reader | None:
        """What the rank has recorded; None as long as that is nothing. A later program of the rank begins anew."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        try:
            if self._reader is None or self._reader.pid() != self._pid:
                self._reader = Reader(self._map)
                self._pid = self._reader.pid()
        except TraceError:
            self._reader = None
        return self._reader

    def quiet_for(self) -> float:
        """For how many seconds the rank has been in a call and begun no other, as far as was looked; 0: it is in none.

        To be called about once a second.
        """
        reader = self.reader()
        if reader is None:
            return 0.0
        now = time.monotonic()
        if reader.count != self._count:
            self._count, self._since = reader.count, now
        return now - self._since

    def close(self) -> None:
        """Frees it."""
        self._reader = None
        if self._map is not None:
            self._map.close()
        os.close(self.fd)
