"""Executed commands of a worker, for the timeline. They are recorded with their times if a file is requested.

A worker executes several hundred thousand commands per second. A record of each would fill a file within seconds, and
would be too small to see. Consecutive short commands are therefore recorded together. If no file is recorded, no code
of this module runs: only then the templates of `RecordedTemplates` replace the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from allranks.remote.worker.template import CallTemplate, Slots

__all__ = ["ALONE_NS", "TOGETHER_NS", "CommandSlices", "RecordedTemplates"]

ALONE_NS = 20_000
"""Commands of at least this duration, in ns, are recorded alone. A pause of this length separates short ones."""

TOGETHER_NS = 100_000
"""The longest time, in ns, for which short commands are recorded together."""

_now = time.monotonic_ns


class CommandSlices:
    """Combines consecutive short commands.

    Args:
        write: Records commands: the number of a name, their count, the start of the first and the end of the last.
    """

    def __init__(self, write: Callable[[int, int, int, int], None]) -> None:
        self._write = write
        self._count = 0
        self._began = self._ended = 0
        self._site = 0  # the site of the command that took longest
        self._longest = 0

    def add(self, site: int, began: int, ended: int) -> None:
        """Add an executed command."""
        took = ended - began
        if took >= ALONE_NS:
            self.flush()
            self._write(site, 1, began, ended)
            return
        if self._count and (ended - self._began > TOGETHER_NS or began - self._ended > ALONE_NS):
            self.flush()
        if not self._count:
            self._began, self._longest = began, -1  # -1: the first command always sets the site
        self._count += 1
        self._ended = ended
        if took > self._longest:
            self._site, self._longest = site, took

    def flush(self) -> None:
        """Record the commands that have been combined so far."""
        if self._count:
            self._write(self._site, self._count, self._began, self._ended)
            self._count = 0


class RecordedTemplates(dict[int, CallTemplate]):
    """Templates whose calls are recorded. Each is created from a table on its first call.

    Args:
        table: The templates.
        slices: Receives the calls.
        site: Returns the number of a name.

    Attributes:
        slices: Receives the calls.
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
                # Looked up on each call, because a template may replace itself in the table.
                table[number].run(slots, buffer, at)
            finally:
                add(site, began, _now())

        made = self[number] = template._replace(run=run)
        return made
