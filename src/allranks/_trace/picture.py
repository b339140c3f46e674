"""Draws a timeline with matplotlib: ranks are rows, calls have the color of their verb, and waiting is pale."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from allranks._trace.chrome import name_of
from allranks._trace.colours import COLOURS, colour, pale
from allranks._trace.timeline import Arrow, Timeline

__all__ = ["write"]

_LANE = 0.8  # height of a call; lanes have a distance of 1
_GAP = 0.5  # between processes
_ARROWS = 400  # the most arrows that are drawn: those with the longest waiting
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def write(timeline: Timeline, file: Path) -> None:
    """Write the picture, in the format given by the suffix of the file.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection

    tops, height = _layout(timeline)
    unit, name = next(((u, n) for u, n in _UNITS if timeline.end >= 2 * u), _UNITS[-1])
    figure, axes = plt.subplots(figsize=(16, min(40.0, 1.9 + 0.34 * height)), layout="constrained")
    boxes: dict[str, list[Any]] = defaultdict(list)
    for each in timeline.slices:
        top = tops[each.row] + each.lane
        boxes[colour(each.call.verb)].append(_box(each.waited_until / unit, each.end / unit, top))
        if each.waited_until > each.begin:
            boxes[pale(each.call.verb)].append(_box(each.begin / unit, each.waited_until / unit, top))
    for filled, corners in boxes.items():
        axes.add_collection(PolyCollection(corners, facecolors=filled, edgecolors=filled, linewidths=0.4))
    _draw_arrows(axes, timeline, tops, unit)
    _draw_labels(axes, timeline, tops)
    axes.set_xlim(0, max(timeline.end, 1) / unit)
    axes.set_ylim(height, -_GAP)
    axes.set_xlabel(f"time in {name}, by the clock of {timeline.clocks[0].host}")
    axes.grid(True, axis="x", alpha=0.25)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.suptitle(_title(timeline), fontsize=11, x=0.01, ha="left")
    _draw_legend(figure, timeline)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _layout(timeline: Timeline) -> tuple[list[float], float]:
    """Return the top of each row, and the bottom of the last: lanes below each other, with a gap between processes."""
    tops, at = [], 0.0
    for number, row in enumerate(timeline.rows):
        if number and timeline.rows[number - 1].process != row.process:
            at += _GAP
        tops.append(at)
        at += row.lanes
    return tops, at


def _box(left: float, right: float, top: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, top + _LANE), (left, top + _LANE)]


def _draw_arrows(axes: Any, timeline: Timeline, tops: list[float], unit: float) -> None:
    def waiting(arrow: Arrow) -> int:
        target = timeline.slices[arrow.target]
        return target.waited_until - target.begin if arrow.kind == "arrival" else arrow.target_ns - arrow.source_ns

    for arrow in sorted(timeline.arrows, key=waiting, reverse=True)[:_ARROWS]:
        ends = []
        for number, ns in ((arrow.source, arrow.source_ns), (arrow.target, arrow.target_ns)):
            each = timeline.slices[number]
            ends.append((ns / unit, tops[each.row] + each.lane + _LANE / 2))
        style = {
            "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
            "color": "#20262e",
            "linewidth": 0.6,
            "alpha": 0.55,
        }
        axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


def _draw_labels(axes: Any, timeline: Timeline, tops: list[float]) -> None:
    ticks, labels = [], []
    named: set[int] = set()
    processes = {process.number: process for process in timeline.processes}
    for row, top in zip(timeline.rows, tops, strict=True):
        ticks.append(top + row.lanes * 0.5 - 0.1)
        if row.process in named:
            labels.append(row.title)
        else:
            labels.append(f"{name_of(timeline, processes[row.process])}   {row.title}")
            axes.axhline(top - _GAP / 2 - 0.1, color="#c8ced6", linewidth=0.7)
        named.add(row.process)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)


def _draw_legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    verbs = {each.call.verb for each in timeline.slices}
    handles = [Patch(facecolor=shade, label=verb) for verb, shade in COLOURS.items() if verb in verbs]
    handles.append(Patch(facecolor=pale("barrier"), label="pale: waits for ranks"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), frameon=False, fontsize=8)


def _title(timeline: Timeline) -> str:
    ranks = len({process.rank for process in timeline.processes})
    commands = f" and {timeline.commands:,} commands" if timeline.commands else ""
    words = [f"{ranks} ranks, {timeline.calls:,} calls{commands} in {timeline.end / 1e9:.3g} s"]
    if timeline.late:
        late = timeline.late[0]
        words.append(
            f"rank {late.rank} arrived last in {late.times / timeline.compared:.0%} of the collectives;"
            f" other ranks waited {late.waited / 1e9:.3g} s for it"
        )
    if len(timeline.clocks) > 1:
        error = timeline.error
        words.append("clock error not known" if error is None else f"clocks within {error / 1e3:.0f} us")
    return "; ".join(words)
