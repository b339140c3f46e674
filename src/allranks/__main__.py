"""The ``allranks`` command: finds the subcommand and passes it the remaining arguments.

Each subcommand is imported only when it is called, so that the imports of one do not slow down another.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from allranks._base.console import Program, examples_text, put, run_command, run_process
from allranks._base.exit_codes import USAGE
from allranks.tools.commands import COMMANDS, EXAMPLES

__all__ = ["main", "process"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``allranks``.

    Args:
        argv: The arguments. None: the process's own arguments.

    Returns:
        The exit code.
    """
    return run_command(*_read(sys.argv[1:] if argv is None else argv))


def process() -> NoReturn:
    """Run ``allranks`` as a separate process."""
    run_process(*_read(sys.argv[1:]))


def _read(argv: Sequence[str]) -> tuple[str, Callable[[], int | Program]]:
    words = list(argv)
    if words[:1] == ["help"]:
        topic = words[1] if len(words) > 1 else ""
        if topic and topic not in COMMANDS and topic not in ("-h", "--help"):
            return "allranks help", lambda: _explain(topic)
        words = [*words[1:2], "--help"]
    name = words[0] if words else ""
    return f"allranks {name}" if name in COMMANDS else "allranks", lambda: _run(name, words)


def _run(name: str, words: Sequence[str]) -> int | Program:
    if name in COMMANDS:
        try:
            ended: int | Program = importlib.import_module(COMMANDS[name][0]).main(words[1:])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            print(
                f"allranks {name}: error: torch is required, but {sys.executable} cannot import it.\n"
                f"  Install it: {sys.executable} -m pip install torch",
                file=sys.stderr,
            )
            return USAGE
        return ended
    if name in ("-V", "--version"):
        from allranks import __version__

        put(f"allranks {__version__}\n")
        return 0
    if name in ("-h", "--help"):
        put(_help() + "\n")
        return 0
    known = ", ".join(COMMANDS)
    wrong = f"unknown command {name!r}" if name else "a command is missing"
    hint = f"expected one of {known} (see allranks --help)"
    if name.endswith(".py") or os.path.isfile(name) or name in ("-n", "-np", "-m", "--"):
        hint = f"did you mean: allranks run {shlex.join(words)}"
    print(f"allranks: error: {wrong}; {hint}", file=sys.stderr)
    return USAGE


def _explain(topic: str) -> int:
    from allranks.tools import pages  # late: other commands do not need it

    if pages.show(topic):
        return 0
    known = ", ".join(pages.topics())
    print(
        f"allranks help: error: unknown topic {topic!r}; expected a command, an error, a variable, or one of {known}",
        file=sys.stderr,
    )
    return USAGE


def _help() -> str:
    lines = ["usage: allranks [-V] COMMAND ...", "", "commands:"]
    lines += [f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items()]
    more = (
        "allranks help COMMAND, or allranks COMMAND --help, describes a command.\n"
        "allranks help TOPIC prints a page (debugging, faq, ...), an error or a variable."
    )
    return "\n".join([*lines, "", examples_text(EXAMPLES), more])


if __name__ == "__main__":
    process()
