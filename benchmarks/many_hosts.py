"""Growth of the cost of calls with the number of hosts, beside gloo and Open MPI over TCP: time and CPU time.

    build/bench-venv/bin/python benchmarks/many_hosts.py --json found.json --plot found.png

The layouts are 2 to 16 hosts of 1, 2 and 4 ranks each, created as in benchmarks/hosts.py. Up to 64 ranks share few
CPUs here, so the time of a call includes the time slices of all ranks. The CPU time of a rank estimates the time of a
call on a machine with a CPU for each rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ranks import add_lines, cells, finish, save

from hosts import bench, cluster, parts

LAYOUTS = [(hosts, per_host) for per_host in (1, 2, 4) for hosts in (2, 4, 8, 16)]
SIZES = {"8": 8, "64K": 64 << 10, "4M": 4 << 20}


def measure(layouts: list[tuple[int, int]], verb: str, budget_s: float) -> dict[str, dict[str, Any]]:
    """Return the reports by layout, for example "4x2"."""
    found = {}
    for hosts, per_host in layouts:
        with cluster(hosts) as made:
            print(f"\n{hosts} hosts with {per_host} ranks each", flush=True)
            more = ("--sizes", ",".join(SIZES), "--budget", str(budget_s))
            found[f"{hosts}x{per_host}"] = bench(made.hosts, parts(hosts), per_host, verb, *more)
    return found


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw a row for each number of ranks per host and a column for each verb, at 64 KiB."""
    from allranks.tools.bench.plot import drawing

    plt = drawing()
    verbs = [verb for verb in found if verb not in ("barrier", "send", "gather", "scatter", "reduce")]
    per_hosts = sorted({int(layout.split("x")[1]) for layout in found[verbs[0]]["native"]["65536"]})
    figure, axes = plt.subplots(
        len(per_hosts),
        len(verbs),
        figsize=(3.2 * len(verbs), 2.6 * len(per_hosts)),
        layout="constrained",
        squeeze=False,
    )
    for row, per_host in zip(axes, per_hosts, strict=True):
        for panel, verb in zip(row, verbs, strict=True):
            for engine, sizes in found[verb].items():
                mine = {
                    int(layout.split("x")[0]): values
                    for layout, values in sizes["65536"].items()
                    if int(layout.split("x")[1]) == per_host
                }
                add_lines(panel, engine, mine)
            finish(panel, f"{verb}, {per_host} per host", list(mine))
    save(figure, axes, "us per call of 64 KiB against hosts", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.2, metavar="S", help="seconds for each cell (default 0.2)")
    parser.add_argument(
        "--layouts", help="hosts x ranks per host, such as 2x1,4x2 (default: 2 to 16 hosts of 1, 2 and 4 ranks)"
    )
    parser.add_argument("--verb", default="all", help="measure one verb (default: all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    layouts = LAYOUTS
    if options.layouts:
        layouts = [
            (int(hosts), int(ranks)) for hosts, _, ranks in (x.partition("x") for x in options.layouts.split(","))
        ]
    reports = measure(layouts, options.verb, options.budget)
    found = cells(reports, list(SIZES.values()))
    first = next(iter(reports.values()))
    written = {
        **{key: first[key] for key in ("processor", "cpus", "versions", "settings")},
        "conditions": {layout: report["conditions"] for layout, report in reports.items()},
        "cells": found,
    }
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.plot:
        draw(options.plot, json.loads(json.dumps(found)))


if __name__ == "__main__":
    main()
