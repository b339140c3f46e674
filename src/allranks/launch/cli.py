"""``allranks run``: from the command line to an exit code; one clear line where the command line is wrong.

What runs a job is imported only once it is known what to run, so that help and errors are instant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from allranks._base.console import Program
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import USAGE
from allranks.launch.arguments.options import parse
from allranks.launch.spec.options import Options

__all__ = ["main", "run"]


def main(argv: Sequence[str] | None = None) -> int | Program:
    """Runs ``allranks run``.

    Args:
        argv: the arguments; the process's own if None.

    Returns:
        The exit code: that of the rank that failed first, 128 + N after a signal, 2 for wrong arguments. In a forked
        rank, the rank, which ``run_command`` lets run.
    """
    return run(partial(parse, sys.argv[1:] if argv is None else argv), "allranks run")


def run(read: Callable[[], Options], name: str) -> int | Program:
    """Runs a job.

    Args:
        read: reads the command line.
        name: of the command.

    Returns:
        As ``main``.
    """
    try:
        options = read()
        from allranks.launch.jobs.job import launch

        return launch(options)
    except ConfigError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return USAGE
