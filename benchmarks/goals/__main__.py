"""The goals of master-worker mode, of resilience and of checkpoints, measured and compared with peers.

python benchmarks/goals master                       # beside torch's RPC
python benchmarks/goals resilience                   # what the loss of a rank costs, beside torchft
python benchmarks/goals checkpoint -n 2 --sizes 400M # saving and loading, beside the disk and torch
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from allranks._base.console import ArgumentParser
from allranks.tools.bench.options import sizes
from allranks.tools.outputs import output_problem

# study: what it measures, the default of -n, the default and the minimum of --sizes
STUDIES = {
    "master": ("copies", 64, "16M,64M", 4),
    "resilience": ("the state that is transferred", 64, "1G", 64),
    "checkpoint": ("the state", 2, "1G", 1 << 16),
}
_MOST_WORKERS = 126  # torch has no more device numbers for them and their group
_FEWEST_RANKS = 3  # one is lost, and the others continue together


def parse() -> argparse.Namespace:
    parser = ArgumentParser(prog="python benchmarks/goals", description=__doc__.partition("\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        help="master: number of workers that receive one command; resilience: ranks of the largest group (default 64); "
        "checkpoint: ranks (default 2)",
    )
    parser.add_argument("--sizes", type=sizes, metavar="LIST", help="bytes, such as 64K,1M or 4..64M")
    parser.add_argument(
        "--budget",
        type=float,
        default=1.0,
        metavar="S",
        help="master: seconds for each cell (default 1); resilience: for each second, 5 losses; checkpoint: 3 rounds",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures (checkpoint only; needs matplotlib)"
    )
    options = parser.parse_args()
    what, ranks, default, least = STUDIES[options.study]
    options.nproc = ranks if options.nproc is None else options.nproc
    options.sizes = sizes(default) if options.sizes is None else options.sizes
    if options.nproc < (_FEWEST_RANKS if options.study == "resilience" else 1):
        parser.error(f"-n {options.nproc}: expected at least {_FEWEST_RANKS if options.study == 'resilience' else 1}")
    if options.study == "master" and options.nproc > _MOST_WORKERS:
        parser.error(f"-n {options.nproc}: expected at most {_MOST_WORKERS} workers")
    if min(options.sizes) < least:
        parser.error(f"--sizes: expected at least {least} bytes for {what}")
    if options.budget <= 0:
        parser.error("--budget must be positive")
    if options.plot and options.study != "checkpoint":
        parser.error(f"{options.study} has no plot: omit --plot")
    if why := output_problem(options.json, options.plot):
        parser.error(why)
    return options


if __name__ == "__main__":
    options = parse()
    # Workers import the functions that the master sends from these modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
    raise SystemExit(importlib.import_module(options.study).main(options))
