"""Bytes of many ranks in, lines of one screen out. Pure: no clock, no descriptor, no process.

Only complete lines are printed, so parts of two ranks' lines never mix. Each line has its rank's prefix. Bytes pass
unchanged, whether or not they are UTF-8. There are two kinds:

- ``Plain`` for pipes and files. A line that carriage returns overwrite is shown in its last state.
- ``Live`` for terminals. The bottom row belongs to one rank's open (unterminated) line. That rank writes to the
  terminal directly, so its progress bar moves. When another rank writes a line, the bar is wiped, the line is printed,
  and the bar is drawn again. Open lines of the other ranks wait; the open line of the lowest rank is shown.

A rank may move the cursor up (bars of several rows) only over its own rows that are still directly above. Other such
movements are dropped, so that a rank never overwrites another rank's lines.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from allranks._base.errors import spans

__all__ = ["Live", "Names", "Plain", "Renderer"]

_COLOURS = (36, 33, 35, 32, 34, 31)  # SGR codes: cyan, yellow, magenta, green, blue, red
_BOLD = 1
_LINE_LIMIT = 1 << 20  # bytes; a longer line is broken, so that a rank without line ends does not fill the memory
_REDRAW_LIMIT = 1 << 16  # bytes of an open line that are kept to draw it again

# "control" moves the cursor, erases, or sets a mode. Other sequences (colors, titles) are part of the text.
_TOKEN = re.compile(
    rb"(?P<newline>\r*\n)|(?P<back>\r)"
    rb"|(?P<control>\x1b\[[0-9;]*[A-HJKSTf]|\x1b\[\?[0-9;]*[hl])"
    rb"|(?P<text>[^\r\n\x1b]+|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b)"
)
# The start of an escape sequence, or carriage returns that a newline may follow in the next read.
_PARTIAL = re.compile(rb"(?:\r+|\x1b(?:\[[0-?]*[ -/]*)?)\Z")
_INVISIBLE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


@dataclass(frozen=True)
class Names:
    """Prefixes of lines: ``[3] ``, or ``[node1:3] `` if the job spans hosts; all have the same width.

    Attributes:
        world_size: number of ranks of the job, including those that are shown elsewhere.
        hosts: the host of each rank; None for one host.
        colour: for a terminal that shows colors.
    """

    world_size: int
    hosts: Sequence[str] | None = None
    colour: bool = False

    @functools.cached_property
    def width(self) -> int:
        """Number of columns of a rank's prefix."""
        return max(len(self._text([rank])) for rank in range(self.world_size)) + len("[] ")

    def each(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the prefix of each rank."""
        return {rank: self.of([rank]) for rank in ranks}

    def of(self, ranks: Sequence[int]) -> bytes:
        """Return the prefix of a line of several ranks: ``[0-2,5] ``, ``[node1:4-7] ``; ``[0-7] `` across hosts."""
        text = f"[{self._text(ranks):>{self.width - len('[] ')}}] ".encode()
        if not self.colour:
            return text
        return b"\x1b[%dm%b\x1b[0m" % (_COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else _BOLD, text)

    def _text(self, ranks: Sequence[int]) -> str:
        hosts = {self.hosts[rank] for rank in ranks} if self.hosts is not None else set()
        return (f"{hosts.pop()}:" if len(hosts) == 1 else "") + spans(ranks, ",")


class Renderer(Protocol):
    """Converts ranks' bytes into a screen's bytes.

    Attributes:
        stamp: the time, which precedes the prefixes; empty for none. Its width is constant.
    """

    stamp: bytes

    def feed(self, rank: int, data: bytes) -> bytes:
        """Process output of a rank. Return the bytes to write now."""
        ...

    def end(self, rank: int) -> bytes:
        """Process the end of a rank's output. Return its unterminated line."""
        ...

    def note(self, text: bytes) -> bytes:
        """Return the bytes that print a line of the launcher's own between the ranks' lines."""
        ...


class Plain:
    """Renderer for pipes and files.

    Args:
        prefixes: the prefix of each rank.
    """

    def __init__(self, prefixes: Mapping[int, bytes]) -> None:
        self.stamp = b""
        self._prefixes = prefixes
        self._open = {rank: bytearray() for rank in prefixes}

    def feed(self, rank: int, data: bytes) -> bytes:
        """See ``Renderer``."""
        *lines, rest = data.split(b"\n")
        line = self._open[rank]
        if lines:
            lines[0] = bytes(line) + lines[0]
            line.clear()
        line += rest
        del line[: _last_state(line)]
        if len(line) > _LINE_LIMIT:
            lines.append(bytes(line))
            line.clear()
        prefix = self.stamp + self._prefixes[rank]
        return b"".join(prefix + text[_last_state(text) :] + b"\n" for text in lines)

    def end(self, rank: int) -> bytes:
        """See ``Renderer``."""
        text = bytes(self._open[rank])
        self._open[rank].clear()
        if not text or (b"\r" in text and not text.strip()):  # the second case is a bar that wiped itself
            return b""
        return self.stamp + self._prefixes[rank] + text + b"\n"

    def note(self, text: bytes) -> bytes:
        """See ``Renderer``."""
        return text + b"\n"


def _last_state(text: bytes | bytearray) -> int:
    """Return the start of the last state of an overwritten line.

    A carriage return at its very end may be half of a line end, so it does not count.
    """
    return text.rfind(b"\r", 0, len(text.rstrip(b"\r"))) + 1


@dataclass
class _Line:
    """The open line of a rank.

    Attributes:
        text: its last state, without cursor movements.
        held: bytes whose meaning depends on the following bytes.
        rewound: a carriage return was seen: the next text replaces this one.
        due: the prefix must still be written to the screen.
    """

    text: bytearray = field(default_factory=bytearray)
    held: bytes = b""
    rewound: bool = False
    due: bool = True

    @property
    def open(self) -> bool:
        return bool(self.text.strip())

    def restart(self) -> None:
        self.text.clear()
        self.rewound, self.due = False, True


class Live:
    """Renderer for a terminal.

    Args:
        prefixes: the prefix of each rank.
        columns: width of the terminal.
        first: the rank whose open line has priority: the rank that reads the terminal.

    Attributes:
        columns: may be changed at any time.
    """

    def __init__(self, prefixes: Mapping[int, bytes], columns: int, first: int | None = None) -> None:
        self.columns = columns
        self._first = first
        self.stamp = b""
        self._prefixes = prefixes
        self._lines = {rank: _Line() for rank in prefixes}
        self._owner: int | None = None  # the rank whose line is on the bottom row; None: the row is empty
        self._drawn_by: int | None = None  # the last owner of the bottom row
        self._above = 0  # rows directly above the bottom row that the owner may go back to
        self._cursor_hidden_by: int | None = None

    def feed(self, rank: int, data: bytes) -> bytes:
        """See ``Renderer``."""
        line = self._lines[rank]
        data = line.held + data
        partial = _PARTIAL.search(data)
        line.held = partial.group() if partial else b""
        data = data[: len(data) - len(line.held)]
        if self._owner not in (None, rank):
            return self._feed_other(rank, data)
        out = self._show(rank) if self._owner is None else b""
        out += self._advance_line(rank, data, drawn=True)
        if not line.open:
            out += self._clear_row() + self._show_lowest()
        return out

    def end(self, rank: int) -> bytes:
        """See ``Renderer``."""
        line = self._lines[rank]
        last = self._name(rank) + bytes(line.text) + b"\n" if line.open else b""
        if self._owner == rank:
            out = self._clear_row() + last
            line.restart()
            out += self._show_lowest()
        else:
            line.restart()
            out = self.note(last.removesuffix(b"\n")) if last else b""
        # A killed rank cannot show the cursor again.
        if self._cursor_hidden_by == rank:
            self._cursor_hidden_by = None
            out += b"\x1b[?25h"
        return out

    def note(self, text: bytes) -> bytes:
        """See ``Renderer``."""
        return self._print_above(text + b"\n", self._owner)

    def _name(self, rank: int) -> bytes:
        return self.stamp + self._prefixes[rank]

    def _feed_other(self, rank: int, data: bytes) -> bytes:
        """Process output of a rank while another rank owns the bottom row."""
        lines = self._advance_line(rank, data, drawn=False)
        assert self._owner is not None
        takes_over = self._order(rank) < self._order(self._owner) and self._lines[rank].open
        if not lines and not takes_over:
            return b""
        return self._print_above(lines, rank if takes_over else self._owner)

    def _print_above(self, lines: bytes, owner: int | None) -> bytes:
        """Print complete lines above the bottom row, which ``owner`` then owns."""
        out = self._clear_row() + lines
        # The rows above now show lines of others, so the owner must not move up.
        self._above = 0
        return out if owner is None else out + self._show(owner)

    def _advance_line(self, rank: int, data: bytes, drawn: bool) -> bytes:
        """Advance a rank's line. Return everything that the rank draws, or the lines that it has completed."""
        line, prefix, out = self._lines[rank], self._name(rank), bytearray()
        for match in _TOKEN.finditer(data):
            kind, token = match.lastgroup, match.group()
            if kind == "newline":
                if not drawn:
                    out += prefix + line.text
                elif line.due:
                    out += prefix
                out += b"\n"
                line.restart()
                self._above += drawn
            elif kind == "back":
                line.rewound = True
                if drawn:
                    out += b"\r"
                    line.due = True
            elif kind == "control":
                if line.rewound and token[-1:] in b"JK":
                    line.text.clear()
                if drawn and line.due and token[-1:] == b"C":  # counted from the rank's own first column
                    out += prefix
                    line.due = False
                if drawn:
                    out += self._control(rank, token)
            else:
                if line.rewound:
                    line.text.clear()
                    line.rewound = False
                if drawn and line.due:
                    out += prefix
                    line.due = False
                line.text += token
                del line.text[:-_REDRAW_LIMIT]
                if drawn:
                    out += token
        return bytes(out)

    def _control(self, rank: int, token: bytes) -> bytes:
        if token == b"\x1b[?25l":
            self._cursor_hidden_by = rank
        elif token == b"\x1b[?25h":
            self._cursor_hidden_by = None
        elif token[-1:] == b"A":
            rows = int(token[2:-1].split(b";")[0] or 1)
            if rows > self._above:
                return b""
            self._above -= rows
        return token

    def _show(self, rank: int) -> bytes:
        """Draw a rank's open line on the empty bottom row, which that rank then owns."""
        line = self._lines[rank]
        # The rows above belong to the previous owner.
        if rank != self._drawn_by:
            self._above = 0
        self._owner = self._drawn_by = rank
        line.due = line.rewound or not line.text
        if not line.text:
            return b""
        return self._name(rank) + bytes(line.text) + (b"\r" if line.rewound else b"")

    def _show_lowest(self) -> bytes:
        rank = min((rank for rank, line in self._lines.items() if line.open), key=self._order, default=None)
        return b"" if rank is None else self._show(rank)

    def _order(self, rank: int) -> tuple[bool, int]:
        return rank != self._first, rank

    def _clear_row(self) -> bytes:
        """Clear the bottom row, which no rank owns then."""
        if self._owner is None:
            return b""
        rank, self._owner = self._owner, None
        line = self._lines[rank]
        if line.due and not line.text:  # a line has just ended, or a carriage return left nothing to keep
            return b""
        line.due = True
        # After a full row the cursor stays on that row until the next character, hence the - 1.
        rows = max(0, _width(self._name(rank) + bytes(line.text)) - 1) // self.columns
        return (b"\x1b[%dA" % rows if rows else b"") + b"\r\x1b[J"


def _width(text: bytes) -> int:
    """Return the number of columns of a text on a terminal."""
    visible = _INVISIBLE.sub(b"", text).decode(errors="replace")
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in visible)
