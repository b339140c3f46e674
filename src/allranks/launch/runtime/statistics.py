"""``--stats`` and ``--metrics``: the agents' reports of their ranks' calls, as a table and as a file."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from allranks._base.files import plain_file
from allranks._trace.stats import JobStats, RankStats, prometheus
from allranks.launch.reporter import Reporter
from allranks.launch.spec.options import STATISTICS_S

__all__ = ["Statistics"]

# A job must run at least this long before outliers are reported without ``--stats``.
_LONG_S = 60.0


class Statistics:
    """Durations of the ranks' calls, from the latest reports.

    Args:
        table: print a table at the end.
        file: file for Prometheus; None for none.
        reporter: prints errors of the file.
    """

    def __init__(self, table: bool, file: Path | None, reporter: Reporter) -> None:
        self._table = table
        self._file = file
        self._reporter = reporter
        self._ranks: dict[int, RankStats] = {}
        self._new = False
        self._write_at = 0.0
        self._refused = 0

    def take(self, rank: RankStats) -> None:
        """Record the report of a rank."""
        self._ranks[rank.rank], self._new = rank, True

    def write_if_due(self) -> None:
        """Write the file if it is due and a new report has arrived. The caller calls it after each batch of reports."""
        now = time.monotonic()
        if self._new and now >= self._write_at:
            self._write_at = now + STATISTICS_S / 2  # agents do not report simultaneously
            self._write()

    def conclude(self) -> bytes:
        """Write the file for the last time. Return the table.

        If no table is requested, return one line for each outlier rank of a job of at least 60 s.
        """
        self._write()
        found = JobStats(self._ranks.values())
        if not self._table:
            warnings = found.warnings() if found.seconds >= _LONG_S and not self._reporter.quiet else []
            return "\n".join(map(self._reporter.line, warnings)).encode()
        first, *lines = found.lines()
        text = [self._reporter.line(first)]
        text += [line if line.startswith(" ") else self._reporter.line(line) for line in lines]
        return "\n".join(text).encode()

    def _write(self) -> None:
        if self._file is None:
            return
        self._new = False
        try:
            _replace(self._file, prometheus(self._ranks.values()))
        except OSError as error:  # the job continues without the file
            # The next write follows after some seconds, so the same error is printed only once.
            if self._refused != error.errno:
                self._refused = error.errno or 0
                self._reporter.report(f"--metrics {self._file}: cannot write the file: {error.strerror}")


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically: a concurrent reader reads either the old text or the new text."""
    file = plain_file(file)
    # In the same folder, because ``os.replace`` is atomic only within one file system.
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
        try:
            new.write(text)
            os.fchmod(new.fileno(), 0o644)  # its reader may be another user
            os.replace(new.name, file)
        # Also after a KeyboardInterrupt, the temporary file must not remain.
        except BaseException:
            os.unlink(new.name)
            raise
