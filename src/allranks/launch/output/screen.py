"""This process's stdout and stderr, and the log files: the destinations of the ranks' output.

It detects the types of both streams (terminal, pipe, the same file). The streams of the ranks, and a renderer for each
of the two, follow from this. ``lines`` assembles lines.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TextIO

from allranks.launch.output.collapse import Collapse, PassThrough
from allranks.launch.output.lines import Live, Names, Plain
from allranks.launch.output.logs import Logs
from allranks.launch.output.nonblocking import NonblockingOutput, TextOutput
from allranks.launch.spec.events import Output
from allranks.launch.spec.options import Display
from allranks.launch.spec.stdio import Stdio

__all__ = ["BAR", "Screen"]

_TAIL_LINES = 20  # hidden lines of a rank that are printed if it is the cause of a failure
BAR = -1  # a pseudo-rank of the launcher, whose open line has priority over all others
_MANY = 8  # from this number of ranks on, lines are collapsed by default


class Screen:
    """Writes the output of ranks, each line with its rank's prefix (unless only rank 0 is shown).

    Args:
        ranks: the ranks that are shown here, which may be a part of the job's ranks.
        display: which output is shown, how it is shown, and which output is kept in files.
        environ: decides on colors (NO_COLOR) and on terminals that cannot redraw a line (TERM).
        world_size: number of ranks of the job; None if all are shown here.
        hosts: the host of each rank of the job; None if the job does not span hosts.
        run_id: the job's name, for log files.
        attempt: number of restarts of the job so far, for log files.
        streams: replacements for this process's stdout and stderr.
        stdin: the rank that has this process's stdin; None if no rank has it.
        terminal: that stdin is this process's controlling terminal.
        watched: all output of the ranks must pass through this object.

    Attributes:
        ranks: the ranks that are shown here.
        logs: the log files.

    Raises:
        ConfigError: a log file cannot be created.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        display: Display,
        environ: Mapping[str, str],
        *,
        world_size: int | None = None,
        hosts: Sequence[str] | None = None,
        run_id: str = "none",
        attempt: int = 0,
        streams: tuple[TextIO | None, TextIO | None] | None = None,
        stdin: int | None = None,
        terminal: bool = False,
        watched: bool = False,
    ) -> None:
        self._streams = streams
        self._stdin = stdin
        self._terminal = terminal
        kept = display.logs is not None or display.timestamps or display.redirects or display.tee
        # Only a single rank writes to the terminal itself, because lines of several ranks would mix.
        self._direct = terminal and not kept and not watched and (world_size or len(ranks)) == 1
        self.ranks = tuple(ranks)
        self._mine = frozenset(ranks)
        self._display = display
        places = _places(self.ranks, hosts)
        chosen = {"0": range(1), "all": self.ranks, "none": range(0)}[display.show]
        only = display.only
        self._shown = [rank for rank in self.ranks if rank in chosen and (only is None or places[rank][1] in only)]
        self.logs = Logs(display, places, run_id, attempt)
        self._hidden_streams = {
            (rank, stream) for rank in self.ranks for stream in (1, 2)
            if rank not in self._shown
            or (display.redirects.has(places[rank][1], stream) and not display.tee.has(places[rank][1], stream))
        }  # fmt: skip
        self._capable = streams is None and environ.get("TERM", "dumb") != "dumb"
        colour = self._capable and not environ.get("NO_COLOR")
        # Two channels would lose the order in which a rank wrote to stdout and stderr.
        self._merged = streams is None and os.path.sameopenfile(1, 2)
        # With ``--show 0`` only one rank is shown, which needs no prefix: its output passes unchanged.
        single_rank_shown = display.show == "0"
        self._hosts = None if hosts is None else list(hosts)  # changes when ranks move
        names = Names(world_size or len(self.ranks), self._hosts)
        self._names = names
        self._prefix_width = (0 if single_rank_shown else names.width) + len(self._stamp())
        collapse = {"auto": len(self._shown) >= _MANY, "always": len(self._shown) > 1, "never": False}[display.collapse]
        self._collapsers: dict[int, PassThrough] = {}
        self._prefixes: list[tuple[Names, dict[int, bytes]]] = []
        for fd in (1,) if self._merged else (1, 2):
            names = replace(names, colour=colour and os.isatty(fd))
            prefixes = dict.fromkeys(self.ranks, b"") if single_rank_shown else names.each(self.ranks)
            self._prefixes += [] if single_rank_shown else [(names, prefixes)]
            prefixes[BAR] = b""
            renderer = Live(prefixes, _window(fd)[1], stdin) if self._live(fd) else Plain(prefixes)
            of = (lambda ranks: b"") if single_rank_shown else names.of
            self._collapsers[fd] = Collapse(renderer, of, self._shown) if collapse else PassThrough(renderer, of)
        self._outputs: dict[int, NonblockingOutput | TextOutput] = {}
        self._tails: dict[int, deque[bytes]] = {rank: deque(maxlen=_TAIL_LINES) for rank, _ in self._hidden_streams}
        self._bare = {stream: Plain(dict.fromkeys(self.ranks, b"")) for stream in (1, 2)}  # lines for files and tails
        # stderr with its own channel that goes to the same file as stdout
        self._apart = Plain(dict.fromkeys(self.ranks, b""))

    def move(self, ranks: Collection[int], host: str) -> None:
        """Record that these ranks are on another host from now on, or that they have joined later."""
        assert self._hosts is not None
        self._hosts += [""] * (max(ranks) + 1 - len(self._hosts))
        for rank in ranks:
            self._hosts[rank] = host
        for names, prefixes in self._prefixes:
            prefixes |= names.each([rank for rank in ranks if rank in self._mine])

    def open(self) -> None:
        """Open the outlets. Call it after the fork of the ranks, so that no rank keeps the reader waiting."""
        streams = self._streams
        self._outputs = {
            fd: NonblockingOutput(fd) if streams is None else TextOutput(streams[fd - 1]) for fd in self._collapsers
        }

    def stdio(self) -> tuple[Stdio, ...]:
        """Return the settings of the ranks' streams, which make the ranks behave as if they wrote here directly."""
        rows, columns = self.size()
        return tuple(self._stdio(rank, rows, columns) for rank in self.ranks)

    def _stdio(self, rank: int, rows: int, columns: int) -> Stdio:
        in_files = [self.logs.has_bytes(rank, stream) for stream in (1, 2)]
        merged = self._merged and not any(in_files)
        out_tty, err_tty = (
            self._live(fd) and not in_files[fd - 1] and (rank, fd) not in self._hidden_streams for fd in (1, 2)
        )
        has_stdin = rank == self._stdin
        out_direct, err_direct = (
            self._direct and has_stdin and (rank, fd) not in self._hidden_streams and _is_stdin(fd) for fd in (1, 2)
        )
        return Stdio(
            has_stdin,
            has_stdin and self._terminal,
            out_direct,
            err_direct,
            out_tty and not out_direct,
            err_tty and not self._merged and not err_direct,
            merged,
            rows,
            columns,
        )

    def size(self) -> tuple[int, int]:
        """Return the rows and columns that are available to a rank."""
        rows, columns = _window(1 if self._live(1) else 2)
        return rows, max(10, columns - self._prefix_width)

    def resized(self) -> None:
        """Read the new size of the terminal."""
        for fd, way in self._collapsers.items():
            if isinstance(way.renderer, Live):
                way.renderer.columns = _window(fd)[1]

    def take(self, output: Output) -> None:
        """Process output of a rank. ``flush`` writes it."""
        rank, stream, data = output.rank, output.stream, output.data
        now = self._set_time()
        if not self._display.timestamps:
            self.logs.put_bytes(rank, stream, data)
        hidden = (rank, stream) in self._hidden_streams
        if not hidden:
            if stream in self._collapsers:
                self._put(stream, self._collapsers[stream].feed(rank, data, now))
            else:
                self._put_apart(rank, self._apart.feed(rank, data), now)
        if hidden or self.logs.has_lines(rank) or self._display.timestamps:
            self._keep(rank, stream, self._bare[stream].feed(rank, data))

    def end(self, rank: int) -> None:
        """Process the end of a rank's output. Ignored, as in the methods below, if the rank is shown elsewhere."""
        if rank not in self._mine:
            return
        now = self._set_time()
        self._put_apart(rank, self._apart.end(rank), now)
        if rank in self._shown:
            for fd, way in self._collapsers.items():
                self._put(fd, way.end(rank, now))
        for stream, bare in self._bare.items():
            self._keep(rank, stream, bare.end(rank))

    def note(self, text: bytes) -> None:
        """Add lines of the launcher's own, for stderr, after all earlier output."""
        self.settle()
        fd = 1 if self._merged else 2
        self._put(fd, self._collapsers[fd].renderer.note(text))

    def print_lines(self, ranks: Sequence[int], lines: Sequence[bytes]) -> None:
        """Add lines about ranks, for stderr and for their log files, whether or not the ranks' output is shown."""
        self._set_time()
        fd = 1 if self._merged else 2
        for line in lines:
            self.note(self._collapsers[fd].renderer.stamp + self._names.of(ranks) + line)
        for rank in self._mine.intersection(ranks):
            self.logs.put_lines(rank, b"".join(self._bare[2].stamp + line + b"\n" for line in lines))

    @property
    def has_bar(self) -> bool:
        """Whether ``bar`` shows a bar: stderr, or the stream that replaces it, is a terminal."""
        return self._live(self._bar_fd)

    def bar(self, text: bytes) -> None:
        """Show the bar, a line below all others, with this text; remove it if the text is b""."""
        self._put(self._bar_fd, self._collapsers[self._bar_fd].renderer.feed(BAR, b"\r" + text + b"\x1b[K"))

    def bar_ended(self) -> None:
        """Keep the last state of the bar on the screen, as a line of its own."""
        self._put(self._bar_fd, self._collapsers[self._bar_fd].renderer.end(BAR))

    @property
    def columns(self) -> int:
        """The width of the terminal with the bar."""
        return _window(self._bar_fd)[1]

    @property
    def _bar_fd(self) -> int:
        return 1 if self._merged else 2

    def settle(self) -> None:
        """Show all lines that wait for the same line of other ranks."""
        for fd, way in self._collapsers.items():
            self._put(fd, way.flush())

    def due(self) -> float | None:
        """Return when to call ``flush`` even without new output (``time.monotonic``); None for never."""
        return min((due for way in self._collapsers.values() if (due := way.due()) is not None), default=None)

    def log(self, rank: int, text: str) -> None:
        """Add text to a rank's log file only."""
        if rank in self._mine:
            self.logs.put_lines(rank, text.encode())

    def tail(self, rank: int) -> list[bytes]:
        """Return the last lines of a rank that are not shown."""
        return list(self._tails.get(rank, ()))

    def flush(self) -> list[tuple[str, OSError]]:
        """Write as much of the queued output as is possible without waiting.

        Returns:
            The destinations that are no longer writable, with the errors; each is returned once. BrokenPipeError: its
            reader has closed the pipe.
        """
        lost = self.logs.flush()
        now = time.monotonic()
        for fd, output in self._outputs.items():
            self._put(fd, self._collapsers[fd].tick(now))
            try:
                output.flush()
            except OSError as error:
                lost.append(("stdout" if fd == 1 else "stderr", error))
        return lost

    @property
    def blocked(self) -> set[int]:
        """Descriptors that must become writable before ``flush`` can continue."""
        return {output.fd for output in self._outputs.values() if output.backlog}

    @property
    def backlog(self) -> int:
        """Number of bytes that cannot be written before earlier ones are read."""
        return sum(output.backlog for output in self._outputs.values())

    def close(self) -> None:
        """Drop the bytes that are not written, and close the log files."""
        for output in self._outputs.values():
            output.close()
        self.logs.close()

    def _put(self, fd: int, data: bytes) -> None:
        self._outputs[fd].put(data)

    def _put_apart(self, rank: int, lines: bytes, now: float) -> None:
        for line in lines.split(b"\n")[:-1]:
            self._put(1, self._collapsers[1].line(rank, line, now))

    def _keep(self, rank: int, stream: int, lines: bytes) -> None:
        self.logs.put_lines(rank, lines)
        if self._display.timestamps:
            self.logs.put_bytes(rank, stream, lines)
        if (rank, stream) in self._hidden_streams:
            self._tails[rank].extend(lines.splitlines())

    def _set_time(self) -> float:
        stamp = self._stamp()
        for renderer in (*(way.renderer for way in self._collapsers.values()), *self._bare.values()):
            renderer.stamp = stamp
        return time.monotonic()

    def _stamp(self) -> bytes:
        if not self._display.timestamps:
            return b""
        return datetime.now().isoformat(" ", "milliseconds").encode() + b" "

    def _live(self, fd: int) -> bool:
        return self._capable and os.isatty(fd)


def _places(ranks: Sequence[int], hosts: Sequence[str] | None) -> dict[int, tuple[str, int]]:
    """Return host and local rank of each rank."""
    names = ["" if hosts is None else hosts[rank] for rank in ranks]
    return {rank: (name, names[:n].count(name)) for n, (rank, name) in enumerate(zip(ranks, names, strict=True))}


def _is_stdin(fd: int) -> bool:
    """Return whether a descriptor is the same terminal as stdin."""
    return os.isatty(fd) and os.fstat(fd).st_rdev == os.fstat(0).st_rdev


def _window(fd: int) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return rows or 24, columns or 80
