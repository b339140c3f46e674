"""Which rank begins the collectives of torch's backends last. Pure.

The Flight Recorder keeps when each rank began its newest calls. Rank 0 compares these times about once per minute. The
statistics are therefore a sample: in a job with more calls per minute than the recorder keeps, the others are not
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from allranks._trace.stats import GroupStats, JobStats, RankStats
from allranks._watch.recorded import FlightCall

__all__ = ["ArrivalStats", "Arrivals", "GroupArrivals", "arrivals_of"]

_SAME_HOST_NS = 20_000  # smaller differences are not significant: the recorder reads the clock before it takes a lock
_OTHER_HOST_NS = 2_000_000  # the usual error of clocks that NTP synchronizes


class GroupArrivals(msgspec.Struct, frozen=True):
    """When a rank began collectives of a group.

    Attributes:
        title: Name of the group. "" for the default group.
        ranks: Its members, as world ranks.
        calls: By number of the call: the time in nanoseconds of ``time.time_ns``, and the index of the call site.
    """

    title: str
    ranks: tuple[int, ...]
    calls: dict[int, tuple[int, int]]


class Arrivals(msgspec.Struct, frozen=True):
    """When a rank began the collectives that its Flight Recorder has kept.

    Attributes:
        groups: Its groups.
        sites: The call sites.
    """

    groups: tuple[GroupArrivals, ...]
    sites: tuple[str, ...]


def arrivals_of(calls: Iterable[FlightCall], wall_ns: int, now: float) -> Arrivals:
    """Return the times of recorded calls.

    Args:
        calls: The calls, as ``read_dump`` returns them.
        wall_ns: The current time that was passed to it, in nanoseconds of ``time.time_ns``.
        now: The same, in seconds of ``time.monotonic``.
    """
    sites: dict[str, int] = {}
    found: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, int]]] = {}
    for call in calls:
        state = call.state
        if state.number:  # not a message
            at_ns = wall_ns - round((now - state.began) * 1e9)
            site = sites.setdefault(state.site, len(sites))
            found.setdefault((state.group, state.ranks), {})[state.number] = at_ns, site
    return Arrivals(tuple(GroupArrivals(*group, times) for group, times in found.items()), tuple(sites))


class ArrivalStats:
    """How often each rank was last, and by how much."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, tuple[int, ...]], int] = {}  # newest compared call of each group
        self._compared: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._times: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._late_ns: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._sites: dict[tuple[str, tuple[int, ...], int], Counter[str]] = {}
        self._covered_ns = 0

    def add(self, of_ranks: Mapping[int, Arrivals], machines: Mapping[int, str]) -> None:
        """Compare the ranks' calls that were not compared before.

        Args:
            of_ranks: The times of each rank that has answered.
            machines: The host of each rank.
        """
        covered_ns = 0
        groups = {(group.title, group.ranks) for arrivals in of_ranks.values() for group in arrivals.groups}
        for title, ranks in sorted(groups):
            if not set(ranks) <= of_ranks.keys():
                continue
            by_rank = [_calls_of(of_ranks[rank], title, ranks) for rank in ranks]
            newest = self._counted.get((title, ranks), 0)
            common = sorted(set.intersection(*map(set, by_rank)) - set(range(newest + 1)))
            if not common:
                continue
            self._counted[title, ranks] = common[-1]
            covered_ns = max(covered_ns, by_rank[0][common[-1]][0] - by_rank[0][common[0]][0])
            for number in common:
                self._compare(title, ranks, [calls[number] for calls in by_rank], of_ranks, machines)
        self._covered_ns += covered_ns

    def _compare(
        self,
        title: str,
        ranks: tuple[int, ...],
        calls: Sequence[tuple[int, int]],
        of_ranks: Mapping[int, Arrivals],
        machines: Mapping[int, str],
    ) -> None:
        self._compared[title, ranks] += 1
        order = sorted(range(len(ranks)), key=lambda at: calls[at][0])
        before, last = ranks[order[-2]], ranks[order[-1]]
        late_ns = calls[order[-1]][0] - calls[order[-2]][0]
        if late_ns < (_SAME_HOST_NS if machines.get(before) == machines.get(last) else _OTHER_HOST_NS):
            return
        key = title, ranks, last
        self._times[key] += 1
        self._late_ns[key] += late_ns
        self._sites.setdefault(key, Counter())[of_ranks[last].sites[calls[order[-1]][1]]] += late_ns

    def stats(self, rank: int, host: str) -> RankStats:
        """Return the counts in the form of the statistics of allranks's own groups, as observed by a rank."""
        groups = [
            GroupStats(
                title or "world",
                ranks,
                {},
                compared,
                {
                    late: (times, self._late_ns[name, of, late] / 1e9)
                    for (name, of, late), times in self._times.items()
                    if (name, of) == (title, ranks)
                },
            )
            for (title, ranks), compared in self._compared.items()
        ]
        return RankStats(rank, host, self._covered_ns / 1e9, tuple(groups))

    def warnings(self, hosts: Mapping[int, str]) -> list[str]:
        """Return one line for each rank that stands out: how often it was last, and in which line of the program."""
        # The ranks' own statistics give the names of the hosts.
        found = JobStats([self.stats(-1, ""), *(RankStats(rank, host, 0.0) for rank, host in hosts.items())])
        lines = []
        for each in found.late:
            if each.stands_out:
                key = "" if each.group == "world" else each.group, each.ranks, each.rank
                site, late_ns = self._sites[key].most_common(1)[0]
                where = f", {late_ns / self._late_ns[key]:.0%} of it in calls at {site}" if site else ""
                lines.append(
                    f"rank {each.rank}{f' ({each.host})' if each.host else ''} began {each.times:,} of"
                    f" {each.compared:,} compared collectives of group '{each.group}' last, by {each.seconds:.1f} s in"
                    f" total: {each.share:.0%} of their time{where}"
                )
        return lines


def _calls_of(arrivals: Arrivals, title: str, ranks: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    return next((each.calls for each in arrivals.groups if (each.title, each.ranks) == (title, ranks)), {})
