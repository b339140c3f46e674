"""The ``allranks`` command: finds the subcommand and hands over the rest of the line.

Each subcommand is imported only when it is asked for, so that none pays for another's imports.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from allranks._base.console import Program, put, run_command

__all__ = ["main"]

_COMMANDS = {
    "run": ("allranks.launch.cli", "run a program as N processes, here or on other hosts"),
    "torchrun": ("allranks.launch.torchrun", "the same with torchrun's options"),
    "launch": ("allranks.launch.__main__", "the same with torch.distributed.launch's options"),
    "env": ("allranks.tools.env", "show what started this process, and from which variables that follows"),
    "bench": ("allranks.tools.bench", "measure collectives"),
    "tune": ("allranks.tools.tune", "find what is fastest on this host, and write it down for ALLRANKS_TUNING"),
    "submit": ("allranks.tools.submit", "write a job file for SLURM, PBS, LSF or Kubernetes"),
    "trace": ("allranks.tools.trace", "show what the ranks of a running job do, and for whom they wait"),
    "top": ("allranks.tools.top", "show calls, waiting, CPU and memory of a running job's ranks, again and again"),
    "checkpoint": ("allranks.tools.checkpoint", "what is in checkpoints, whether they are whole, how two differ"),
    "doctor": ("allranks.tools.doctor", "check this host, or all hosts of a job"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``allranks``.

    Args:
        argv: the arguments; the process's own if None.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    name = words[0] if words else ""
    return run_command(f"allranks {name}" if name in _COMMANDS else "allranks", lambda: _run(name, words))


def _run(name: str, words: Sequence[str]) -> int | Program:
    if name in _COMMANDS:
        ended: int | Program = importlib.import_module(_COMMANDS[name][0]).main(words[1:])
        return ended
    if name in ("-V", "--version"):
        from allranks import __version__

        put(f"allranks {__version__}\n")
        return 0
    if name in ("-h", "--help"):
        put(_help() + "\n")
        return 0
    known = ", ".join(_COMMANDS)
    wrong = f"there is no command {name!r}" if name else "a command is missing"
    hint = f"there are {known} (see allranks --help)"
    if name.endswith(".py") or os.path.isfile(name) or name in ("-n", "-np", "-m", "--"):
        hint = f"did you mean: allranks run {shlex.join(words)}"
    print(f"allranks: error: {wrong}; {hint}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = ["usage: allranks [-V] COMMAND ...", "", "commands:"]
    lines += [f"  {name:10} {summary}" for name, (_, summary) in _COMMANDS.items()]
    return "\n".join([*lines, "", "allranks help COMMAND, or allranks COMMAND --help, describes a command."])


if __name__ == "__main__":
    sys.exit(main())
