"""Text output of a report: one line for each check, its advice below; then the pairs. Colors on terminals only."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from allranks._base.console import has_colours, put
from allranks.tools.doctor.pairs import Pair, Pairs
from allranks.tools.doctor.report import DoctorLine, DoctorReport

__all__ = ["lines_of", "show", "table"]

_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
_WIDEST = 16  # maximum ranks of a printed matrix; --json and --plot show larger ones


def show(report: DoctorReport) -> None:
    """Print the report."""
    shown = io.StringIO()
    console = Console(file=shown, highlight=False, force_terminal=has_colours(sys.stdout))
    for line in lines_of(report):
        console.print(line, soft_wrap=True)
    put(shown.getvalue(), styled=True)


def lines_of(report: DoctorReport) -> Iterator[Text]:
    """Yield the lines, with their colors."""
    width = max((len(line.name) for line in report.lines), default=0)
    if report.hosts:
        hosts = ", ".join(dict.fromkeys(report.hosts))
        yield Text(f"{len(report.hosts)} ranks on {hosts}")
    for line in report.lines:
        yield from _line(line, width)
    if report.pairs is not None and len(report.hosts) <= _WIDEST:
        yield from map(Text, _matrices(report.pairs, report.hosts))
    warned = sum(line.verdict == "warn" for line in report.lines)
    yield Text(f"{len(report.lines)} checks: {report.failed} failed, {warned} with warnings")


def _line(line: DoctorLine, width: int) -> Iterator[Text]:
    where = f"[{line.where}] " if line.where else ""
    yield Text.assemble(
        (f"{line.verdict:4}", _COLOURS[line.verdict]), f"  {line.name:{width}}  ", (where, "bold"), line.measured
    )
    if line.advice:
        yield Text(f"{'':{width + 6}}  -> {line.advice}")


def _matrices(pairs: Pairs, hosts: Sequence[str]) -> Iterator[str]:
    size = len(hosts)
    alone = "one pair at a time" if pairs.one_by_one else "pairs at the same time"
    yield f"\nlatency, us: half a round trip of 8 bytes; {alone}"
    yield from table(pairs.matrix(size, lambda pair: pair.latency_us), hosts)
    yield f"\nbandwidth, GB/s: {pairs.nbytes >> 20} MiB one way; {alone}"
    yield from table(pairs.matrix(size, _bandwidth), hosts)
    yield ""


def _bandwidth(pair: Pair) -> float:
    return pair.bandwidth_gb_s


def table(rows: Sequence[Sequence[float | None]], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a matrix, with ranks at the top, and hosts and ranks at the left."""
    names = [f"{host}:{rank}" for rank, host in enumerate(hosts)]
    width = max(len(name) for name in names)
    yield " " * width + "".join(f"{rank:>8}" for rank in range(len(rows)))
    for name, row in zip(names, rows, strict=True):
        yield f"{name:>{width}}" + "".join(f"{'-' if value is None else _digits(value):>8}" for value in row)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"
