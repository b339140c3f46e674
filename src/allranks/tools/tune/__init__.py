"""``allranks tune``: finds from which sizes on calls within this host should go which way, and writes that down.

Where many ranks share a host they meet by groups (core/collective/levels.h), and large operands are reduced in shards.
From how many ranks, and from which sizes on, depends on the machine. Each choice is timed in turn with the others, in
the same processes, on process groups of their own. What is found is a file for ``ALLRANKS_TUNING``; calls have the same
results with every such file.

============  ================================
``rank``      what each rank times
``choosing``  which choice follows from that
============  ================================
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from allranks._base.console import ArgumentParser, Program
from allranks._base.exit_codes import USAGE
from allranks._cluster.host import usable_cpus
from allranks.tools.outputs import why_not

__all__ = ["main", "parse"]

_MOST_RANKS = 64


def main(argv: Sequence[str]) -> int | Program:
    """The command: starts the ranks."""
    options = parse(argv)
    ranks = options.nproc or min(max(4 * usable_cpus(), usable_cpus() + 1), _MOST_RANKS)
    if problem := why_not(options.output, None):
        print(f"allranks tune: error: {problem}", file=sys.stderr)
        return USAGE
    from allranks.launch import cli

    return cli.main(["-n", str(ranks), "--show", "0", "-q", "-m", "allranks.tools.tune.rank", *argv])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; exits with 2 and one line where they are wrong."""
    parser = ArgumentParser(
        prog="allranks tune",
        description="Find what is fastest on this host, and write it into a file for ALLRANKS_TUNING.",
        epilog="Run it where nothing else runs. Results of calls are the same bits with every such file.",
        examples=(
            ("allranks tune -o host.json", "takes a minute or two"),
            ("ALLRANKS_TUNING=host.json allranks run -n 32 train.py", "uses what was found"),
        ),
    )
    parser.add_argument("-n", "--nproc", type=int, metavar="N", help="ranks; default: four on each CPU, up to 64")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("tuning.json"), metavar="FILE", help="default: tuning.json"
    )
    parser.add_argument(
        "--budget", type=float, default=0.3, metavar="SECONDS", help="for each number of ranks and size; default: 0.3"
    )
    return parser.parse_args(argv)
