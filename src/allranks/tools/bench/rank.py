"""The program of each rank of a bench: ``python -m allranks.tools.bench.rank``, with the arguments of the bench."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence

import torch

import allranks
from allranks._base.exit_codes import FOUND
from allranks._cluster.host import cores, processor, usable_cpus
from allranks._cluster.network import machine
from allranks.tools.bench import start, text
from allranks.tools.bench.engines import BenchEngine, Gloo, Native
from allranks.tools.bench.measure import BlockPlan, measure
from allranks.tools.bench.options import parse
from allranks.tools.bench.overlap import STARTS, measure_overlap
from allranks.tools.bench.plot import plot
from allranks.tools.bench.python import measure_python
from allranks.tools.bench.report import BenchReport, BenchTable, write
from allranks.tools.bench.small import measure_small
from allranks.tools.bench.trace import measure_recorded, measure_straggling
from allranks.tools.bench.verbs import VERBS
from allranks.tools.progress import TerminalProgress
from allranks.tools.quiet import MeasurementWindow, current_conditions

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Measure. Rank 0 prints and writes. Return 1 if an engine computed a wrong result."""
    options = parse(argv)
    engines: list[BenchEngine] = [Native(options.shared)]
    cpus = os.sched_getaffinity(0)
    mpi = None
    if "mpi" in options.against:
        mpi, cpus = start.join_by_mpi()
    else:
        start.join()
    rank, ranks = allranks.get_rank(), allranks.get_world_size()
    if "gloo" in options.against:
        engines.append(Gloo(rank, ranks))
    if mpi is not None:
        engines.append(mpi)
    plan = BlockPlan(rank, ranks, cpus, getattr(torch, options.dtype), options.op, options.budget, options.apart)
    with TerminalProgress("allranks bench", rank == 0) as progress:
        report = _run(engines, plan, options, progress)
    for engine in reversed(engines):
        engine.close()
    if rank == 0:
        if options.json:
            write(report, options.json)
        if options.plot:
            plot(report, options.plot)
    return FOUND if rank == 0 and report.wrong else 0


def _run(
    engines: list[BenchEngine], plan: BlockPlan, options: argparse.Namespace, progress: TerminalProgress
) -> BenchReport:
    versions = {name: version for engine in engines for name, version in engine.versions().items()}
    report = BenchReport(
        ranks=plan.ranks,
        cpus=usable_cpus(),
        host=socket.gethostname(),
        processor=processor(),
        dtype=options.dtype,
        apart=plan.apart,
        budget_s=plan.budget_s,
        versions=versions | {"torch": str(torch.__version__), "python": platform.python_version()},
        settings={engine.name: engine.settings for engine in engines},
    )
    here = _neighbours(plan.ranks)
    window = MeasurementWindow()
    progress.put(text.preface(report))
    progress.put(text.conditions(current_conditions(), len(here), cores(plan.cpus)))
    began_s = time.process_time()
    _measure(engines, plan, options, report, progress)
    spent: list[float] = [0.0] * plan.ranks
    allranks.all_gather_object(spent, time.process_time() - began_s)
    # The window measures this host, so only the CPU time of its own ranks is subtracted.
    report.conditions = window.end(sum(spent[rank] for rank in here))
    progress.put(f"\n{text.conditions(report.conditions, len(here), cores(plan.cpus))}")
    progress.put(f"# wrong elements: {report.wrong}")
    return report


def _neighbours(ranks: int) -> list[int]:
    """Return the ranks of this host."""
    hosts = [""] * ranks
    allranks.all_gather_object(hosts, machine())
    return [rank for rank, host in enumerate(hosts) if host == machine()]


def _measure(
    engines: list[BenchEngine],
    plan: BlockPlan,
    options: argparse.Namespace,
    report: BenchReport,
    progress: TerminalProgress,
) -> None:
    progress.at(options.verb)
    if options.verb == "python":
        report.share = measure_python(plan)
        progress.put(text.share_text(report.share))
    elif options.verb == "small":
        for found in measure_small(engines, options.sizes, plan):
            report.small.append(found)
            progress.put(text.small_text(found))
    elif options.verb == "trace":
        for each in measure_recorded(plan):
            report.recorded.append(each)
            progress.put(text.recorded_line(each))
        report.straggling = measure_straggling(plan)
        progress.put(text.straggling_line(report.straggling))
    elif options.verb == "overlap":
        _overlaps(engines, plan, options.sizes, report, progress)
    else:
        _tables(engines, plan, options, report, progress)


def _tables(
    engines: list[BenchEngine],
    plan: BlockPlan,
    options: argparse.Namespace,
    report: BenchReport,
    progress: TerminalProgress,
) -> None:
    sizes = {name: options.sizes if name != "barrier" else (0,) for name in options.verbs}
    cells, begun = sum(map(len, sizes.values())), 0
    for name in options.verbs:
        verb = VERBS[name]
        table = BenchTable(name, plan.op if verb.reduces else "", verb.in_place)
        report.tables.append(table)
        progress.put(text.table_head(report, table))
        for nbytes in sizes[name]:
            begun += 1
            if table.rows and verb.count(nbytes, plan.dtype.itemsize, plan.ranks) == table.rows[-1].count:
                continue  # both sizes round to the same number of elements
            progress.at(f"{name} of {text.human(nbytes)}, {begun} of {cells}")
            table.rows.append(measure(engines, verb, nbytes, plan))
            progress.put(text.row_line(table.rows[-1], report.dtype))
    if len(engines) > 1:
        progress.put(text.summary(report))


def _overlaps(
    engines: list[BenchEngine], plan: BlockPlan, sizes: list[int], report: BenchReport, progress: TerminalProgress
) -> None:
    torch.set_num_threads(1)
    progress.put(text.overlap_head())
    for nbytes in sizes:
        for call in STARTS:
            progress.at(f"{call} of {text.human(nbytes)}")
            found = measure_overlap(engines, call, nbytes, plan)
            report.overlaps += found
            progress.put("\n".join(map(text.overlap_line, found)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
