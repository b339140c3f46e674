"""What a run of the bench found, as data and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allranks.tools.quiet import Conditions

__all__ = [
    "Overlap",
    "Recorded",
    "BenchReport",
    "BenchRow",
    "BenchShare",
    "Small",
    "Straggling",
    "Summary",
    "BenchTable",
    "Timing",
    "summaries",
    "write",
]


@dataclass
class Timing:
    """One engine at one size: seconds per call, over blocks."""

    median_s: float
    fastest_s: float
    slowest_s: float
    cpu_s: float  # the mean of the ranks: what they spend, of all their threads
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int  # elements, over all ranks, that were not what they should be
    blocks: int
    calls_per_block: int


@dataclass
class BenchRow:
    """One size."""

    nbytes: int
    count: int
    timings: dict[str, Timing]
    ratios: dict[str, float]  # peer's median / native's
    fastest_ratios: dict[str, float]  # peer's fastest block / native's


@dataclass
class BenchTable:
    """One verb."""

    verb: str
    op: str  # "" where nothing is reduced
    in_place: bool
    rows: list[BenchRow] = field(default_factory=list)


@dataclass
class Overlap:
    """One engine's asynchronous call beside computation (``overlap``): medians of seconds, of the slowest rank."""

    engine: str
    call: str
    nbytes: int
    compute_s: float
    communicate_s: float
    both_s: float
    hidden: float
    rounds: int
    wrong: int


@dataclass
class BenchShare:
    """Python's part of a call (``python``): medians of seconds per call, from a depth down."""

    depths_s: dict[str, float]
    python_s: float
    blocks: int


@dataclass
class Recorded:
    """What the record of calls costs an all_reduce (``trace``): medians of seconds per call.

    Attributes:
        nbytes: of the tensor.
        on_s: where it is recorded.
        off_s: where it is not.
        paired_s: the median of the differences of neighbouring blocks.
        blocks: of each.
    """

    nbytes: int
    on_s: float
    off_s: float
    paired_s: float
    blocks: int


@dataclass
class Small:
    """A small all_reduce by the way in which it is called (``small``): medians of seconds per call.

    Attributes:
        nbytes: of the tensor.
        ways_s: by way; ``small.py`` has the list.
        fastest_s: of the fastest blocks.
        blocks: of each.
        wrong: elements, over all ranks and ways.
    """

    nbytes: int
    ways_s: dict[str, float]
    fastest_s: dict[str, float]
    blocks: int
    wrong: int

    def more_s(self, way: str, than: str) -> float:
        """How much longer one way takes than another."""
        return self.ways_s[way] - self.ways_s[than]


@dataclass
class Straggling:
    """Whether a rank that comes late to each step is found (``trace``).

    Attributes:
        late: that rank.
        late_s: how late it comes.
        found: who was found.
        share: of the steps in which that rank came last.
        found_s: by how much, on average.
        steps: how many.
    """

    late: int
    late_s: float
    found: int
    share: float
    found_s: float
    steps: int


@dataclass
class BenchReport:
    """A whole run: verbs, or overlap, or Python's share."""

    ranks: int
    cpus: int
    host: str
    processor: str
    dtype: str
    apart: bool  # a barrier before every call
    budget_s: float
    versions: dict[str, str]
    settings: dict[str, str]  # by engine; native first
    tables: list[BenchTable] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    share: BenchShare | None = None
    recorded: list[Recorded] = field(default_factory=list)
    straggling: Straggling | None = None
    small: list[Small] = field(default_factory=list)
    conditions: Conditions | None = None  # of rank 0's host, while it was measured

    @property
    def wrong(self) -> int:
        """Wrong elements of all engines."""
        timings = [timing for table in self.tables for row in table.rows for timing in row.timings.values()]
        return sum(each.wrong for found in (timings, self.overlaps, self.small) for each in found)


@dataclass
class Summary:
    """How many times as long a peer takes, over the sizes of a verb."""

    verb: str
    peer: str
    worst: float
    worst_nbytes: int
    median: float
    best: float
    best_nbytes: int
    fastest_median: float  # of the ratios of fastest blocks


def summaries(report: BenchReport) -> list[Summary]:
    """One for each verb and peer."""
    found = []
    for table in report.tables:
        for peer in table.rows[0].ratios:
            ratios = [(row.ratios[peer], row.nbytes) for row in table.rows]
            middle = statistics.median(ratio for ratio, _ in ratios)
            fastest = statistics.median(row.fastest_ratios[peer] for row in table.rows)
            found.append(Summary(table.verb, peer, *min(ratios), middle, *max(ratios), fastest))
    return found


def write(report: BenchReport, file: Path) -> None:
    """Writes JSON."""
    found = asdict(report) | {"summaries": [asdict(each) for each in summaries(report)]}
    file.write_text(json.dumps(found, indent=1) + "\n")
