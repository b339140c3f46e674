"""The record of a master's waits for its workers: of those only that take long, so that others cost nothing; of all
where they are recorded in a file.

It is what lets a launcher tell that the master waits, for which worker, and at which line.
"""

from __future__ import annotations

import os
import socket

from allranks import _core
from allranks._call.callsite import where
from allranks._trace import memory
from allranks._trace.inspection import OF_MASTER
from allranks._trace.reader import VERBS

__all__ = ["LongWaits"]

_RECV = VERBS.index("recv")


class LongWaits:
    """The waits of one master."""

    def __init__(self) -> None:
        self._group: int | None = None

    def begin(self, worker: int, size: int) -> _core.OtherCall | None:
        """A wait for a worker has begun to take long, or is to be recorded. Returns its record, whose ``end`` is to be
        called with whether it succeeded; None where nothing is recorded.

        Args:
            worker: its rank.
            size: the number of ranks, with the master.
        """
        recorder = memory.recorder(0, size, socket.gethostname())
        if recorder is None:
            return None
        if self._group is None:
            ranks = range(int(os.environ.get("WORLD_SIZE", size)))
            self._group = recorder.add_group("workers", OF_MASTER, 0, ranks)
        return recorder.begin(self._group, _RECV, 0, 0, 0, worker, 0, 0, where(), False)
