"""``allranks run``: from the command line to an exit code; a wrong command line prints one clear line.

The modules that run a job are imported only after the command line is parsed, so that help and errors are instant.
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
    """Run ``allranks run``.

    Args:
        argv: the arguments; the process's own if None.

    Returns:
        The exit code: that of the rank that failed first, 128 + N after a signal, 2 for wrong arguments. In a forked
        rank, the rank, which ``run_command`` runs.
    """
    return run(partial(parse, sys.argv[1:] if argv is None else argv), "allranks run")


def run(read: Callable[[], Options], name: str) -> int | Program:
    """Run a job.

    Args:
        read: parses the command line.
        name: name of the command.

    Returns:
        The same as ``main``.
    """
    try:
        options = read()
        from allranks.launch.jobs.job import launch

        return launch(options)
    except ConfigError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return USAGE
