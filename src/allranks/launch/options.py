"""The arguments of ``allranks run``: words in, ``Options`` out.

Options stand before the script; all that follows it is the script's own. torchrun's and torch.distributed.launch's
spellings are accepted where they mean the same on one host.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from allranks._errors import ConfigError
from allranks._host import usable_cpus
from allranks.launch.target import Kind, Target

__all__ = ["Options", "Show", "parse"]

Show = Literal["0", "all", "none"]

_USAGE = """allranks run [options] script.py [args ...]
       allranks run [options] -m module [args ...]
       allranks run [options] -- command [args ...]"""


@dataclass(frozen=True)
class Options:
    """What ``allranks run`` was asked for.

    Attributes:
        target: what to run.
        nproc: number of ranks.
        start: fork ranks from a process that has imported torch, or execute fresh interpreters.
        show: whose output is shown.
        logs: folder for one file per rank.
        grace_s: time that ranks get to end by themselves when the job is stopped.
        threads: threads per rank; None to decide.
        instead_of_gloo: give programs that ask torch.distributed for gloo our groups.
        quiet: leave out what need not be said.
    """

    target: Target
    nproc: int = 1
    start: Literal["fork", "spawn"] = "fork"
    show: Show = "all"
    logs: Path | None = None
    grace_s: float = 10.0
    threads: int | None = None
    instead_of_gloo: bool = False
    quiet: bool = False


# torchrun's options that are not here; the value that asks for what is so anyway, or None where the option has none.
_SINGLE_HOST = {
    "--nnodes": "1",
    "--node-rank": "0",
    "--max-restarts": "0",
    "--rdzv-backend": "",
    "--rdzv-endpoint": "",
    "--rdzv-id": "",
    "--rdzv-conf": "",
    "--master-addr": "",
    "--master-port": "",
    "--local-addr": "",
    "--monitor-interval": "",
    "--start-method": "",
    "--role": "",
    "--log-dir": "",
    "--redirects": "",
    "--tee": "",
    "--local-ranks-filter": "",
    "--no-python": None,
    "--run-path": None,
}
_INSTEAD = {"--log-dir": "--logs DIR", "--no-python": "-- command", "--start-method": "--start"}


class _Elsewhere(argparse.Action):
    """An option of torchrun's that asks for what is not there."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.const is None or list(values or ()) != [self.const]:
            option = str(option_string)
            words = " ".join([option, *(values or ())])
            instead = _INSTEAD.get(option.replace("_", "-"))
            hint = f"; use {instead}" if instead else ""
            parser.error(f"{words} is torchrun's, and not in this version of allranks run{hint}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str]) -> Options:
    """Reads the arguments.

    Raises:
        ConfigError: they are wrong.
        SystemExit: help was asked for, and given.
    """
    args = _parser().parse_args(argv)
    words: list[str] = args.target
    command = words[:1] == ["--"]
    if command and args.module:
        raise ConfigError("-m and -- exclude each other")
    words = words[1:] if command else words
    if not words:
        what = "a command after --" if command else "a module after -m" if args.module else "a script, -m module or --"
        raise ConfigError(f"nothing to run: expected {what} (see allranks run --help)")
    kind: Kind = "command" if command else "module" if args.module else "script"
    return Options(
        target=Target(kind, words[0], tuple(words[1:])),
        nproc=args.nproc,
        start=args.start,
        show=args.show,
        logs=args.logs,
        grace_s=args.grace,
        threads=args.threads,
        instead_of_gloo=args.instead_of_gloo,
        quiet=args.quiet,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="allranks run",
        usage=_USAGE,
        description="Runs a program as N processes (ranks) on this host; all stop when one fails.",
        epilog="Ranks read end-of-file from stdin: give them their input as files or arguments.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--nproc", type=_count, default=1, metavar="N", help="number of ranks, or auto: one per CPU (default 1)")
    for name in ("-np", "--nproc-per-node", "--nproc_per_node"):
        add(name, dest="nproc", type=_count, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork ranks from a process that has imported torch, or start fresh interpreters (default fork)",
    )
    add(
        "--show",
        choices=("0", "all", "none"),
        default="all",
        help="whose output to print: 0 is rank 0's, unprefixed (default all)",
    )
    add("--logs", type=Path, metavar="DIR", help="also write each rank's output to DIR/rankN.log")
    add("--grace", type=_seconds, default=10.0, metavar="SECONDS", help="between SIGTERM and SIGKILL (default 10)")
    add("--threads", type=_threads, metavar="N", help="OMP_NUM_THREADS per rank, or auto: CPUs / ranks (default auto)")
    add(
        "--instead-of-gloo",
        action="store_true",
        help="give a program that asks torch.distributed for gloo groups on our channel; it need not be changed",
    )
    add("-q", "--quiet", action="store_true", help="of the launcher's own lines, print only the cause of a failure")
    # What they ask for is so anyway.
    for name in ("--use-env", "--use_env", "--standalone"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name, fitting in _SINGLE_HOST.items():
        for spelling in {name, "--" + name[2:].replace("-", "_")}:
            add(spelling, action=_Elsewhere, nargs=0 if fitting is None else 1, const=fitting, help=argparse.SUPPRESS)
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    if text == "auto":
        return usable_cpus()
    return _at_least_one(text, "a number of ranks (1 or more, or auto)")


def _threads(text: str) -> int | None:
    return None if text == "auto" else _at_least_one(text, "a number of threads (1 or more, or auto)")


def _at_least_one(text: str, what: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 or more)")
    return seconds
