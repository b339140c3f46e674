"""Settings of the standard streams of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Stdio", "Streams"]


@dataclass(frozen=True)
class Stdio:
    """Settings of a rank's standard streams.

    Attributes:
        stdin: stdin is the launcher's stdin; else it is empty.
        terminal: stdin is the launcher's controlling terminal.
        out_direct: stdout is the launcher's controlling terminal, too.
        err_direct: stderr is the launcher's controlling terminal, too.
        out_tty: stdout is a terminal of the rank's own.
        err_tty: stderr is a terminal of the rank's own.
        merged: stderr goes through the same channel as stdout.
        rows: height of the terminals.
        columns: width of the terminals.
    """

    stdin: bool = False
    terminal: bool = False
    out_direct: bool = False
    err_direct: bool = False
    out_tty: bool = False
    err_tty: bool = False
    merged: bool = False
    rows: int = 24
    columns: int = 80


@dataclass(frozen=True)
class Streams:
    """torchrun's numbers for output streams: 0 none, 1 stdout, 2 stderr, 3 both.

    Attributes:
        of_all: value for all ranks.
        of_some: local rank -> its value; the other ranks then have none.
    """

    of_all: int = 0
    of_some: Mapping[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.of_all or self.of_some)

    def has(self, local_rank: int, stream: int) -> bool:
        """Return True if the value includes a stream (1 or 2) of a rank."""
        chosen = self.of_all if self.of_some is None else self.of_some.get(local_rank, 0)
        return bool(chosen & stream)
