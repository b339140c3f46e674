"""Progress displays for the terminal: a temporary line that disappears before the result is printed.

`TerminalProgress` shows a text. `LoopBar` shows the bytes that are done, the rate and the remaining time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from allranks._base.console import is_redrawable
from allranks._base.threads import Daemon

__all__ = ["LoopBar", "TerminalProgress"]

_LONG_S = 2.0  # shorter commands show no progress
_AGAIN_S = 0.5  # seconds between two updates of the line
_CLEAR = "\r\x1b[K"


class TerminalProgress:
    """A line on stderr, shown on a terminal after the command has run for 2 s.

    Args:
        name: The name of the command.
        shown: Whether this process displays the progress.
    """

    def __init__(self, name: str, shown: bool = True) -> None:
        self._name = name
        self._words = ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._shown = shown
        self._drawn = False
        # Protects the terminal: the thread must not draw its line between `_clear` and the output of `put`.
        self._lock = threading.Lock()
        self._thread = Daemon(target=self._draw, name=name) if shown and is_redrawable(sys.stderr) else None

    def __enter__(self) -> TerminalProgress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            # Before the line is cleared: the thread could otherwise draw it again.
            self._thread.join()
        self._clear()

    def at(self, words: str) -> None:
        """Set the description of the current action."""
        self._words = words

    def put(self, text: str) -> None:
        """Print lines of the result to stdout. They replace the progress line."""
        if self._shown:
            with self._lock:
                self._clear()
                print(text, flush=True)

    def _draw(self) -> None:
        wait_s = _LONG_S
        while not self._ended.wait(wait_s):
            wait_s = _AGAIN_S
            line = f"{self._name}: {self._words} ({time.monotonic() - self._began:.0f} s)"
            with self._lock:
                # One column less than the terminal: a full line can wrap, and `_CLEAR` erases one line only.
                sys.stderr.write(_CLEAR + line[: _columns() - 1])
                sys.stderr.flush()
                self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._drawn = False


class LoopBar:
    """A progress bar on stderr, shown on a terminal after the command has run for 2 s.

    Args:
        name: The name of the command.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._is_shown = False
        self._bars: Any = _bars() if is_redrawable(sys.stderr) else None
        self._task = None if self._bars is None else self._bars.add_task(name, total=None)

    def __enter__(self) -> LoopBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._bars.stop()

    def at(self, words: str, done: int, total: int | None) -> None:
        """Update the progress.

        Args:
            words: The current action.
            done: The number of bytes that are done.
            total: The total number of bytes. None: not known.
        """
        if self._bars is None:
            return
        self._bars.update(self._task, description=f"{self._name}: {words}", completed=done, total=total)
        if not self._is_shown and time.monotonic() - self._began >= _LONG_S:
            self._is_shown = True
            self._bars.start()


def _bars() -> Any:
    from rich import progress  # imported late: most commands end before a bar is shown
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.TaskProgressColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr, highlight=False),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
    )


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:  # stderr was replaced by an object without a descriptor
        return 80
