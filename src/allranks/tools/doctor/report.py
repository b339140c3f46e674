"""The results of the doctor, for one process or for all ranks of a job, as data and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allranks._base.console import put
from allranks._base.errors import rank_list
from allranks.tools.doctor.check import Check, Verdict
from allranks.tools.doctor.pairs import Pairs

__all__ = ["DoctorFacts", "DoctorLine", "DoctorReport", "compare_versions", "merge", "write"]

_ORDER: tuple[Verdict, ...] = ("ok", "warn", "FAIL")
_VITAL = ("allranks", "torch")  # different versions of these are failures, not only warnings


@dataclass(frozen=True)
class DoctorFacts:
    """The facts that a rank reports about itself.

    Attributes:
        rank: The number of the rank.
        host: The name of its host.
        machine: A text that is the same for all ranks of a host.
        versions: Versions that should be equal on all ranks.
        checks: The results of its checks.
    """

    rank: int
    host: str
    machine: str
    versions: Mapping[str, str]
    checks: Sequence[Check]


@dataclass(frozen=True)
class DoctorLine:
    """One finding, of some hosts or ranks, or of all."""

    name: str
    verdict: Verdict
    measured: str
    advice: str = ""
    where: str = ""  # "" for all


@dataclass
class DoctorReport:
    """The results of a whole run."""

    lines: list[DoctorLine]
    hosts: list[str] = field(default_factory=list)  # by rank, in a job
    pairs: Pairs | None = None

    @property
    def failed(self) -> int:
        """The number of failures."""
        return sum(line.verdict == "FAIL" for line in self.lines)


def merge(gathered: Sequence[DoctorFacts]) -> list[DoctorLine]:
    """Return one line for each finding: the worst of each host. Hosts with the same finding share a line."""
    by_host: dict[str, list[DoctorFacts]] = {}
    for facts in gathered:
        by_host.setdefault(facts.machine, []).append(facts)
    lines = []
    for number, check in enumerate(gathered[0].checks):
        hosts_of: dict[tuple[Verdict, str, str], list[str]] = {}
        for some in by_host.values():
            worst = max(some, key=lambda facts: _ORDER.index(facts.checks[number].verdict)).checks[number]
            alike = [facts.rank for facts in some if facts.checks[number].verdict == worst.verdict]
            place = some[0].host if len(alike) == len(some) else f"{rank_list(alike)} on {some[0].host}"
            hosts_of.setdefault((worst.verdict, worst.measured, worst.advice), []).append(place)
        whole = [some[0].host for some in by_host.values()]
        for (verdict, measured, advice), places in hosts_of.items():
            lines.append(
                DoctorLine(check.name, verdict, measured, advice, "" if places == whole else ", ".join(places))
            )
    return lines


def compare_versions(gathered: Sequence[DoctorFacts]) -> list[DoctorLine]:
    """Return a line for each version that differs between ranks; a single line if all versions are equal."""
    lines = []
    for name in dict.fromkeys(name for facts in gathered for name in facts.versions):
        found: dict[str, list[DoctorFacts]] = {}
        for facts in gathered:
            found.setdefault(facts.versions.get(name, "none"), []).append(facts)
        if len(found) > 1:
            versions = "; ".join(
                f"{version} on {', '.join(dict.fromkeys(f.host for f in some))} ({rank_list([f.rank for f in some])})"
                for version, some in found.items()
            )
            verdict: Verdict = "FAIL" if name in _VITAL else "warn"
            lines.append(DoctorLine("versions", verdict, f"{name} {versions}", "Install one version on all hosts."))
    if not lines:
        same = ", ".join(f"{name} {version}" for name, version in gathered[0].versions.items())
        lines.append(DoctorLine("versions", "ok", f"{same}: the same on all ranks"))
    return lines


def write(report: DoctorReport, file: Path) -> None:
    """Write the report as JSON; to stdout if the file is ``-``."""
    text = json.dumps(asdict(report) | {"failed": report.failed}, indent=1)
    if str(file) == "-":
        put(text + "\n")
    else:
        file.write_text(text + "\n")
