"""``allranks tune``: finds the sizes at which collectives within this host should change algorithms.

If many ranks share a host, they synchronize in groups (core/collective/levels.h), and large operands are reduced in
shards. The number of ranks and the sizes at which this starts depend on the machine. All choices are timed in turn, in
the same processes, on separate process groups. The command writes the result to a file for ``ALLRANKS_TUNING``. The
results of calls are the same with every such file.

=============  ================================
``rank``       the measurements of each rank
``selection``  the choice that follows from them
=============  ================================
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from allranks._base.console import ArgumentParser, Program
from allranks._base.exit_codes import USAGE
from allranks._cluster.host import usable_cpus
from allranks.tools.outputs import output_problem

__all__ = ["main", "parse"]

_MOST_RANKS = 64


def main(argv: Sequence[str]) -> int | Program:
    """Start the ranks."""
    options = parse(argv)
    ranks = options.nproc or min(max(4 * usable_cpus(), usable_cpus() + 1), _MOST_RANKS)
    if problem := output_problem(options.output, None):
        print(f"allranks tune: error: {problem}", file=sys.stderr)
        return USAGE
    from allranks.launch import cli

    return cli.main(["-n", str(ranks), "--show", "0", "-q", "-m", "allranks.tools.tune.rank", *argv])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Exit with code 2 and one line if they are wrong."""
    parser = ArgumentParser(
        prog="allranks tune",
        description="Find the fastest settings on this host, and write them to a file for ALLRANKS_TUNING.",
        epilog="Run it on an idle host. The results of calls are bit-identical with every such file.",
        examples=(
            ("allranks tune -o host.json", "takes a minute or two"),
            ("ALLRANKS_TUNING=host.json allranks run -n 32 train.py", "uses the settings"),
        ),
    )
    parser.add_argument(
        "-n", "--nproc", type=int, metavar="N", help="number of ranks (default: four on each CPU, at most 64)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("tuning.json"),
        metavar="FILE",
        help="file for the settings (default: tuning.json)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.3,
        metavar="SECONDS",
        help="seconds for each number of ranks and size (default: 0.3)",
    )
    return parser.parse_args(argv)
