"""``allranks doctor``: finds causes of failures, hangs and slowness on this host, or between the ranks of a job.

============  =================================================================
``options``   the command line
``check``     the result of a check, and how checks are run
``software``  the installation: Python, the core, torch, GPUs, engines, MPI
``limits``    the resources of the host: CPUs, memory, files, processes
``network``   the host's name, its interfaces and ports
``fabric``    the networks that libfabric can use
``job``       the environment of a job: variables, the secret, remains of dead jobs
``ranks``     in a job: the results of every rank's checks, and each pair's messages
``pairs``     the schedule of the pairs, and outliers (pure functions)
``report``    the results: data, JSON
``text``      the results: text
``plot``      the results: a picture
============  =================================================================

No module here imports torch before a check does, because the doctor must work without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from allranks._base.console import Program
from allranks._base.errors import ConfigError
from allranks._base.exit_codes import FOUND, USAGE
from allranks.tools.progress import TerminalProgress

__all__ = ["main"]


def main(argv: Sequence[str]) -> int | Program:
    """Check this host or, in a rank of a job, the job. Rank 0 then reports.

    Returns:
        The exit code: 1 if a check failed. In a forked rank, the rank.
    """
    from allranks.tools.doctor import check, fabric, job, limits, network, options, ranks, report, software, text

    wanted = options.parse(argv)
    if wanted.nproc is not None:
        from allranks.launch import cli

        return cli.main(["-n", str(wanted.nproc), "-q", "--show", "0", "-m", __name__, *options.without_nproc(argv)])
    if wanted.plot is not None and job.job_here().world_size == 1:
        print(
            "allranks doctor: error: --plot draws pairs of ranks, but this is not a job.\n  Add -n 4.", file=sys.stderr
        )
        return USAGE
    every = (
        *software.CHECKS,
        *limits.CHECKS,
        *network.CHECKS,
        *((fabric.fabrics,) if wanted.fabric else fabric.CHECKS),
        *job.CHECKS,
    )  # in the order of the report
    # if the ranks have not met, each rank continues here, but only one writes the file
    first = job.job_here().rank == 0
    with TerminalProgress("allranks doctor", first) as progress:
        checks = []
        for number, each in enumerate(every):
            progress.at(f"check {number + 1} of {len(every)}, {each.__name__.replace('_', ' ')}")
            checks.append(check.run(each))
        progress.at("results of the ranks, and the connections between them")
        try:
            found = ranks.examine(checks, wanted)
        except ConfigError:  # the check of the variables has already reported it
            found = report.DoctorReport(report.merge([ranks.facts(checks)]))
    if found is None:
        return 0  # rank 0 prints it
    if wanted.json is not None and first:
        report.write(found, wanted.json)
    if wanted.json is None or not first or str(wanted.json) != "-":
        text.show(found)
    if wanted.plot is not None and found.pairs is not None:
        from allranks.tools.doctor.plot import plot

        plot(found, wanted.plot)
    return FOUND if found.failed else 0
