"""The memory in which a rank records its calls. Its agent holds it, so it outlives the rank."""

from __future__ import annotations

import mmap
import os

from allranks._trace.inspection import QuietClock
from allranks._trace.memory import create_memory
from allranks._trace.reader import RecordedCall, TraceError, TraceReader

__all__ = ["RankRecording"]


class RankRecording:
    """The memory for the calls of one rank.

    Args:
        world_size: world size of the job.

    Attributes:
        fd: its descriptor, which only this process has.
    """

    def __init__(self, world_size: int) -> None:
        self.fd = create_memory(world_size)
        self._map: mmap.mmap | None = None
        self._reader: TraceReader | None = None
        self._pid = 0
        self._clock = QuietClock()

    @property
    def path(self) -> str:
        """The path with which the rank opens it."""
        # A memfd has no name in a file system.
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def reader(self) -> TraceReader | None:
        """Return a reader of the rank's recorded calls; None before the first one, and after `close`.

        A later program of the rank starts a new recording, with a new reader.
        """
        if self.fd < 0:
            return None
        if self._map is None:
            self._map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        try:
            if self._reader is None or self._reader.pid() != self._pid:
                self._reader = TraceReader(self._map)
                self._pid = self._reader.pid()
        except TraceError:
            self._reader = None
        return self._reader

    def long_wait(self, first_s: float) -> tuple[RecordedCall, float] | None:
        """Return a call that exceeds a limit; see ``QuietClock``."""
        reader = self.reader()
        return None if reader is None else self._clock.long_wait(reader, first_s)

    def close(self) -> None:
        """Free the memory."""
        self._reader = None
        if self._map is not None:
            self._map.close()
        os.close(self.fd)
        self.fd = -1
