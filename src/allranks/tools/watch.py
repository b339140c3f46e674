"""``allranks watch``: runs a command whose ranks report why they wait, also under torchrun, srun or mpirun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from allranks._base.console import ArgumentParser, harmless
from allranks._base.exit_codes import USAGE
from allranks._cluster.env import ABORT_AFTER, NOTICE_AFTER, WATCH, WATCH_FOLDER
from allranks.launch.spec import values

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command. Return only if it cannot be executed."""
    parser = ArgumentParser(
        prog="allranks watch",
        description="Run a command that starts ranks of a program on torch.distributed. If a rank waits in a call for"
        " 10 s, one rank reports the missing ranks and their call sites. The program needs no change. The same"
        f" as {WATCH}=1 in the environment of the ranks.",
        examples=(
            ("allranks watch -- torchrun --nproc-per-node 4 train.py", "4 ranks on this host"),
            ("allranks watch --abort-after 10m -- srun python train.py", "exit if ranks wait for 10 minutes"),
        ),
    )
    parser.add_argument(
        "--after",
        type=values.seconds,
        metavar="TIME",
        help=f"time that a rank may wait before a report (default 10s; {NOTICE_AFTER})",
    )
    parser.add_argument(
        "--abort-after",
        type=values.seconds,
        metavar="TIME",
        help=f"time that a rank may wait before all ranks print the report and exit (default: never; {ABORT_AFTER})",
    )
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        help=f"folder of the files with the stacks of all ranks (default: temporary files; {WATCH_FOLDER})",
    )
    parser.add_argument("target", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")
    args = parser.parse_args(argv)
    command = args.target[1:] if args.target[:1] == ["--"] else args.target
    if not command:
        parser.error("a command is required, such as: allranks watch -- torchrun train.py")
    environ = os.environ | {WATCH: "1"}
    if args.after is not None:
        environ[NOTICE_AFTER] = f"{args.after:g}s"
    if args.abort_after is not None:
        environ[ABORT_AFTER] = f"{args.abort_after:g}s"
    if args.folder is not None:
        environ[WATCH_FOLDER] = os.path.abspath(args.folder)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        print(harmless(f"allranks watch: error: cannot execute {command[0]!r}: {error.strerror}"), file=sys.stderr)
    return USAGE
