"""What is measured beside goals, as data, JSON and text: each goal with what was found, beside a peer's."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allranks.tools.quiet import Conditions

__all__ = ["Goal", "GoalReport", "MasterReport", "head", "lines", "of", "quantile", "write"]

_SCALES = {"s": 1, "us": 1e6, "op/s": 1, "GB/s": 1e-9, "B": 1, "%": 100}
_WORDS = {None: "", True: "ok", False: "SHORT"}


@dataclass
class Goal:
    """One figure: a median over blocks, or what its name says, in units of SI; beside it a peer's in the same run."""

    name: str
    unit: str  # in which it is printed
    value: float
    lowest: float
    highest: float
    samples: int
    least: float | None = None  # the goal: so much at least,
    most: float | None = None  # or so much at most
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None  # how many times as good as the peer
    least_ratio: float | None = None  # the goal, where it is a part of what the peer does

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.least_ratio is not None and self.ratio is not None:
            return self.ratio >= self.least_ratio
        if self.least is not None:
            return self.value >= self.least
        return self.value <= self.most if self.most is not None else None


@dataclass(kw_only=True)
class GoalReport:
    """A whole run."""

    cpus: int
    host: str
    processor: str
    budget_s: float
    versions: dict[str, str]
    goals: list[Goal] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what could not be measured, and why
    conditions: Conditions | None = None


@dataclass(kw_only=True)
class MasterReport(GoalReport):
    """A run of ``allranks bench master``."""

    workers: int  # to which one command goes


def quantile(samples: list[float], part: float) -> float:
    """The value below which that part of the samples lies."""
    return sorted(samples)[min(len(samples) - 1, int(part * len(samples)))]


def of(
    name: str,
    unit: str,
    samples: list[float],
    *,
    part: float = 0.5,
    least: float | None = None,
    most: float | None = None,
    peer: str = "",
    beside: list[float] | None = None,
    least_ratio: float | None = None,
) -> Goal:
    """A goal's figure: the median of blocks, or another quantile.

    Args:
        name: what is measured.
        unit: in which it is printed; the samples are in units of SI, and rates more is better than less.
        samples: one of each block, or call.
        part: which quantile.
        least: the goal, if it is a rate.
        most: the goal, if it is a cost.
        peer: whose samples lie beside.
        beside: they; none if the peer is not there.
        least_ratio: the goal, if it is a part of the peer's rate.
    """
    value = statistics.median(samples) if part == 0.5 else quantile(samples, part)
    goal = Goal(name, unit, value, min(samples), max(samples), len(samples), least, most, least_ratio=least_ratio)
    if beside:
        goal.peer = peer
        goal.peer_value = statistics.median(beside) if part == 0.5 else quantile(beside, part)
        goal.ratio = value / goal.peer_value if unit.endswith("/s") else goal.peer_value / value
    return goal


def write(report: GoalReport, file: Path) -> None:
    """Writes JSON."""
    found = asdict(report)
    for entry, goal in zip(found["goals"], report.goals, strict=True):
        entry["met"] = goal.met
    file.write_text(json.dumps(found, indent=1) + "\n")


def head(report: GoalReport, subject: str) -> str:
    """What and where, and titles."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"# {subject} on {report.cpus} CPUs ({report.processor}); {versions}\n"
        "# medians; ratio: how many times as good as the peer\n"
        f"{'':<54} {'goal':>12} {'measured':>12} {'':<5} {'lowest':>10} {'highest':>10} {'n':>5}  peer, ratio"
    )


def lines(found: list[Goal]) -> str:
    """A line for each goal."""
    return "\n".join(map(_line, found))


def _line(goal: Goal) -> str:
    wanted = ""
    if goal.least_ratio is not None:
        wanted = f">= {goal.least_ratio:.0%}"
    elif goal.least is not None:
        wanted = f">= {_number(goal.least, goal.unit)}"
    elif goal.most is not None:
        wanted = f"<= {_number(goal.most, goal.unit)}"
    beside = ""
    if goal.peer_value is not None and goal.ratio is not None:
        beside = f"  {goal.peer} {_number(goal.peer_value, goal.unit)}, {goal.ratio:.2f}x"
    return (
        f"{f'{goal.name}, {goal.unit}':<54} {wanted:>12} {_number(goal.value, goal.unit):>12} {_WORDS[goal.met]:<5} "
        f"{_number(goal.lowest, goal.unit):>10} {_number(goal.highest, goal.unit):>10} {goal.samples:5d}{beside}"
    ).rstrip()


def _number(value: float, unit: str) -> str:
    scaled = value * _SCALES[unit]
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.3g}"
