"""The exit of a command of the command line: an exit code and at most one line, in any state of its terminal.

By default, Python prints a traceback in these cases: Ctrl-C during an import, a reader that has closed the pipe
(``| head``), a full disk, or a stdout that was closed before the command started.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from allranks._base.errors import AllranksError
from allranks._base.exit_codes import REFUSED, STOPPED, UNWRITABLE
from allranks._base.system import refusal

__all__ = [
    "ArgumentParser",
    "Program",
    "collecting_help",
    "end_process",
    "ensure_standard_streams",
    "examples_text",
    "has_colours",
    "interruptible",
    "is_redrawable",
    "printable",
    "put",
    "run_command",
    "run_process",
    "shown_names",
]


class Program(Protocol):
    """A program that runs instead of the command in this process: a rank that was forked from the command."""

    def run(self) -> int:
        """Run it, and return its exit code. Exceptions propagate unchanged."""
        ...


def run_command(name: str, command: Callable[[], int | Program]) -> int:
    """Run a command.

    Args:
        name: Name of the command as the user typed it.
        command: Executes the command. In a forked rank it returns the rank, which then runs outside of this function's
            handlers.

    Returns:
        The exit code: the command's own, or 1 if the system refuses a request or stdout cannot be written. A reader
        that has closed the pipe is no error. After Ctrl-C the process exits with 128 + SIGINT.
    """
    ended = _run(name, command)
    return ended if isinstance(ended, int) else ended.run()


def run_process(name: str, command: Callable[[], int | Program]) -> NoReturn:
    """Run a command as the only task of this process, then exit. Arguments and exit codes as in ``run_command``."""
    ended = _run(name, command)
    if isinstance(ended, int):
        end_process(ended)
    sys.exit(ended.run())


def end_process(code: int) -> NoReturn:
    """Exit as Python does, but without tearing down the imported modules, which takes 0.3 to 0.6 CPU s with torch.

    Only for processes that have run no code of a user: such code may write data only during the teardown.
    """
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)  # Python's own exit finalizes MPI
    # Python's order at exit: join the threads, call the exit handlers, flush the streams.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the command's output is written; this is the exit handlers'
            if stream is not None:
                stream.flush()
    os._exit(code & 0xFF)


def _run(name: str, command: Callable[[], int | Program]) -> int | Program:
    with _ended_by_ctrl_c(name):
        try:
            ensure_standard_streams()
            try:
                ended = command()
            except SystemExit as error:  # argparse has printed help, or the arguments are wrong
                # The code can be a text, which means a failure as in `sys.exit(text)`.
                ended = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(ended, int):
                put("")  # flushes stdout, so that a failure is reported here and not at exit
        # Some of these errors are OSErrors, too, but they are no refusals of the system.
        except AllranksError:
            raise
        except (OSError, MemoryError) as error:
            with contextlib.suppress(OSError):
                what = f"the system refused a request{_place_of(error)}"
                print(f"{name}: error: {refusal(what, error)}", file=sys.stderr)
            return REFUSED
        except _Unwritable as error:
            with contextlib.suppress(OSError):
                print(f"{name}: error: cannot write to stdout: {error}", file=sys.stderr)
            return UNWRITABLE
        return ended


def _place_of(error: BaseException) -> str:
    """Return the innermost line of this package in the traceback of an error."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _PACKAGE in each.filename]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


class _Unwritable(Exception):
    """Stdout cannot be written. The message is the reason."""


def put(text: str, *, styled: bool = False) -> None:
    """Write a text to stdout, and flush it. If the reader has closed the pipe, all further output is discarded.

    If stdout cannot be written for another reason, the command exits.

    Args:
        text: The text. Control characters are replaced by their codes, because names may come from an untrusted file.
        styled: The text contains intended escape sequences, and is written unchanged.
    """
    text = text if styled else harmless(text)
    encoding = sys.stdout.encoding or "utf-8"  # None if stdout was replaced by a StringIO
    try:
        if text:  # an unbuffered stream would write even an empty text
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # Python flushes stdout again at exit, which must not fail
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            raise _Unwritable(error.strerror) from error


def printable(text: str) -> str:
    """Return a text that can be encoded: bytes of a command line or a name that are not UTF-8 appear as codes."""
    return text.encode(errors="backslashreplace").decode()


def harmless(text: str) -> str:
    """Return the text with control characters replaced by their codes, except tabs and newlines."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def is_redrawable(stream: Any) -> bool:
    """Return whether a line of the stream can be overwritten: the stream is a terminal, and not a dumb one."""
    return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb"


def has_colours(stream: Any) -> bool:
    """Return whether to write colors to a stream: it is redrawable, and NO_COLOR is not set."""
    return is_redrawable(stream) and not os.environ.get("NO_COLOR")


_PACKAGE = f"{os.sep}allranks{os.sep}"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_collected: list[ArgumentParser] | None = None


@contextlib.contextmanager
def collecting_help() -> Iterator[list[ArgumentParser]]:
    """Collect requests for help in this block instead of printing help. The list receives the parsers."""
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


class _Formatter(argparse.HelpFormatter):
    """Shows the argument of an option once (``-n, --nproc N``), and only the hyphenated spelling of torchrun's two."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = shown_names(action)
        if not shown or action.nargs == 0:
            return ", ".join(shown) or super()._format_action_invocation(action)
        return f"{', '.join(shown)} {self._format_args(action, action.dest.upper())}"


def shown_names(action: argparse.Action) -> list[str]:
    """Return the names of an option, without a spelling with underscores if the same one with hyphens exists."""
    names = action.option_strings
    return [name for name in names if "_" not in name or name.replace("_", "-") not in names]


def examples_text(examples: Sequence[tuple[str, str]]) -> str:
    """Return the section of the help text that lists commands and their descriptions."""
    return "examples:\n" + "".join(f"  {command}\n      {what}\n" for command, what in examples)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with examples. It prints help with ``put``, because argparse ignores errors of stdout.

    Args:
        examples: Pairs of a command and its description.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse removes the dashes of --option=--, and the option would receive an empty list.
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected a value, not --")
        return super()._get_values(action, arg_strings)

    def format_help(self) -> str:
        return super().format_help() + ("\n" + examples_text(self.examples) if self.examples else "")

    def print_help(self, file: Any = None) -> None:
        if _collected is None:
            super().print_help(file)
        else:
            _collected.append(self)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file in (None, sys.stdout):
            put(message)
        else:
            super()._print_message(message, file)


@contextlib.contextmanager
def _ended_by_ctrl_c(name: str) -> Iterator[None]:
    """Exit with one line at Ctrl-C, unless SIGINT is ignored or has another handler.

    The handler raises no exception: it could interrupt an import, or occur in a destructor. Python prints exceptions of
    destructors and continues.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: Any) -> NoReturn:
        with contextlib.suppress(OSError):
            # Not print: the signal may have interrupted a print, which is not reentrant.
            os.write(2, f"{name}: stopped by SIGINT\n".encode())
        os._exit(STOPPED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt in this block of a command, so that the command can clean up."""
    before = signal.getsignal(signal.SIGINT)
    # Python sets handlers in the main thread only. SIG_IGN is not callable: an ignored SIGINT (nohup) stays ignored.
    mine = threading.current_thread() is threading.main_thread() and callable(before)
    if mine:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def ensure_standard_streams() -> None:
    """Open the closed ones of the descriptors 0 to 2, so that no pipe of this process gets such a number."""
    # The kernel assigns the lowest free number.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
