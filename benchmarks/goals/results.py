"""Measurements that have goals, as data, JSON and text. Each goal has the measured figure and that of a peer."""

from __future__ import annotations

import json
import platform
import socket
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import allranks
from allranks._cluster.host import processor, usable_cpus
from allranks.tools.quiet import Conditions

__all__ = ["Goal", "GoalReport", "MasterReport", "head", "lines", "of", "quantile", "write"]

_SCALES = {"s": 1, "us": 1e6, "op/s": 1, "GB/s": 1e-9, "B": 1, "%": 100}
_WORDS = {None: "", True: "ok", False: "SHORT"}


@dataclass
class Goal:
    """One figure in SI units: a median over blocks or another quantile, with a peer's figure of the same run."""

    name: str
    unit: str  # the unit in which it is printed
    value: float
    lowest: float
    highest: float
    samples: int
    least: float | None = None  # the goal: a lower limit,
    most: float | None = None  # or an upper limit
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None  # how many times better than the peer
    least_ratio: float | None = None  # the goal, if it is relative to the peer

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if there is no goal."""
        if self.least_ratio is not None and self.ratio is not None:
            return self.ratio >= self.least_ratio
        if self.least is not None:
            return self.value >= self.least
        return self.value <= self.most if self.most is not None else None


def _versions() -> dict[str, str]:
    return {
        "allranks": allranks.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@dataclass(kw_only=True)
class GoalReport:
    """The results of a whole run on this machine."""

    cpus: int = field(default_factory=usable_cpus)
    host: str = field(default_factory=socket.gethostname)
    processor: str = field(default_factory=processor)
    budget_s: float
    versions: dict[str, str] = field(default_factory=_versions)
    goals: list[Goal] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what was not measured, and why
    conditions: Conditions | None = None


@dataclass(kw_only=True)
class MasterReport(GoalReport):
    """The results of a run of ``python benchmarks/goals master``."""

    workers: int  # number of workers that receive one command


def quantile(samples: list[float], part: float) -> float:
    """Return the value below which this part of the samples is."""
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
    """Return the figure of a goal: the median of blocks, or another quantile.

    Args:
        name: The measured quantity.
        unit: The unit in which it is printed. The samples are in SI units. For rates, more is better.
        samples: One sample for each block or call.
        part: The quantile.
        least: The goal, if the quantity is a rate.
        most: The goal, if the quantity is a cost.
        peer: The name of the peer.
        beside: The samples of the peer; none if the peer is not available.
        least_ratio: The goal, if it is relative to the rate of the peer.
    """
    value = statistics.median(samples) if part == 0.5 else quantile(samples, part)
    goal = Goal(name, unit, value, min(samples), max(samples), len(samples), least, most, least_ratio=least_ratio)
    if beside:
        goal.peer = peer
        goal.peer_value = statistics.median(beside) if part == 0.5 else quantile(beside, part)
        goal.ratio = value / goal.peer_value if unit.endswith("/s") else goal.peer_value / value
    return goal


def write(report: GoalReport, file: Path) -> None:
    """Write the report as JSON."""
    found = asdict(report)
    for entry, goal in zip(found["goals"], report.goals, strict=True):
        entry["met"] = goal.met
    file.write_text(json.dumps(found, indent=1) + "\n")


def head(report: GoalReport, subject: str) -> str:
    """Return the subject, the machine, the versions and the column titles."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"# {subject} on {report.cpus} CPUs ({report.processor}); {versions}\n"
        "# medians; ratio: how many times as good as the peer\n"
        f"{'':<54} {'goal':>12} {'measured':>12} {'':<5} {'lowest':>10} {'highest':>10} {'n':>5}  peer, ratio"
    )


def lines(found: list[Goal]) -> str:
    """Return a line for each goal."""
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
