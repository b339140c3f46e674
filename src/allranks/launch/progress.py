"""``allranks.progress``: a loop in a function of ``allranks.run``, whose progress the caller's bar shows.

A rank draws nothing itself. It sends a few bytes through the pipe that also returns its result, at most five times per
second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar

from allranks._base.public import publish
from allranks.launch.ranks.rank import this_rank
from allranks.launch.spec.events import RankProgress

__all__ = ["Loop", "progress"]

T = TypeVar("T")

_EVERY_S = 0.2  # seconds; at most five messages per second
_outermost: Loop[object] | None = None


class Loop(Generic[T]):
    """The result of ``progress``: an iterable."""

    def __init__(self, iterable: Iterable[T], total: int | None, name: str) -> None:
        self._iterable = iterable
        self._total = total
        self._name = name
        self._note = ""
        self._done = 0
        self._sent = 0.0

    def note(self, text: str) -> None:
        """Set the text at the end of the bar, for example the loss. It is sent with the next item."""
        self._note = text

    def __iter__(self) -> Iterator[T]:
        global _outermost
        reports = _outermost is None
        if reports:
            _outermost = self  # type: ignore[assignment]
        self._done = 0
        try:
            self._send(reports)
            for item in self._iterable:
                yield item
                self._done += 1
                if time.monotonic() >= self._sent + _EVERY_S:
                    self._send(reports)
        # The last report has the final count, whatever the interval.
        finally:
            self._send(reports)
            if reports:
                _outermost = None

    def _send(self, reports: bool) -> None:
        rank = this_rank()
        if reports and rank is not None:
            self._sent = time.monotonic()
            rank.report_progress(RankProgress(self._done, self._total, self._name, self._note))


def progress(iterable: Iterable[T], total: int | None = None, name: str = "") -> Loop[T]:
    """Iterate, and report the progress to the bar of ``allranks.run(..., progress=True)``.

    The bar shows the slowest rank that reports. In nested loops, only the outermost loop reports. Outside of
    ``allranks.run``, it only iterates.

    Args:
        iterable: the items.
        total: number of items; if None, ``len(iterable)`` if it has a length.
        name: name of the loop in the bar.

    Returns:
        An iterable of the same items. Its ``note(text)`` adds a text to the bar.

    Raises:
        Exception: any exception of the iterable.

    Cost:
        a comparison for each item, and a message of a few bytes at most five times per second.

    Example:
        >>> import allranks
        >>> def work():
        ...     total = 0
        ...     for number in (loop := allranks.progress(range(5), name="sum")):
        ...         total += number
        ...         loop.note(f"total {total}")
        ...     return total
        >>> allranks.run(work, n=2, progress=True)
        [10, 10]

    Source:
        tqdm, for the wrapper around a loop.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    return Loop(iterable, total, name)


publish(globals())
