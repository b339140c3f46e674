"""Selects the best of the timed choices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks._engines.native.tuning import NEVER

__all__ = ["TunedValues", "choose_tuning"]

_BETTER = 0.97  # share of the time without groups; a smaller gain is noise


@dataclass
class TunedValues:
    """The measurements, in microseconds per call.

    Attributes:
        cpus: The number of CPUs of the host.
        group_times: Times by number of ranks, by size of the groups (0: no groups), and by bytes.
        one_shot_times: Times by number of ranks and by bytes: reading from all ranks at the same time, and in shards.
    """

    cpus: int
    group_times: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)
    one_shot_times: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)


def choose_tuning(found: TunedValues) -> dict[str, int]:
    """Return the tuning table that follows from the measurements.

    A value that was not measured is missing from the table, so that the default applies.
    """
    table: dict[str, int] = {}
    ratios = {ranks: _relative_times(times) for ranks, times in found.group_times.items() if len(times) > 1}
    for name, among in (
        ("levels_from", [ranks for ranks in ratios if ranks <= found.cpus]),
        ("crowded_levels_from", [ranks for ranks in ratios if ranks > found.cpus]),
    ):
        if not among:
            continue
        table[name] = NEVER
        # From the largest number down: groups apply from `ranks` on, so they must be faster for all larger numbers.
        for ranks in sorted(among, reverse=True):
            if min(ratios[ranks].values()) > _BETTER:
                break
            table[name] = ranks
    used = [ratios[ranks] for ranks in ratios if any(ranks >= table.get(name, NEVER) for name in table)]
    if used:
        sizes = set.intersection(*(set(each) for each in used)) or set(used[-1])
        table["group"] = min(sizes, key=lambda size: math.prod(each.get(size, 1.0) for each in used))
    if found.one_shot_times:
        crossings = {ranks: _crossing(times) for ranks, times in found.one_shot_times.items()}
        table["one_shot"] = max(crossings.values())
        table["one_shot_of_all"] = round(statistics.median(ranks * most for ranks, most in crossings.items()))
    return table


def _relative_times(times: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the time with groups of each size, relative to the time without groups (geometric mean over bytes)."""
    return {
        size: math.prod(with_groups[n] / times[0][n] for n in times[0]) ** (1 / len(times[0]))
        for size, with_groups in times.items()
        if size
    }


def _crossing(times: Mapping[int, tuple[float, float]]) -> int:
    """Return the largest size in bytes up to which reading from all ranks at the same time is not slower."""
    most = 0
    for nbytes in sorted(times):
        one_shot, in_shards = times[nbytes]
        if one_shot > in_shards:
            break
        most = nbytes
    return most
