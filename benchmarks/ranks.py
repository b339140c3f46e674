"""Growth of the cost of a call with the ranks of a host: time, and CPU time of a rank, beside gloo and Open MPI.

    build/bench-venv/bin/python benchmarks/ranks.py --json benchmarks/ranks.json --plot benchmarks/ranks.png

For each number of ranks `allranks bench all` runs once. Many ranks share few CPUs here, so the time of a call includes
the time slices of all ranks. The CPU time of a rank estimates the time of a call on a machine with a CPU for each
rank. A straight line through the logarithms gives the exponent of its growth. The fit starts at 4 ranks, because two
ranks never wait for each other's time slice.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = (2, 4, 16, 32, 64)
SIZES = {"8": 8, "4K": 4 << 10, "256K": 256 << 10}
COLOURS = {"native": "#0b6e4f", "gloo": "#c8553d", "mpi": "#3d5a98"}
GOAL = 1.2  # the exponent of small calls
SMALL = 4 << 10
FROM = 4


def measure(ranks: int, budget_s: float, against: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = ["bench", "all", "-n", ranks, "--sizes", ",".join(SIZES), "--budget", budget_s, "--json", file]
        words += ["--against", against] if against else []
        subprocess.run([sys.executable, "-m", "allranks", *map(str, words)], check=True)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def cells(reports: dict[Any, dict[str, Any]], asked: list[int]) -> dict[str, dict[str, dict[int, dict[Any, Any]]]]:
    """Return the values by verb, engine, requested size in bytes, and key of `reports`."""
    found: dict[str, dict[str, dict[int, dict[Any, Any]]]] = {}
    for key, report in reports.items():
        for table in report["tables"]:
            for row in table["rows"]:
                nbytes = row["nbytes"] and min(asked, key=lambda size: abs(math.log(size / row["nbytes"])))
                for engine, timing in row["timings"].items():
                    values = {name: timing[name] for name in ("median_s", "fastest_s", "cpu_s")}
                    found.setdefault(table["verb"], {}).setdefault(engine, {}).setdefault(nbytes, {})[key] = values
    return found


def exponent(by_ranks: dict[int, dict[str, float]]) -> float:
    """Return the exponent of a rank's CPU time in the number of ranks."""
    points = [(math.log(ranks), math.log(values["cpu_s"])) for ranks, values in by_ranks.items() if ranks >= FROM]
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return slope


def draw(path: Path, found: dict[str, Any]) -> None:
    from allranks.tools.bench.plot import drawing

    plt = drawing()
    figure, axes = plt.subplots(2, 5, figsize=(16, 6.5), layout="constrained", squeeze=False)
    for panel, (verb, engines) in zip(axes.flat, found.items(), strict=False):
        for engine, sizes in engines.items():
            for nbytes, by_ranks in sizes.items():
                if nbytes > 8:
                    continue
                add_lines(panel, engine, by_ranks)
        finish(panel, verb, RANKS)
    save(figure, axes, "us per call of 8 bytes against ranks of a host", path)


def add_lines(panel: Any, engine: str, by_count: dict[int, dict[str, float]]) -> None:
    """Draw time and CPU time of an engine's calls, in us, against a number of ranks or hosts."""
    for key, style, what in (("median_s", "-", "time"), ("cpu_s", ":", "processor time of a rank")):
        values = [each[key] * 1e6 for each in by_count.values()]
        label = f"{engine}, {what}"
        panel.plot(list(by_count), values, style, marker="o", markersize=3, color=COLOURS[engine], label=label)


def finish(panel: Any, title: str, counts: Sequence[int]) -> None:
    """Add title, axes and grid to a panel whose lines are drawn."""
    panel.set(title=title, xscale="log", yscale="log")
    panel.set_xticks(counts, [str(each) for each in counts])
    panel.minorticks_off()
    panel.grid(True, alpha=0.3)


def save(figure: Any, axes: Any, title: str, path: Path) -> None:
    """Add the legend and the title of all panels, and write the picture."""
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.3, metavar="S", help="seconds for each cell (default 0.3)")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="default %(default)s")
    parser.add_argument("--against", default="gloo,mpi", help="default %(default)s; '' for none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    reports = {int(n): measure(int(n), options.budget, options.against) for n in options.ranks.split(",")}
    found = cells(reports, list(SIZES.values()))
    exponents = {
        verb: {f"{nbytes} B": round(exponent(by_ranks), 2) for nbytes, by_ranks in engines["native"].items()}
        for verb, engines in found.items()
    }
    print(f"\nexponents of the processor time of a rank, from {FROM} ranks on (goal for {SMALL} B and less: {GOAL})")
    for verb, by_size in exponents.items():
        print(f"{verb:>15}  " + "  ".join(f"{size}: {value:.2f}" for size, value in by_size.items()))
    if options.json:
        first = next(iter(reports.values()))
        about = {key: first[key] for key in ("processor", "cpus", "versions", "settings")}
        conditions = {ranks: report["conditions"] for ranks, report in reports.items()}
        written = {**about, "conditions": conditions, "cells": found, "exponents": exponents}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.plot:
        draw(options.plot, found)


if __name__ == "__main__":
    main()
