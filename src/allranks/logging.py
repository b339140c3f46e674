"""Logs of many ranks: one file for each rank, and the terminal for one of them.

``configure()`` sets up the root logger of Python's ``logging``, so the logs include the records of every library. Every
record has the attributes ``rank`` and ``host``, for formats that use them. An uncaught exception, except
KeyboardInterrupt, is the last record in the rank's file, with its traceback.

Source: a user's ``configure_logger(rank)``, which defined the file names, the format and the logger's name.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from allranks._base.errors import UsageError
from allranks._cluster.env import read_env

__all__ = ["FORMAT", "configure"]

FORMAT = "%(asctime)s [%(levelname)s]: %(message)s"
_DATES = "%Y-%m-%d %H:%M:%S"


def configure(
    rank: int | str | None = None,
    level: int | str = "INFO",
    folder: str | Path = ".",
    console: Literal["0", "all", "none"] = "0",
    format: str = FORMAT,
) -> logging.Logger:
    """Log to ``process_{rank}.log``, and on rank 0 also to the terminal. A repeated call replaces the earlier setup.

    Args:
        rank: Rank of this process; for a process without a rank, a name such as ``"main"``. None: the rank in the
            process group, or else the rank in the environment.
        level: Lowest level that is logged: a name or number of ``logging``.
        folder: Folder of the file. It is created if it does not exist. The previous contents of the file are kept.
        console: Processes that also log to stderr: ``"0"``: rank 0, and a process without a rank; ``"all"``: all, with
            rank and host before each record; ``"none"``.
        format: Format of the file's lines, in ``logging``'s ``%`` style. ``%(rank)s`` and ``%(host)s`` are available.

    Returns:
        The logger ``Process-{rank}``.

    Raises:
        UsageError: The level or the value of console is unknown.
        ConfigError: rank is None, and the environment has only a part of the variables that identify this process.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> import allranks.logging
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = allranks.logging.configure(rank=1, folder=folder)
        ...     logger.info("Initialized process group")
        ...     allranks.logging.configure("main", folder=folder).name
        'Process-main'
    """
    if console not in ("0", "all", "none"):
        raise UsageError(f"logging.configure: console must be '0', 'all' or 'none', not {console!r}")
    if isinstance(level, str) and not isinstance(logging.getLevelName(level.upper()), int):
        raise UsageError(f"logging.configure: level must be a level such as 'INFO' or 'DEBUG', not {level!r}")
    who = _who() if rank is None else rank
    file = Path(folder) / f"process_{who}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    made: list[logging.Handler] = [_RankFile(file, format)]
    if console == "all" or (console == "0" and (who == 0 or isinstance(who, str))):
        made.append(_console(f"[{socket.gethostname()}:{who}] " if console == "all" else ""))
    root = logging.getLogger()
    # The new handlers exist by now: if the file cannot be opened, the earlier setup remains.
    for old in [handler for handler in root.handlers if getattr(handler, "of_allranks", False)]:
        root.removeHandler(old)
        old.close()
    for handler in made:
        handler.of_allranks = True  # type: ignore[attr-defined]
        # A filter of a handler also sees the records of other loggers. A filter of the root logger does not.
        handler.addFilter(partial(_sign, who, socket.gethostname()))
        root.addHandler(handler)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    _watch_exceptions()
    return logging.getLogger(f"Process-{who}")


class _RankFile(logging.FileHandler):
    def __init__(self, file: Path, format: str) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(format, _DATES))


def _console(before: str) -> logging.Handler:
    """Return the handler for stderr: colored on a terminal; otherwise (batch jobs) one line per record."""
    # The text becomes a part of a %-format.
    before = before.replace("%", "%%")
    if not sys.stderr.isatty():
        plain = logging.StreamHandler()
        plain.setFormatter(logging.Formatter(before + FORMAT, _DATES))
        return plain
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format=_DATES)
    handler.setFormatter(logging.Formatter(before + "%(message)s"))
    return handler


def _who() -> int:
    world = sys.modules.get("allranks._api.world")  # not imported here, because it imports torch
    if world is not None and world.is_initialized():
        return int(world.get_rank())
    return read_env().rank


def _sign(rank: int | str, host: str, record: logging.LogRecord) -> bool:
    record.rank, record.host = rank, host
    return True


def _watch_exceptions() -> None:
    """Log the exceptions that end this process or one of its threads, and then call the previous hooks."""
    # A repeated `configure` must not chain the hook to itself, which would log every exception twice.
    if not isinstance(sys.excepthook, partial) or sys.excepthook.func is not _log_and_go_on:
        sys.excepthook = partial(_log_and_go_on, sys.excepthook)
    if not isinstance(threading.excepthook, partial) or threading.excepthook.func is not _log_thread_and_go_on:
        threading.excepthook = partial(_log_thread_and_go_on, threading.excepthook)


def _log_and_go_on(before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _log_to_file("Uncaught exception", (kind, error, trace))
    before(kind, error, trace)


def _log_thread_and_go_on(before: Any, about: threading.ExceptHookArgs) -> None:
    if about.exc_value is not None and about.exc_type is not SystemExit:
        name = about.thread.name if about.thread is not None else "that no longer exists"
        _log_to_file(f"Uncaught exception in thread {name}", (about.exc_type, about.exc_value, about.exc_traceback))
    before(about)


def _log_to_file(words: str, about: tuple[type[BaseException], BaseException, TracebackType | None]) -> None:
    """Write an exception to the rank's file, but not to the terminal: the interpreter prints it there."""
    record = logging.getLogger(__name__).makeRecord(__name__, logging.CRITICAL, "", 0, words, (), about)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _RankFile):
            handler.handle(record)
