"""The results of a bench run, as data and as JSON."""

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
    cpu_s: float  # CPU time of all threads of a rank, the mean over the ranks
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int  # number of wrong elements, over all ranks
    blocks: int
    calls_per_block: int


@dataclass
class BenchRow:
    """The results at one size."""

    nbytes: int
    count: int
    timings: dict[str, Timing]
    ratios: dict[str, float]  # peer's median / native's
    fastest_ratios: dict[str, float]  # peer's fastest block / native's


@dataclass
class BenchTable:
    """The results of one verb."""

    verb: str
    op: str  # "" if the verb does not reduce
    in_place: bool
    rows: list[BenchRow] = field(default_factory=list)


@dataclass
class Overlap:
    """One engine's asynchronous call during computation (``overlap``): medians in seconds, of the slowest rank."""

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
    """Python's share of a call (``python``): medians of seconds per call, by depth, from the outermost inward."""

    depths_s: dict[str, float]
    python_s: float
    blocks: int


@dataclass
class Recorded:
    """The cost of recording an all_reduce (``trace``): medians of seconds per call.

    Attributes:
        nbytes: Bytes of the tensor.
        on_s: With recording.
        off_s: Without recording.
        paired_s: The median of the differences between neighboring blocks.
        blocks: The number of blocks of each kind.
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
        nbytes: Bytes of the tensor.
        ways_s: The medians by way; ``small.py`` lists the ways.
        fastest_s: The fastest blocks by way.
        blocks: The number of blocks of each way.
        wrong: Wrong elements, over all ranks and ways.
    """

    nbytes: int
    ways_s: dict[str, float]
    fastest_s: dict[str, float]
    blocks: int
    wrong: int

    def more_s(self, way: str, than: str) -> float:
        """Return how much longer one way takes than another."""
        return self.ways_s[way] - self.ways_s[than]


@dataclass
class Straggling:
    """Whether the record finds a rank that is late in each step (``trace``).

    Attributes:
        late: The late rank.
        late_s: Its delay, in seconds.
        found: The rank that the record reports.
        share: The share of steps in which the reported rank arrived last.
        found_s: Its mean delay, in seconds.
        steps: The number of steps.
    """

    late: int
    late_s: float
    found: int
    share: float
    found_s: float
    steps: int


@dataclass
class BenchReport:
    """The results of a whole run: verbs, overlap, Python's share, small calls, or the cost of recording."""

    ranks: int
    cpus: int
    host: str
    processor: str
    dtype: str
    apart: bool  # a barrier before every call
    budget_s: float
    versions: dict[str, str]
    settings: dict[str, str]  # by engine; native is first
    tables: list[BenchTable] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    share: BenchShare | None = None
    recorded: list[Recorded] = field(default_factory=list)
    straggling: Straggling | None = None
    small: list[Small] = field(default_factory=list)
    conditions: Conditions | None = None  # of rank 0's host, during the measurement

    @property
    def wrong(self) -> int:
        """The number of wrong elements of all engines."""
        timings = [timing for table in self.tables for row in table.rows for timing in row.timings.values()]
        return sum(each.wrong for found in (timings, self.overlaps, self.small) for each in found)


@dataclass
class Summary:
    """Time of a peer relative to native, over the sizes of a verb."""

    verb: str
    peer: str
    worst: float
    worst_nbytes: int
    median: float
    best: float
    best_nbytes: int
    fastest_median: float  # median of the ratios of the fastest blocks


def summaries(report: BenchReport) -> list[Summary]:
    """Return a summary for each verb and peer."""
    found = []
    for table in report.tables:
        for peer in table.rows[0].ratios:
            ratios = [(row.ratios[peer], row.nbytes) for row in table.rows]
            middle = statistics.median(ratio for ratio, _ in ratios)
            fastest = statistics.median(row.fastest_ratios[peer] for row in table.rows)
            found.append(Summary(table.verb, peer, *min(ratios), middle, *max(ratios), fastest))
    return found


def write(report: BenchReport, file: Path) -> None:
    """Write the report as JSON."""
    found = asdict(report) | {"summaries": [asdict(each) for each in summaries(report)]}
    file.write_text(json.dumps(found, indent=1) + "\n")
