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
``master``       the goals of master-worker mode
``rpc``          torch's RPC, for comparison
``resilience``   the goals of elastic jobs, and of groups after a loss
``checkpoint``   the goals of checkpoints, compared with torch
``losses``       trainings that lose a rank, compared with torchft
``spent``        the CPU time of a benchmark
``goals``        results that have goals: data, JSON and text
``report``       other results: data, JSON
``text``         other results: text
``plot``         other results: a picture
===============  ==============================================================
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
    if options.verb == "master":
        from allranks.tools.bench import master

        return master.main(options)
    if options.verb == "resilience":
        from allranks.tools.bench import resilience

        return resilience.main(options)
    if options.verb == "checkpoint":
        from allranks.tools.bench import checkpoint

        return checkpoint.main(options)
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
