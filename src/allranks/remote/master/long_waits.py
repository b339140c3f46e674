"""The record of a master's waits for its workers. Only long waits are recorded, so that short ones cost nothing.

If waits are recorded in a file, all are recorded. The record shows a launcher that the master waits, for which worker,
and at which call site.
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
        """Record a wait for a worker that has become long, or that a file must contain.

        Returns the record, or None if nothing is recorded. The caller calls its ``end`` with whether the wait
        succeeded.

        Args:
            worker: The rank of the worker.
            size: The number of ranks, including the master.
        """
        recorder = memory.recorder(0, size, socket.gethostname())
        if recorder is None:
            return None
        if self._group is None:  # on the first recorded wait, so that short waits leave no trace
            ranks = range(int(os.environ.get("WORLD_SIZE", size)))
            self._group = recorder.add_group("workers", OF_MASTER, 0, ranks)
        return recorder.begin(self._group, _RECV, 0, 0, 0, worker, 0, 0, where(), False)
