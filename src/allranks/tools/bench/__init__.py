"""``allranks bench``: the cost of a call, compared with the cost in other libraries.

===============  ==============================================================
``options``      the command line
``start``        how the ranks start: with allranks's launcher, or with mpirun
``rank``         the program of each rank
``verbs``        the calls: buffers, sizes in bytes, expected results
``engines``      the libraries: allranks, gloo, MPI
``measure``      the method: blocks in turn, medians
``overlap``      how much of asynchronous calls computation hides
``python``       Python's share of a call
``small``        small calls, by the way in which they are called
``trace``        the cost of recording calls
``report``       results: data, JSON
``text``         results: text
``plot``         results: a picture
===============  ==============================================================

The goals of master-worker mode, resilience and checkpoints are measured by ``benchmarks/goals`` in the repository.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from allranks._base.console import Program, harmless
from allranks._base.exit_codes import USAGE

__all__ = ["main"]


def main(argv: Sequence[str]) -> int | Program:
    """Start the ranks, or measure in a process that is already a rank (RANK is set). Return the exit code.

    The ranks of several hosts can therefore be started like those of any program.
    """
    from allranks.tools.bench import start
    from allranks.tools.bench.options import parse

    options = parse(argv)
    if "RANK" in os.environ and "mpi" not in options.against:
        from allranks.tools.bench import rank

        return rank.main(argv)
    try:
        if "mpi" in options.against:
            return start.start_by_mpi(options.nproc, options.hosts, argv)
    except start.MpiMissing as error:
        print(harmless(f"allranks bench: error: {error}"), file=sys.stderr)
        return USAGE
    return start.start(options.nproc, argv)
