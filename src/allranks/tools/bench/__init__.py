"""``allranks bench``: what a call costs here, beside what it costs with another library.

===============  ==============================================================
``options``      the command line
``start``        how the ranks come up: with our launcher, or with mpirun
``rank``         what each of them runs
``verbs``        what is measured: buffers, sizes in bytes, right answers
``engines``      who is measured: allranks, gloo, MPI
``measure``      how: blocks in turn, medians
``overlap``      what asynchronous calls hide behind computation
``python``       Python's share of a call
``small``        small calls by the way in which they are called
``trace``        what the record of calls costs
``master``       the goals of master-worker mode
``rpc``          torch's RPC, beside it
``resilience``   the goals of elastic jobs, and of groups after a loss
``checkpoint``   the goals of checkpoints, beside torch's
``losses``       the trainings that lose a rank, and torchft beside them
``spent``        the processor time of a benchmark
``goals``        what is measured beside goals: data, JSON and text
``report``       what of the others was found: data, JSON
``text``         and text
``plot``         and a picture
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
    """The command: starts the ranks; in a process that is a rank already (RANK is set) measures. Returns the exit code.

    So ranks of several hosts are started as those of any program.
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
