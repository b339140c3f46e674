"""A picture of a bench run: time against size, a panel for each verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allranks.tools.bench.report import BenchReport, BenchTable
from allranks.tools.bench.text import human, times

__all__ = ["drawing", "plot"]

_COLOURS = {"native": "#0b6e4f", "gloo": "#c8553d", "mpi": "#3d5a98"}


def drawing() -> Any:
    """Return matplotlib.pyplot with a backend that writes files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(report: BenchReport, file: Path) -> None:
    """Draw time against size, both on log axes. Needs matplotlib."""
    plt = drawing()
    columns = min(4 if len(report.tables) > 6 else 3, len(report.tables))
    rows = -(-len(report.tables) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(7, 4 * columns), max(4.5, 3.2 * rows)), layout="constrained", squeeze=False
    )
    for panel, table in zip(axes.flat, report.tables, strict=False):
        if table.verb == "barrier":
            _bars(panel, table)
        else:
            _lines(panel, table)
        panel.set_title(" ".join(filter(None, (table.verb, table.op))), fontsize=10)
    for panel in axes.flat[len(report.tables) :]:
        panel.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if len(report.tables) < axes.size:
        axes.flat[-1].legend(handles, labels, loc="center", fontsize=14, frameon=False)
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"time per call, {report.ranks} ranks on {report.cpus} CPUs ({report.processor}), {report.dtype}\n"
        "median and range of all blocks",
        fontsize=11,
    )
    figure.savefig(file, dpi=85)
    plt.close(figure)


def _lines(panel: Any, table: BenchTable) -> None:
    sizes = [row.nbytes for row in table.rows]
    for name in table.rows[0].timings:
        found = [row.timings[name] for row in table.rows]
        colour = _COLOURS[name]
        panel.plot(sizes, [t.median_s * 1e6 for t in found], marker="o", markersize=3, label=name, color=colour)
        panel.fill_between(
            sizes, [t.fastest_s * 1e6 for t in found], [t.slowest_s * 1e6 for t in found], color=colour, alpha=0.12
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    shown = sizes[:: max(1, len(sizes) // 5)]
    panel.set_xticks(shown, [human(n) for n in shown], fontsize=8)
    panel.minorticks_off()
    panel.tick_params(axis="y", labelsize=8)
    panel.yaxis.set_major_formatter(_duration)
    panel.grid(True, which="major", alpha=0.3)


def _bars(panel: Any, table: BenchTable) -> None:
    timings = table.rows[0].timings
    names = list(timings)
    values = [timings[name].median_s * 1e6 for name in names]
    bars = panel.barh(names, values, color=[_COLOURS[name] for name in names])
    ratios = ["", *(f" ({times(ratio)})" for ratio in table.rows[0].ratios.values())]
    panel.bar_label(
        bars, [f"{v:,.1f} us{ratio}" for v, ratio in zip(values, ratios, strict=True)], padding=3, fontsize=8
    )
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlim(right=max(values) * 200)
    panel.xaxis.set_major_formatter(_duration)
    panel.minorticks_off()
    panel.tick_params(labelsize=8)


def _duration(us: float, position: int) -> str:
    if us >= 1e6:
        return f"{us / 1e6:g} s"
    return f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"
