"""What a worker has executed, for the timeline: its commands with their times, where they are recorded in a file.

A worker executes several hundred thousand commands in a second. A record of each would fill a file in seconds, and
nobody could see them. So short ones that follow each other are recorded together. Nothing here runs where no file is
recorded: the templates of `RecordedTemplates` take the place of the others only then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from allranks.remote.worker.template import CallTemplate, Slots

__all__ = ["ALONE_NS", "TOGETHER_NS", "CommandSlices", "RecordedTemplates"]

ALONE_NS = 20_000
"""A command that takes so long is recorded alone; a pause of that length separates those that are not."""

TOGETHER_NS = 100_000
"""Short commands are recorded together for so long at most."""

_now = time.monotonic_ns


class CommandSlices:
    """Puts short commands that follow each other together.

    Args:
        write: records commands: the number of a name, how many, when the first began, when the last ended.
    """

    def __init__(self, write: Callable[[int, int, int, int], None]) -> None:
        self._write = write
        self._count = 0
        self._began = self._ended = 0
        self._site = 0  # of the one that took longest
        self._longest = 0

    def add(self, site: int, began: int, ended: int) -> None:
        """A command has been executed."""
        took = ended - began
        if took >= ALONE_NS:
            self.flush()
            self._write(site, 1, began, ended)
            return
        if self._count and (ended - self._began > TOGETHER_NS or began - self._ended > ALONE_NS):
            self.flush()
        if not self._count:
            self._began, self._longest = began, -1
        self._count += 1
        self._ended = ended
        if took > self._longest:
            self._site, self._longest = site, took

    def flush(self) -> None:
        """Records those that are put together so far."""
        if self._count:
            self._write(self._site, self._count, self._began, self._ended)
            self._count = 0


class RecordedTemplates(dict[int, CallTemplate]):
    """Templates whose calls are recorded, each made of that in a table when it is called first.

    Args:
        table: the templates.
        slices: where calls are recorded.
        site: the number of a name.

    Attributes:
        slices: where calls are recorded.
    """

    def __init__(self, table: Mapping[int, CallTemplate], slices: CommandSlices, site: Callable[[str], int]) -> None:
        super().__init__()
        self._table = table
        self.slices = slices
        self._site_of = site

    def __missing__(self, number: int) -> CallTemplate:
        table, add = self._table, self.slices.add
        template = table[number]
        site = self._site_of(template.name)

        def run(slots: Slots, buffer: object, at: int) -> None:
            began = _now()
            try:
                table[number].run(slots, buffer, at)  # which may replace itself there
            finally:
                add(site, began, _now())

        made = self[number] = template._replace(run=run)
        return made
