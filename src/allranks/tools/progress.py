"""What a command is doing, for whoever waits for it: a line on a terminal that is gone when the result is printed.

`TerminalProgress` shows words. `LoopBar` shows how many bytes are done, how fast, and when the rest will be.
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

_LONG_S = 2.0  # what takes less shows nothing
_AGAIN_S = 0.5
_CLEAR = "\r\x1b[K"


class TerminalProgress:
    """A line on stderr, where that is a terminal, once the command has taken 2 s.

    Args:
        name: the command's.
        shown: whether this process is the one that shows it.
    """

    def __init__(self, name: str, shown: bool = True) -> None:
        self._name = name
        self._words = ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._shown = shown
        self._drawn = False
        self._lock = threading.Lock()
        self._thread = Daemon(target=self._draw, name=name) if shown and is_redrawable(sys.stderr) else None

    def __enter__(self) -> TerminalProgress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._clear()

    def at(self, words: str) -> None:
        """What is done now."""
        self._words = words

    def put(self, text: str) -> None:
        """Prints lines of the result to stdout, in place of the line that is shown."""
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
                sys.stderr.write(_CLEAR + line[: _columns() - 1])
                sys.stderr.flush()
                self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._drawn = False


class LoopBar:
    """A bar on stderr, where that is a terminal, once the command has taken 2 s.

    Args:
        name: the command's.
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
        """How far it is.

        Args:
            words: what is done now.
            done: bytes.
            total: how many there are; None: that is not known.
        """
        if self._bars is None:
            return
        self._bars.update(self._task, description=f"{self._name}: {words}", completed=done, total=total)
        if not self._is_shown and time.monotonic() - self._began >= _LONG_S:
            self._is_shown = True
            self._bars.start()


def _bars() -> Any:
    from rich import progress  # late: most commands have ended before a bar is shown
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
    except OSError:  # stderr has been replaced by an object that only looks like a terminal
        return 80
