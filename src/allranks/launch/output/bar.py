"""The bar of ``allranks.run(..., progress=True)``: the progress of the slowest rank, in a notebook or on a terminal.

The launcher's loop calls it, so it needs no thread: it draws changes between two turns of the loop. On a terminal, the
screen keeps it below the ranks' lines. In a notebook, it is a separate output, which is updated in place.
"""

from __future__ import annotations

import abc
import html
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from allranks.launch.output.screen import Screen
from allranks.launch.spec.events import RankProgress

__all__ = ["JobBar", "NotebookBar", "TerminalBar", "bar_for"]

_SOON_S = 0.1  # seconds: delay of a redraw after a change
_LATER_S = 1.0  # seconds: interval of redraws without a change: the displayed time
_CELLS = 16


class JobBar(abc.ABC):
    """A bar.

    Args:
        name: name of the function.
        ranks: number of ranks.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self._name = name.rpartition(".")[2]
        self._ranks = ranks
        self._running = ranks
        self._reports: dict[int, RankProgress] = {}
        self._loop: tuple[str, int, float] | None = None  # name, items at the start, start time
        self._ended = False
        self._began = time.monotonic()
        self.due = self._began

    def take(self, report: RankProgress) -> None:
        """Record the progress of a rank."""
        self._reports[report.rank] = report
        if not self._ended:
            self.due = min(self.due, time.monotonic() + _SOON_S)

    def draw(self, running: int, now: float) -> None:
        """Draw the bar if a redraw is due.

        Args:
            running: number of ranks that still run.
            now: the time (``time.monotonic``).
        """
        if not self._ended and (now >= self.due or running != self._running):
            self._running = running
            self.due = now + _LATER_S
            self._show(self.share, self._text(now))

    def end(self, clean: bool, now: float) -> None:
        """Draw the bar for the last time.

        Args:
            clean: whether all ranks have exited without an error.
            now: the time.
        """
        self._running, self._ended, self.due = 0, True, math.inf
        share = float(clean) if self.share is None else self.share
        self._show(share, self._text(now, "done" if clean else "stopped"), last=True)

    @property
    def slowest(self) -> RankProgress | None:
        """The report of the rank with the least progress; None if no rank has reported."""
        return min(self._reports.values(), key=lambda each: each.done / (each.total or 1), default=None)

    @property
    def share(self) -> float | None:
        """The completed fraction; None if it is not known."""
        each = self.slowest
        return min(1.0, each.done / each.total) if each is not None and each.total else None

    def _text(self, now: float, ending: str = "") -> str:
        parts = []
        if (each := self.slowest) is not None:
            # A new loop, or the same one from its start: the rate is measured from here.
            if self._loop is None or self._loop[0] != each.name or each.done < self._loop[1]:
                self._loop = (each.name, each.done, now)
            _, first, began = self._loop
            parts.append(" ".join(filter(None, (each.name, str(each.done) + (f"/{each.total}" if each.total else "")))))
            if each.done > first and now > began:
                rate = (each.done - first) / (now - began)
                parts.append(f"{rate:.3g}/s")
                if each.total and not ending:
                    parts.append(f"{_clock((each.total - each.done) / rate)} left")
            if each.note:
                parts.append(each.note)
        count = f"{self._running} of {self._ranks}" if self._running < self._ranks else str(self._ranks)
        parts.append(ending or f"{count} rank{'s' * (self._ranks != 1)}")
        parts.append(_clock(now - self._began))
        return ", ".join(parts)

    @abc.abstractmethod
    def _show(self, share: float | None, text: str, last: bool = False) -> None:
        """Show the bar, replacing its previous state."""


class TerminalBar(JobBar):
    """A bar on a terminal: the bottom row of a screen."""

    def __init__(self, screen: Screen, name: str, ranks: int) -> None:
        super().__init__(name, ranks)
        self._screen = screen
        utf8 = (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "") == "utf8"
        self._full, self._empty = "\u2501\u2500" if utf8 else "#-"

    def _show(self, share: float | None, text: str, last: bool = False) -> None:
        full = round((share or 0) * _CELLS)
        cells = "" if share is None else self._full * full + self._empty * (_CELLS - full) + " "
        # The last column stays empty, because a full row may wrap.
        line = f"{self._name}: {cells}{text}"[: self._screen.columns - 1]
        self._screen.bar(line.encode(errors="replace"))
        if last:
            self._screen.bar_ended()


class NotebookBar(JobBar):
    """A bar in a notebook: an output that is updated.

    Args:
        display: ``IPython.display.display``.
        name: name of the function.
        ranks: number of ranks.
    """

    def __init__(self, display: Any, name: str, ranks: int) -> None:
        super().__init__(name, ranks)
        self._display = display
        self._handle: Any = None

    def _show(self, share: float | None, text: str, last: bool = False) -> None:
        value = "" if share is None else f' value="{share:.4f}"'
        page = (
            f"<div><b>{html.escape(self._name)}</b>"
            f" <progress{value} style='width:16em;vertical-align:middle'></progress>"
            f" <span style='font-variant-numeric:tabular-nums'>{html.escape(text)}</span></div>"
        )
        share_text = "" if share is None else f" {share:.0%}"
        data = {"text/html": page, "text/plain": f"{self._name}{share_text}: {text}"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def bar_for(screen: Screen, name: str, ranks: int, streams: Sequence[TextIO | None] | None) -> JobBar | None:
    """Return the bar for this process's output; None if that is neither a notebook nor a terminal.

    Args:
        screen: the screen of the ranks' output.
        name: name of the function.
        ranks: number of ranks.
        streams: replacements for this process's stdout and stderr.
    """
    if streams is None:
        return TerminalBar(screen, name, ranks) if screen.has_bar else None
    # A notebook has imported IPython. Elsewhere it is not needed, and may be missing.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return NotebookBar(sys.modules["IPython.display"].display, name, ranks)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
