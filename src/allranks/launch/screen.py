"""This process's stdout and stderr, and the log files: where the ranks' output goes.

Asks what the two are (terminal, pipe, the same file), which also says what the ranks' own are to be, and picks a
renderer for each. How lines are put together is ``output``'s business.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from allranks.launch.messages import Output
from allranks.launch.options import Show
from allranks.launch.outlet import Outlet
from allranks.launch.output import Live, Plain, Renderer, prefixes
from allranks.launch.wires import Stdio

__all__ = ["Screen", "ensure_standard_streams"]

_TAIL_LINES = 20


def ensure_standard_streams() -> None:
    """Opens those of descriptors 0 to 2 that are closed, so that no pipe of ours gets such a number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


class Screen:
    """Writes what the ranks write, each line behind its rank's number (unless only rank 0 is shown).

    Args:
        nproc: number of ranks.
        show: whose output is shown.
        logs: folder for one file per rank; None for no files.
        environ: decides on colours (NO_COLOR) and on terminals that cannot redraw a line (TERM).

    Attributes:
        nproc: number of ranks.
    """

    def __init__(self, nproc: int, show: Show, logs: Path | None, environ: Mapping[str, str]) -> None:
        self.nproc = nproc
        self._shown = {"0": range(1), "all": range(nproc), "none": range(0)}[show]
        self._capable = environ.get("TERM", "dumb") != "dumb"
        colour = self._capable and not environ.get("NO_COLOR")
        self._merged = os.path.sameopenfile(1, 2)
        self._renderers: dict[int, Renderer] = {}
        # One rank's output alone needs no telling apart: it passes as that rank writes it.
        alone = show == "0"
        self._prefix_width = 0 if alone else len(prefixes(nproc)[0])
        for fd in (1,) if self._merged else (1, 2):
            names = [b""] * nproc if alone else prefixes(nproc, colour=colour and os.isatty(fd))
            self._renderers[fd] = Live(names, _window(fd)[1]) if self._live(fd) else Plain(names)
        self._outlets: dict[int, Outlet] = {}
        hidden = [rank for rank in range(nproc) if rank not in self._shown]
        self._tails: dict[int, deque[bytes]] = {rank: deque(maxlen=_TAIL_LINES) for rank in hidden}
        self._bare = {stream: Plain([b""] * nproc) for stream in (1, 2)}  # lines for files and tails
        self._files: list[FileIO] = []
        if logs is not None:
            self._files = [open(logs / f"rank{rank}.log", "wb", buffering=0) for rank in range(nproc)]  # noqa: SIM115
        self._logged = [bytearray() for _ in self._files]

    def open(self) -> None:
        """Makes ready to write. After the ranks are forked, so that none keeps our reader waiting for its end."""
        self._outlets = {fd: Outlet(fd) for fd in self._renderers}

    def stdio(self) -> tuple[Stdio, ...]:
        """What the ranks' stdout and stderr are to be, so that the ranks behave as if they wrote here themselves."""
        rows, columns = self.size()
        shown = Stdio(self._live(1), not self._merged and self._live(2), self._merged, rows, columns)
        hidden = Stdio(merged=self._merged)
        return tuple(shown if rank in self._shown else hidden for rank in range(self.nproc))

    def size(self) -> tuple[int, int]:
        """Rows and columns that a rank has for itself."""
        rows, columns = _window(1 if self._live(1) else 2)
        return rows, max(10, columns - self._prefix_width)

    def resized(self) -> None:
        """Takes it that the terminal's size has changed."""
        for fd, renderer in self._renderers.items():
            if isinstance(renderer, Live):
                renderer.columns = _window(fd)[1]

    def take(self, output: Output) -> None:
        """Takes what a rank wrote. Written by ``flush``."""
        rank, fd = output.rank, output.stream
        if rank in self._shown:
            self._outlets[fd].put(self._renderers[fd].feed(rank, output.data))
        if self._files or rank in self._tails:
            self._keep(rank, self._bare[fd].feed(rank, output.data))

    def end(self, rank: int) -> None:
        """Takes it that a rank writes no more."""
        for fd, renderer in self._renderers.items():
            self._outlets[fd].put(renderer.end(rank))
        for bare in self._bare.values():
            self._keep(rank, bare.end(rank))

    def note(self, text: bytes) -> None:
        """Takes lines of the launcher's own, for stderr."""
        fd = 1 if self._merged else 2
        self._outlets[fd].put(self._renderers[fd].note(text))

    def log(self, rank: int, text: str) -> None:
        """Adds to a rank's log file only."""
        if self._files:
            self._logged[rank] += text.encode()

    def tail(self, rank: int) -> list[bytes]:
        """The last lines of a rank whose output is not shown."""
        return list(self._tails.get(rank, ()))

    def flush(self) -> list[tuple[str, OSError]]:
        """Writes of what was taken as much as is possible without waiting.

        Returns:
            What cannot be written to any more, and why; each is named once. BrokenPipeError: its reader is gone.
        """
        lost: list[tuple[str, OSError]] = []
        try:
            for rank, waiting in enumerate(self._logged):
                while waiting:
                    del waiting[: self._files[rank].write(waiting)]
        except OSError as error:
            self._close_files()
            lost.append(("--logs", error))
        for fd, outlet in self._outlets.items():
            try:
                outlet.flush()
            except OSError as error:
                lost.append(("stdout" if fd == 1 else "stderr", error))
        return lost

    @property
    def blocked(self) -> set[int]:
        """Descriptors that must become writable before ``flush`` can write on."""
        return {outlet.fd for outlet in self._outlets.values() if outlet.backlog}

    @property
    def backlog(self) -> int:
        """Bytes that wait for somebody to read what is before them."""
        return sum(outlet.backlog for outlet in self._outlets.values())

    def close(self) -> None:
        """Drops what is not written, and closes the log files."""
        for outlet in self._outlets.values():
            outlet.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._files, self._logged = [], []

    def _keep(self, rank: int, lines: bytes) -> None:
        if self._files:
            self._logged[rank] += lines
        if rank in self._tails:
            self._tails[rank].extend(lines.splitlines())

    def _live(self, fd: int) -> bool:
        return self._capable and os.isatty(fd)


def _window(fd: int) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return rows or 24, columns or 80
