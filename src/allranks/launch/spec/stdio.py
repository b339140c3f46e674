"""What the standard streams of ranks are to be."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stdio"]


@dataclass(frozen=True)
class Stdio:
    """What a rank's standard streams are to be.

    Attributes:
        stdin: that of the launcher; else it is empty.
        terminal: stdin is the launcher's controlling terminal.
        out_direct: stdout is that terminal, too.
        err_direct: stderr is.
        out_tty: stdout is a terminal of the rank's own.
        err_tty: stderr is.
        merged: stderr goes where stdout goes, through the same channel.
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
