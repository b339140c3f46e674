"""The same line from many ranks, shown once. Pure: time is an argument.

Eight ranks that load a model print the same lines eight times, and lines that differ are lost among them. So a whole
line waits for a moment for the same line of other ranks, and is then shown once, with all their numbers. The lines of
each rank stay in their order, so that the output, separated again by rank, is what each rank wrote. What is no plain
line (a progress bar, a moving cursor) does not wait. It passes to the renderer after the earlier output of its rank.

Unterminated text waits too, as many programs write a line in parts; then it passes, and so does the rest of its line.
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

__all__ = ["WINDOW_S", "Collapse", "Through"]

WINDOW_S = 0.1
_LIMIT = 1 << 16  # longer lines do not wait

_MOVES = re.compile(rb"\r(?!\n)|\x1b(?!\[[0-9;]*m)")  # all but colours and line ends


@dataclass
class _WaitingLine:
    """A line that waits, and the ranks that wrote it."""

    number: int
    line: bytes
    at: float
    stamp: bytes
    ranks: list[int]


@dataclass
class _Rest:
    """What a rank wrote of a line.

    Attributes:
        text: that waits.
        passing: the begin of this line has passed to the renderer, and all of it will.
        last: number of the last line of the rank that waited.
    """

    text: bytes = b""
    passing: bool = False
    last: int = -1


class Through:
    """Stands between ranks and a renderer, and lets everything through.

    Args:
        renderer: what shows lines.
        names: prefixes of lines.
    """

    def __init__(self, renderer: Renderer, names: Callable[[Sequence[int]], bytes]) -> None:
        self.renderer = renderer
        self._names = names

    def feed(self, rank: int, data: bytes, now: float) -> bytes:
        """Takes what a rank wrote; returns what to write now."""
        return self.renderer.feed(rank, data)

    def line(self, rank: int, line: bytes, now: float) -> bytes:
        """Takes a whole line that stands apart from what ``feed`` takes."""
        return self._show_line([rank], line)

    def end(self, rank: int, now: float) -> bytes:
        """Takes it that the rank writes no more."""
        return self.renderer.end(rank)

    def due(self) -> float | None:
        """When to call ``tick``; None if nothing waits."""
        return None

    def tick(self, now: float) -> bytes:
        """Returns what has waited long enough, or for no other rank any more."""
        return b""

    def flush(self) -> bytes:
        """Returns all that waits."""
        return self.tick(math.inf)

    def _show_line(self, ranks: Sequence[int], line: bytes) -> bytes:
        return self.renderer.note(self.renderer.stamp + self._names(ranks) + line)


class Collapse(Through):
    """Lets lines wait for each other.

    Args:
        renderer: what shows lines.
        names: prefixes of lines.
        ranks: whose lines come here.
        window_s: how long a line waits.
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
        self._rests = {rank: _Rest() for rank in ranks}
        self._since: dict[int, float] = {}  # whose text waits since when, oldest first
        self._waiting: deque[_WaitingLine] = deque()
        self._alike: dict[bytes, list[int]] = {}  # line -> numbers of those of _waiting, ascending
        self._by_number: dict[int, _WaitingLine] = {}
        self._count = 0

    def feed(self, rank: int, data: bytes, now: float) -> bytes:
        """See ``Through``."""
        rest = self._rests[rank]
        since = self._since.get(rank, now)
        text = self._take(rank) + data
        if _MOVES.search(text) or (text.find(b"\n", 0, _LIMIT) < 0 and len(text) > _LIMIT):
            return self._pass(rank, text) + self.tick(now)
        out = b""
        if rest.passing:
            end = text.find(b"\n") + 1 or len(text)
            out = self._pass(rank, text[:end])
            text = text[end:]
        *lines, rest.text = text.split(b"\n")
        for line in lines:
            self._say(rank, line, now)
        if rest.text:
            self._since[rank] = now if lines else since
        return out + self.tick(now)

    def line(self, rank: int, line: bytes, now: float) -> bytes:
        """See ``Through``."""
        self._say(rank, line, now)
        return self.tick(now)

    def end(self, rank: int, now: float) -> bytes:
        """See ``Through``."""
        if text := self._take(rank):
            self._say(rank, text, now)
        self._rests[rank].passing = False
        return self.renderer.end(rank) + self.tick(now)

    def due(self) -> float | None:
        """See ``Through``."""
        times = [waiting.at for waiting in islice(self._waiting, 1)] + list(islice(self._since.values(), 1))
        return min(times) + self._window_s if times else None

    def tick(self, now: float) -> bytes:
        """See ``Through``."""
        out = bytearray()
        while self._waiting:
            first = self._waiting[0]
            if first.at + self._window_s > now and len(first.ranks) < len(self._rests):
                break
            out += self._show()
        for rank in [rank for rank, at in self._since.items() if at + self._window_s <= now]:
            out += self._pass(rank, self._take(rank))
        return bytes(out)

    def _take(self, rank: int) -> bytes:
        self._since.pop(rank, None)
        text, self._rests[rank].text = self._rests[rank].text, b""
        return text

    def _say(self, rank: int, line: bytes, now: float) -> None:
        rest = self._rests[rank]
        alike = self._alike.setdefault(line, [])
        place = bisect_right(alike, rest.last)  # not before the last line of this rank
        if place == len(alike):
            waiting = _WaitingLine(self._count, line, now, self.renderer.stamp, [])
            self._count += 1
            self._waiting.append(waiting)
            self._by_number[waiting.number] = waiting
            alike.append(waiting.number)
        rest.last = alike[place]
        self._by_number[rest.last].ranks.append(rank)

    def _show(self) -> bytes:
        """Takes the first of those that wait."""
        waiting = self._waiting.popleft()
        del self._by_number[waiting.number]
        alike = self._alike[waiting.line]
        del alike[0]
        if not alike:
            del self._alike[waiting.line]
        stamp, self.renderer.stamp = self.renderer.stamp, waiting.stamp
        if len(waiting.ranks) == 1 and not self._rests[waiting.ranks[0]].passing:
            out = self.renderer.feed(waiting.ranks[0], waiting.line + b"\n")
        else:
            out = self._show_line(sorted(waiting.ranks), waiting.line)
        self.renderer.stamp = stamp
        return out

    def _pass(self, rank: int, text: bytes) -> bytes:
        """Lets text through to the renderer, after all that its rank wrote before."""
        rest = self._rests[rank]
        out = bytearray()
        while self._waiting and self._waiting[0].number <= rest.last:
            out += self._show()
        out += self.renderer.feed(rank, text)
        rest.passing = not text.endswith(b"\n")
        return bytes(out)
