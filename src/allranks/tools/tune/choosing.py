"""Which choice is best, of those that were timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks._engines.native.tuning import NEVER

__all__ = ["TunedValues", "choose"]

_BETTER = 0.97  # of the time: less is noise


@dataclass
class TunedValues:
    """What was measured, in microseconds per call.

    Attributes:
        cpus: of the host.
        meetings: for numbers of ranks, the size of the groups (0: none), and bytes.
        shots: for numbers of ranks, and bytes: read from all ranks at once, and in shards.
    """

    cpus: int
    meetings: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)
    shots: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)


def choose(found: TunedValues) -> dict[str, int]:
    """The table that follows from what was measured. What was not measured is not in it: what is shipped stays."""
    table: dict[str, int] = {}
    ratios = {ranks: _of_groups(times) for ranks, times in found.meetings.items() if len(times) > 1}
    for name, among in (
        ("levels_from", [ranks for ranks in ratios if ranks <= found.cpus]),
        ("crowded_levels_from", [ranks for ranks in ratios if ranks > found.cpus]),
    ):
        if not among:
            continue
        table[name] = NEVER
        for ranks in sorted(among, reverse=True):
            if min(ratios[ranks].values()) > _BETTER:
                break
            table[name] = ranks
    used = [ratios[ranks] for ranks in ratios if any(ranks >= table.get(name, NEVER) for name in table)]
    if used:
        sizes = set.intersection(*(set(each) for each in used)) or set(used[-1])
        table["group"] = min(sizes, key=lambda size: math.prod(each.get(size, 1.0) for each in used))
    if found.shots:
        crossings = {ranks: _crossing(times) for ranks, times in found.shots.items()}
        table["one_shot"] = max(crossings.values())
        table["one_shot_of_all"] = round(statistics.median(ranks * most for ranks, most in crossings.items()))
    return table


def _of_groups(times: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """The time with groups of each size, in that without."""
    return {
        size: math.prod(with_groups[n] / times[0][n] for n in times[0]) ** (1 / len(times[0]))
        for size, with_groups in times.items()
        if size
    }


def _crossing(times: Mapping[int, tuple[float, float]]) -> int:
    """The most bytes up to which to read from all at once is no slower."""
    most = 0
    for nbytes in sorted(times):
        at_once, in_shards = times[nbytes]
        if at_once > in_shards:
            break
        most = nbytes
    return most
