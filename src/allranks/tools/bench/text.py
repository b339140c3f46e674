"""Text output of a report, in nccl-tests' columns.

Each part has its own function, so that lines are printed as they are measured.
"""

from __future__ import annotations

from allranks.tools.bench.report import (
    BenchReport,
    BenchRow,
    BenchShare,
    BenchTable,
    Overlap,
    Recorded,
    Small,
    Straggling,
    summaries,
)
from allranks.tools.quiet import READING, Conditions, noise_reasons

__all__ = [
    "conditions",
    "human",
    "overlap_head",
    "overlap_line",
    "preface",
    "recorded_line",
    "row_line",
    "share_text",
    "small_text",
    "straggling_line",
    "summary",
    "table_head",
    "times",
]


def human(nbytes: int) -> str:
    """Format bytes: 1048576 as 1 MB."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def times(ratio: float) -> str:
    """Format a ratio with three digits."""
    return f"{ratio:,.0f}x" if ratio >= 99.95 else f"{ratio:.1f}x" if ratio >= 9.995 else f"{ratio:.2f}x"


def preface(report: BenchReport) -> str:
    """Return the number of ranks, the machine, the versions and the settings."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    settings = "".join(f"\n# {name}: {text}" for name, text in report.settings.items())
    return f"# {report.ranks} ranks on {report.cpus} CPUs ({report.processor}); {versions}{settings}"


def conditions(found: Conditions, ranks: int, cores: int) -> str:
    """Return a line that states whether the machine is quiet, and how to interpret the figures.

    Args:
        found: The conditions of this host, before or after a measurement.
        ranks: The number of ranks on this host.
        cores: The number of cores that they may use.
    """
    why = noise_reasons(found)
    if ranks > found.cpus:
        why.append(f"{ranks} ranks share {found.cpus} CPUs")
    elif ranks > cores:
        why.append(f"{ranks} ranks share {cores} cores (hyperthreads)")
    if why:
        return f"# not quiet: {'; '.join(why)}: {READING}"
    if found.busy is None:
        return f"# quiet so far: load {found.load:.1f} in the last minute"
    return f"# quiet: other processes kept {found.busy:.2f} of {found.cpus} CPUs busy, steal {found.steal or 0:.1%}"


def recorded_line(found: Recorded) -> str:
    """Return the cost of recording at one size."""
    return (
        f"{human(found.nbytes):>8}  recorded {found.on_s * 1e9:,.0f} ns, not recorded {found.off_s * 1e9:,.0f} ns: "
        f"{found.paired_s * 1e9:+,.0f} ns ({found.paired_s / found.off_s:.1%}), medians of {found.blocks} blocks"
    )


def straggling_line(found: Straggling) -> str:
    """Return whether the late rank was found."""
    return (
        f"rank {found.late} is {found.late_s * 1e3:g} ms late in each of {found.steps} steps; found: rank "
        f"{found.found}, last in {found.share:.0%}, by {found.found_s * 1e3:.2f} ms"
    )


def table_head(report: BenchReport, table: BenchTable) -> str:
    """Return the titles above the rows of a verb."""
    engines = list(report.settings)
    place = {True: "in place", False: "out of place"}[table.in_place]
    calls = "a barrier before each call" if report.apart else "calls back to back"
    columns = "".join(
        f"  {f'{name}: us':>10} {'fastest':>9} {'cpu':>8} {'algbw':>6} {'busbw':>6} {'#wrong':>6}" for name in engines
    )
    ratios = "".join(f"  {f'{name}/native':>11}" for name in engines[1:])
    return (
        f"\n# {' '.join(filter(None, (table.verb, table.op)))}, {place}, {calls};"
        " us: median and fastest block, and processor time per rank; GB/s of the median\n"
        f"{'bytes':>10} {'count':>10} {'type':>8}{columns}{ratios}"
    )


def row_line(row: BenchRow, dtype: str) -> str:
    """Return the line of one size."""
    engines = "".join(
        f"  {t.median_s * 1e6:10.1f} {t.fastest_s * 1e6:9.1f} {t.cpu_s * 1e6:8.1f}"
        f" {t.algbw_gb_s:6.2f} {t.busbw_gb_s:6.2f} {t.wrong:6d}"
        for t in row.timings.values()
    )
    ratios = "".join(f"  {times(ratio):>11}" for ratio in row.ratios.values())
    return f"{row.nbytes:10d} {row.count:10d} {dtype:>8}{engines}{ratios}"


def summary(report: BenchReport) -> str:
    """Return the worst, median and best ratio for each verb and peer."""
    lines = ["\n# peer / native, ratios of medians, over sizes; then the median of the ratios of fastest blocks"]
    lines += [
        f"{s.verb:>15} {s.peer:>6}   worst {times(s.worst):>7} {f'at {human(s.worst_nbytes)}':<9}"
        f" median {times(s.median):>7}   best {times(s.best):>7} {f'at {human(s.best_nbytes)}':<9}"
        f"   fastest {times(s.fastest_median):>7}"
        for s in summaries(report)
    ]
    return "\n".join(lines)


def overlap_head() -> str:
    """Return the titles above the overlaps."""
    return (
        "\n# overlap: medians of the slowest rank, in ms; hidden = 1 - (both - compute) / communicate\n"
        f"{'call':>10} {'size':>8} {'engine':>8} {'compute':>10} {'communicate':>12} {'both':>10} {'hidden':>8}"
        f" {'#wrong':>7}"
    )


def overlap_line(found: Overlap) -> str:
    """Return the line of one engine."""
    return (
        f"{found.call:>10} {human(found.nbytes):>8} {found.engine:>8} {found.compute_s * 1e3:10.2f} "
        f"{found.communicate_s * 1e3:12.2f} {found.both_s * 1e3:10.2f} {found.hidden:8.0%} {found.wrong:7d}"
    )


def share_text(share: BenchShare) -> str:
    """Return Python's share, depth by depth."""
    lines = [f"\n# a blocking 4-byte all_reduce, us per call: medians of {share.blocks} blocks"]
    lines += [f"{name:>30} {seconds * 1e6:8.3f}" for name, seconds in share.depths_s.items()]
    return "\n".join([*lines, f"{'Python, above the binding':>30} {share.python_s * 1e6:8.3f}"])


def small_text(found: Small) -> str:
    """Return the figures of a small call at one size, by way, and the differences between ways."""
    lines = [f"\n# all_reduce of {human(found.nbytes)}, us per call: medians of {found.blocks} blocks, and the fastest"]
    lines += [
        f"{way:>30} {seconds * 1e6:8.3f} {found.fastest_s[way] * 1e6:8.3f}" for way, seconds in found.ways_s.items()
    ]
    for way, than in (
        ("async", "blocking"), ("torch", "torch, nothing"), ("torch async", "torch async, nothing"),
        ("torch", "torch, fake"), ("torch async", "torch async, fake"),
    ):  # fmt: skip
        lines.append(f"# {way}: {found.more_s(way, than) * 1e6:+.2f} us, compared with {than}")
    for peer in ("mpi", "mpi persistent"):
        if peer in found.ways_s:
            lines.append(f"# {peer} / plan: {times(found.ways_s[peer] / found.ways_s['plan'])}")
    return "\n".join(lines)
