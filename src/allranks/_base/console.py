"""How a command of the command line ends: with its exit code and at most one line, whatever becomes of its terminal.

Python's own ways are tracebacks: of Ctrl-C in the middle of an import, of a reader that has left (``| head``), of a
full disk, of a stdout that was closed before the command began.
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
    """What runs in place of the command: a rank that was forked from it."""

    def run(self) -> int:
        """Runs it; what it raises is its own."""
        ...


def run_command(name: str, command: Callable[[], int | Program]) -> int:
    """Runs a command.

    Args:
        name: what the user typed.
        command: does it. In a forked rank it returns the rank, which then runs outside of all this.

    Returns:
        The exit code: the command's own; 128 + SIGINT after Ctrl-C; 1 where stdout cannot be written to, but not
        where its reader has left.
    """
    ended = _run(name, command)
    return ended if isinstance(ended, int) else ended.run()


def run_process(name: str, command: Callable[[], int | Program]) -> NoReturn:
    """Runs a command in a process of its own, and ends it; arguments and exit codes as ``run_command``."""
    ended = _run(name, command)
    if isinstance(ended, int):
        end_process(ended)
    sys.exit(ended.run())


def end_process(code: int) -> NoReturn:
    """Ends this process as python does, without taking apart what it has imported: 0.3 to 0.6 s of a CPU with torch.

    For processes in which only our own code has run: of a user's, something may be written only then.
    """
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)  # python's own end tells MPI
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what the command wrote is written: this is what came at exit
            if stream is not None:
                stream.flush()
    os._exit(code & 0xFF)


def _run(name: str, command: Callable[[], int | Program]) -> int | Program:
    with _ended_by_ctrl_c(name):
        try:
            ensure_standard_streams()
            try:
                ended = command()
            except SystemExit as error:  # argparse: help was given, or the arguments are wrong
                ended = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(ended, int):
                put("")
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
    """The line of this package that an error comes from."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _PACKAGE in each.filename]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


class _Unwritable(Exception):
    """Stdout cannot be written to; the message has the reason."""


def put(text: str, *, styled: bool = False) -> None:
    """Writes to stdout, all at once. Where its reader has left, the rest of what the command writes is dropped.

    Where stdout cannot be written to for another reason, the command ends.

    Args:
        text: what is written. Control characters are shown by their codes: names may come from a foreign file.
        styled: the text has escape sequences of its own.
    """
    text = text if styled else harmless(text)
    encoding = sys.stdout.encoding or "utf-8"  # of a StringIO in its place it is None
    try:
        if text:  # an unbuffered stream would be written to
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # python flushes once more when it ends
        os.close(null)
        if not isinstance(error, BrokenPipeError):
            raise _Unwritable(error.strerror) from error


def printable(text: str) -> str:
    """Text that can be sent and printed. Of bytes in a command line or a name that are not UTF-8, the code is shown."""
    return text.encode(errors="backslashreplace").decode()


def harmless(text: str) -> str:
    """Text in which control characters, but for tabs and ends of lines, are shown by their codes."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def is_redrawable(stream: Any) -> bool:
    """Whether a line of a stream can be written over: it is a terminal, and not a dumb one."""
    return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb"


def has_colours(stream: Any) -> bool:
    """Whether to write colours to a stream: such a terminal, and NO_COLOR is not set."""
    return is_redrawable(stream) and not os.environ.get("NO_COLOR")


_PACKAGE = f"{os.sep}allranks{os.sep}"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_collected: list[ArgumentParser] | None = None


@contextlib.contextmanager
def collecting_help() -> Iterator[list[ArgumentParser]]:
    """Help that is asked for meanwhile is not printed: the list has the parsers whose help it would be."""
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


class _Formatter(argparse.HelpFormatter):
    """Shows what an option takes once, as ``-n, --nproc N``, and of two spellings of torchrun's that with hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = shown_names(action)
        if not shown or action.nargs == 0:
            return ", ".join(shown) or super()._format_action_invocation(action)
        return f"{', '.join(shown)} {self._format_args(action, action.dest.upper())}"


def shown_names(action: argparse.Action) -> list[str]:
    """The names of an option, without spellings with underscores of one that has hyphens."""
    names = action.option_strings
    return [name for name in names if "_" not in name or name.replace("_", "-") not in names]


def examples_text(examples: Sequence[tuple[str, str]]) -> str:
    """Commands, and what each does, as help shows them."""
    return "examples:\n" + "".join(f"  {command}\n      {what}\n" for command, what in examples)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with examples, and with help that goes through ``put``: argparse ignores a stdout that is full.

    Args:
        examples: commands, and what each does.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the dashes of --option=-- away, and the option gets a list without anything.
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
    """Ends the process at Ctrl-C with one line, unless SIGINT is ignored or handled by somebody else.

    No exception: it could come up inside of an import, or of a destructor, where python prints it and goes on.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: Any) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"{name}: stopped by SIGINT\n".encode())
        os._exit(STOPPED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt in this block of a command: for what must be undone."""
    before = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and callable(before)
    if mine:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def ensure_standard_streams() -> None:
    """Opens those of descriptors 0 to 2 that are closed, so that no pipe of ours gets such a number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
