"""The pairs of a job as a picture: two matrices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from allranks.tools.doctor.report import DoctorReport

__all__ = ["plot"]

_WRITTEN = 16  # up to this many ranks, the cells have room for a number


def plot(report: DoctorReport, file: Path) -> None:
    """Draw latency and bandwidth of each pair. Needs matplotlib.

    Args:
        report: The report of a job, with its pairs.
        file: The output file. Its extension determines the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    pairs, size = report.pairs, len(report.hosts)
    assert pairs is not None
    side = max(4.2, min(0.55 * size + 2, 12))
    figure, panels = plt.subplots(1, 2, figsize=(2 * side + 1.5, side + 0.6), layout="constrained")
    alone = "one pair at a time" if pairs.one_by_one else "pairs at the same time"
    latency = pairs.matrix(size, lambda pair: pair.latency_us)
    bandwidth = pairs.matrix(size, lambda pair: pair.bandwidth_gb_s)
    least, most = _least(latency), _most(bandwidth)
    # Bright is good. The colors span a factor of ten, so that similar values look similar.
    near, far = LogNorm(least, max(_most(latency), 10 * least)), LogNorm(min(_least(bandwidth), most / 10), most)
    _matrix(figure, panels[0], latency, report.hosts, "latency, us: half a round trip of 8 bytes", "viridis_r", near)
    title = f"bandwidth, GB/s: {pairs.nbytes >> 20} MiB one way"
    _matrix(figure, panels[1], bandwidth, report.hosts, title, "viridis", far)
    hosts = len(set(report.hosts))
    figure.suptitle(f"messages between {size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {alone}", fontsize=11)
    figure.savefig(file, dpi=90)
    plt.close(figure)


def _least(rows: list[list[float | None]]) -> float:
    return min(value for row in rows for value in row if value is not None)


def _most(rows: list[list[float | None]]) -> float:
    return max(value for row in rows for value in row if value is not None)


def _matrix(
    figure: Any, panel: Any, rows: list[list[float | None]], hosts: list[str], title: str, colours: str, norm: Any
) -> None:
    values = [[math.nan if value is None else value for value in row] for row in rows]
    image = panel.imshow(values, cmap=colours, norm=norm)
    panel.set_title(title, fontsize=10)
    size = len(hosts)
    step = max(1, size // 24)
    ticks = range(0, size, step)
    panel.set_xticks(ticks, [str(rank) for rank in ticks], fontsize=8)
    panel.set_yticks(ticks, [f"{hosts[rank]}:{rank}" for rank in ticks], fontsize=8)
    for border in (rank for rank in range(1, size) if hosts[rank] != hosts[rank - 1]):
        panel.axhline(border - 0.5, color="white", linewidth=1.5)
        panel.axvline(border - 0.5, color="white", linewidth=1.5)
    if size <= _WRITTEN:
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if value is not None:
                    red, green, blue, _ = image.cmap(image.norm(value))
                    dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                    text = f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"
                    panel.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    bar = figure.colorbar(image, ax=panel, shrink=0.75)
    marks = _steps(norm.vmin, norm.vmax)
    bar.set_ticks(marks, labels=[f"{mark:g}" for mark in marks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)


def _steps(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, from low to high."""
    return [m * 10.0**e for e in range(-6, 10) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
