"""``allranks torchrun`` and ``allranks launch``: from the command line to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from allranks._base.console import Program
from allranks.launch.arguments.torchrun import read
from allranks.launch.cli import run

__all__ = ["launch", "main"]


def main(argv: Sequence[str] | None = None) -> int | Program:
    """Run ``allranks torchrun``; arguments and exit codes as for ``cli.main``."""
    words = sys.argv[1:] if argv is None else argv
    return run(partial(read, words, os.environ), "allranks torchrun")


def launch(argv: Sequence[str] | None = None) -> int | Program:
    """Run ``allranks launch``; arguments and exit codes as for ``cli.main``."""
    words = sys.argv[1:] if argv is None else argv
    return run(partial(read, words, os.environ, for_launch=True), "allranks launch")
