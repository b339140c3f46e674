"""The same line from many ranks, shown once. Pure: time is an argument.

Eight ranks that load a model print the same lines eight times, and differing lines are hard to find among them.
Therefore a complete line waits a moment for the same line of other ranks. It is then shown once, with the numbers of
all these ranks. The lines of each rank stay in order: separated again by rank, the output is what each rank wrote.
Output that is no plain line (a progress bar, a cursor movement) does not wait. It passes to the renderer after the
earlier output of its rank.

Unterminated text waits too, because many programs write a line in parts. After the wait it passes, and so does the rest
of its line.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from allranks.launch.output.lines import Renderer

__all__ = ["WINDOW_S", "Collapse", "PassThrough"]

WINDOW_S = 0.1  # seconds that a line waits at most
_LIMIT = 1 << 16  # bytes; longer lines do not wait

_MOVES = re.compile(rb"\r(?!\n)|\x1b(?!\[[0-9;]*m)")  # everything except colors and line ends


@dataclass
class _WaitingLine:
    """A line that waits, and the ranks that wrote it."""

    number: int
    line: bytes
    at: float
    stamp: bytes
    ranks: list[int]


@dataclass
class _PartialLine:
    """The unterminated line of a rank.

    Attributes:
        text: the text that waits.
        passing: the start of this line has passed to the renderer, so the rest will pass, too.
        last: number of the rank's last line that waited.
    """

    text: bytes = b""
    passing: bool = False
    last: int = -1


class PassThrough:
    """Connects ranks with a renderer, and passes everything through.

    Args:
        renderer: shows lines.
        names: prefixes of lines.
    """

    def __init__(self, renderer: Renderer, names: Callable[[Sequence[int]], bytes]) -> None:
        self.renderer = renderer
        self._names = names

    def feed(self, rank: int, data: bytes, now: float) -> bytes:
        """Process output of a rank. Return the bytes to write now."""
        return self.renderer.feed(rank, data)

    def line(self, rank: int, line: bytes, now: float) -> bytes:
        """Process a complete line that is separate from the data of ``feed``."""
        return self._show_line([rank], line)

    def end(self, rank: int, now: float) -> bytes:
        """Process the end of a rank's output."""
        return self.renderer.end(rank)

    def due(self) -> float | None:
        """Return the time when to call ``tick``; None if nothing waits."""
        return None

    def tick(self, now: float) -> bytes:
        """Return the lines that have waited long enough, or that no other rank can still write."""
        return b""

    def flush(self) -> bytes:
        """Return all waiting lines."""
        return self.tick(math.inf)

    def _show_line(self, ranks: Sequence[int], line: bytes) -> bytes:
        return self.renderer.note(self.renderer.stamp + self._names(ranks) + line)


class Collapse(PassThrough):
    """Makes lines wait for the same line of other ranks.

    Args:
        renderer: shows lines.
        names: prefixes of lines.
        ranks: the ranks whose lines it receives.
        window_s: seconds that a line waits.
    """

    def __init__(
        self,
        renderer: Renderer,
        names: Callable[[Sequence[int]], bytes],
        ranks: Sequence[int],
        window_s: float = WINDOW_S,
    ) -> None:
        super().__init__(renderer, names)
        self._window_s = window_s
        self._partial_lines = {rank: _PartialLine() for rank in ranks}
        self._since: dict[int, float] = {}  # rank -> time since which its text waits, oldest first
        self._waiting: deque[_WaitingLine] = deque()
        self._alike: dict[bytes, list[int]] = {}  # line -> numbers of its entries in _waiting, ascending
        self._by_number: dict[int, _WaitingLine] = {}
        self._count = 0

    def feed(self, rank: int, data: bytes, now: float) -> bytes:
        """See ``PassThrough``."""
        partial = self._partial_lines[rank]
        since = self._since.get(rank, now)
        text = self._take_partial(rank) + data
        if _MOVES.search(text) or (text.find(b"\n", 0, _LIMIT) < 0 and len(text) > _LIMIT):
            return self._pass_through(rank, text) + self.tick(now)
        out = b""
        if partial.passing:
            end = text.find(b"\n") + 1 or len(text)
            out = self._pass_through(rank, text[:end])
            text = text[end:]
        *lines, partial.text = text.split(b"\n")
        for line in lines:
            self._add_line(rank, line, now)
        if partial.text:
            # A continued text keeps its time, so that no part of it waits longer than the window.
            self._since[rank] = now if lines else since
        return out + self.tick(now)

    def line(self, rank: int, line: bytes, now: float) -> bytes:
        """See ``PassThrough``."""
        self._add_line(rank, line, now)
        return self.tick(now)

    def end(self, rank: int, now: float) -> bytes:
        """See ``PassThrough``."""
        if text := self._take_partial(rank):
            self._add_line(rank, text, now)
        self._partial_lines[rank].passing = False
        return self.renderer.end(rank) + self.tick(now)

    def due(self) -> float | None:
        """See ``PassThrough``."""
        times = [waiting.at for waiting in islice(self._waiting, 1)] + list(islice(self._since.values(), 1))
        return min(times) + self._window_s if times else None

    def tick(self, now: float) -> bytes:
        """See ``PassThrough``."""
        out = bytearray()
        while self._waiting:
            first = self._waiting[0]
            if first.at + self._window_s > now and len(first.ranks) < len(self._partial_lines):
                break
            out += self._show()
        for rank in [rank for rank, at in self._since.items() if at + self._window_s <= now]:
            out += self._pass_through(rank, self._take_partial(rank))
        return bytes(out)

    def _take_partial(self, rank: int) -> bytes:
        self._since.pop(rank, None)
        text, self._partial_lines[rank].text = self._partial_lines[rank].text, b""
        return text

    def _add_line(self, rank: int, line: bytes, now: float) -> None:
        partial = self._partial_lines[rank]
        alike = self._alike.setdefault(line, [])
        place = bisect_right(alike, partial.last)  # not before the last line of this rank
        if place == len(alike):
            waiting = _WaitingLine(self._count, line, now, self.renderer.stamp, [])
            self._count += 1
            self._waiting.append(waiting)
            self._by_number[waiting.number] = waiting
            alike.append(waiting.number)
        partial.last = alike[place]
        self._by_number[partial.last].ranks.append(rank)

    def _show(self) -> bytes:
        """Remove the first waiting line, and return the bytes that show it."""
        waiting = self._waiting.popleft()
        del self._by_number[waiting.number]
        alike = self._alike[waiting.line]
        del alike[0]
        if not alike:
            del self._alike[waiting.line]
        # The line shows the time when it was first written, not when it is printed.
        stamp, self.renderer.stamp = self.renderer.stamp, waiting.stamp
        # ``feed`` would append to an unterminated line of this rank that the renderer already holds.
        if len(waiting.ranks) == 1 and not self._partial_lines[waiting.ranks[0]].passing:
            out = self.renderer.feed(waiting.ranks[0], waiting.line + b"\n")
        else:
            out = self._show_line(sorted(waiting.ranks), waiting.line)
        self.renderer.stamp = stamp
        return out

    def _pass_through(self, rank: int, text: bytes) -> bytes:
        """Pass text to the renderer, after the earlier output of its rank."""
        partial = self._partial_lines[rank]
        out = bytearray()
        # Earlier lines of this rank must be printed first, and with them all lines before these.
        while self._waiting and self._waiting[0].number <= partial.last:
            out += self._show()
        out += self.renderer.feed(rank, text)
        partial.passing = not text.endswith(b"\n")
        return bytes(out)
