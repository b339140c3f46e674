"""The differences between the clocks of hosts, derived from calls that ranks on both hosts made.

A collective such as all_reduce returns on no rank before all ranks have begun it. Each such call therefore bounds the
difference of two clocks from both sides: if rank a on one host and rank b on the other took part,
``returned_a >= entered_b + difference`` and ``entered_a <= returned_b + difference``. Over many calls, only the
tightest bounds matter. Clocks also run at different speeds. Within a segment of some seconds the difference is modeled
as a line. All lines within the bounds of all calls are possible. The error is half of the distance between the lowest
and the highest of them. Nothing is averaged, so the error is a bound and not an estimate.

This module performs no I/O: numbers in, numbers out.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Bounds", "ClockMap", "ClockLink", "fit", "join_clocks"]

_SEGMENT_NS = 20_000_000_000  # 20 s
# If no line fits a segment, it is split into halves of at least this length.
_SHORTEST_NS = 500_000_000
_MOST_DRIFT = 600e-6  # the kernel's limit for corrections, 500 ppm, plus the tolerance of a crystal
# Within a segment the speed changes by at most 1 ppm. A line then differs from the true difference by at most this
# share of the segment's length.
_BEND = 1e-6 / 8
# Iterations of each search. The last interval is (2/3)^60 = 3e-11 of the first one.
_STEPS = 60

_Point = tuple[float, float]


@dataclass
class Bounds:
    """Bounds for the value to add to one clock to get another clock.

    Attributes:
        lower: Pairs of a time of the clock and the least value to add at that time, in ns.
        upper: Pairs of a time of the clock and the greatest value to add at that time, in ns.
    """

    lower: list[tuple[int, int]] = field(default_factory=list)
    upper: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return min(len(self.lower), len(self.upper))


@dataclass(frozen=True)
class ClockMap:
    """The conversion of one clock to another: the added value changes linearly between knots.

    Attributes:
        times: Times of the knots, in ns.
        added: Values to add at the knots, in ns.
        errors: Errors of these values, in ns.
    """

    times: tuple[int, ...]
    added: tuple[float, ...]
    errors: tuple[float, ...]

    def __call__(self, ns: int) -> int:
        """Return a time in the other clock, in ns."""
        return ns + round(self._at(ns, self.added))

    def error(self, ns: int) -> float:
        """Return the error of the converted time, in ns."""
        return self._at(ns, self.errors)

    @property
    def largest_error(self) -> float:
        """The largest error, in ns."""
        return max(self.errors)

    @property
    def drift(self) -> float:
        """How much faster the other clock runs, on average; 1e-6 is one microsecond per second."""
        span = self.times[-1] - self.times[0]
        return (self.added[-1] - self.added[0]) / span if span else 0.0

    def _at(self, ns: int, values: Sequence[float]) -> float:
        if len(values) == 1:
            return values[0]
        right = min(max(bisect.bisect_right(self.times, ns), 1), len(values) - 1)
        left = right - 1
        share = (ns - self.times[left]) / (self.times[right] - self.times[left])
        return values[left] + share * (values[right] - values[left])


def fit(bounds: Bounds, begin: int, end: int) -> ClockMap | None:
    """Return the difference of two clocks between two times of the first. None if it is not bounded on both sides.

    Bounds that contradict each other, as after a step of a clock, make the error large.
    """
    if not len(bounds):
        return None
    # The fit uses differences, because times in ns since the epoch exceed the 53 bits of a float.
    base = bounds.lower[0][1]
    lower: list[_Point] = [(t - begin, value - base) for t, value in sorted(bounds.lower)]
    upper: list[_Point] = [(t - begin, value - base) for t, value in sorted(bounds.upper)]
    count = max(1, -(-(end - begin) // _SEGMENT_NS))
    segments: list[_Segment] = []
    for i in range(count):
        segments += _fit_segment(lower, upper, (end - begin) * i / count, (end - begin) * (i + 1) / count)
    knots = [segments[0].begin, *(segment.end for segment in segments)]
    ranges = [_meet(segments[max(0, i - 1) : i + 1], knot) for i, knot in enumerate(knots)]
    if knots[-1] <= knots[0]:
        knots, ranges = knots[:1], ranges[:1]
    return ClockMap(
        times=tuple(begin + round(knot) for knot in knots),
        added=tuple(base + (low + high) / 2 for low, high in ranges),
        errors=tuple((high - low) / 2 for low, high in ranges),
    )


@dataclass(frozen=True)
class _Segment:
    """A segment of time. ``at`` returns the lowest and highest value of the possible lines at a given time."""

    begin: float
    end: float
    at: Callable[[float], tuple[float, float]]


def _fit_segment(lower: list[_Point], upper: list[_Point], begin: float, end: float) -> list[_Segment]:
    lows, highs = _hull(_near(lower, begin, end), -1), _hull(_near(upper, begin, end), 1)
    gap = _gap(lows, highs)
    steepest = _top(gap, -_MOST_DRIFT, _MOST_DRIFT)
    if gap(steepest) >= 0:
        slopes = _edge(gap, steepest, -_MOST_DRIFT), _edge(gap, steepest, _MOST_DRIFT)
        bend = _BEND * (end - begin)
        return [_Segment(begin, end, lambda t: _range(lows, highs, slopes, t, bend))]
    if end - begin > 2 * _SHORTEST_NS:
        middle = (begin + end) / 2
        return _fit_segment(lower, upper, begin, middle) + _fit_segment(lower, upper, middle, end)
    # No line fits. The difference is only known to be between the smallest and the largest bound.
    values = [value for _, value in (*lows, *highs)]
    return [_Segment(begin, end, lambda _: (min(values), max(values)))]


def _near(points: list[_Point], begin: float, end: float) -> list[_Point]:
    """Return the points of a segment and the next point on each side, so that the result is not empty."""
    left = bisect.bisect_left(points, (begin, float("-inf")))
    right = bisect.bisect_right(points, (end, float("inf")))
    return points[max(0, left - 1) : right + 1]


def _hull(points: list[_Point], sign: int) -> list[_Point]:
    """Return the lower (1) or upper (-1) convex hull: points that a line below (above) all points can touch."""
    kept: list[_Point] = []
    for x, y in points:
        while kept and kept[-1][0] == x and sign * (kept[-1][1] - y) >= 0:
            kept.pop()
        if kept and kept[-1][0] == x:
            continue
        while len(kept) > 1:
            (x0, y0), (x1, y1) = kept[-2:]
            if sign * ((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)) > 0:
                break
            kept.pop()
        kept.append((x, y))
    return kept


def _highest(points: list[_Point], slope: float, t: float) -> float:
    """Return the value at time ``t`` of the highest line of that slope that is below all points."""
    return min(y - slope * (x - t) for x, y in points)


def _lowest(points: list[_Point], slope: float, t: float) -> float:
    return max(y - slope * (x - t) for x, y in points)


def _gap(lows: list[_Point], highs: list[_Point]) -> Callable[[float], float]:
    """Return a concave function of the slope: the room that lines of that slope have. Negative: no line fits."""
    t = highs[0][0]
    return lambda slope: _highest(highs, slope, t) - _lowest(lows, slope, t)


def _top(function: Callable[[float], float], left: float, right: float) -> float:
    """Return the position of a concave function's maximum, by ternary search."""
    for _ in range(_STEPS):
        a, b = left + (right - left) / 3, right - (right - left) / 3
        if function(a) < function(b):
            left = a
        else:
            right = b
    return (left + right) / 2


def _edge(function: Callable[[float], float], inside: float, limit: float) -> float:
    """Return the last position towards the limit at which a concave function is not negative, by bisection.

    The result can be slightly beyond this position, so that the error remains a bound.
    """
    if function(limit) >= 0:
        return limit
    outside = limit
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if function(middle) >= 0 else (inside, middle)
    return outside


def _range(
    lows: list[_Point], highs: list[_Point], slopes: tuple[float, float], t: float, bend: float
) -> tuple[float, float]:
    """Return the lowest and the highest value of the lines within the bounds at a time."""
    at_top = _top(lambda slope: _highest(highs, slope, t), *slopes)
    at_bottom = _top(lambda slope: -_lowest(lows, slope, t), *slopes)
    top = max(_highest(highs, slope, t) for slope in (at_top, *slopes))
    bottom = min(_lowest(lows, slope, t) for slope in (at_bottom, *slopes))
    return bottom - bend, top + bend


def _meet(segments: Sequence[_Segment], t: float) -> tuple[float, float]:
    """Return the values that are possible at the boundary of segments.

    These are the values possible in each of the segments. If the segments contradict each other, they are those
    possible in any of them.
    """
    ranges = [segment.at(t) for segment in segments]
    low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
    return (low, high) if low <= high else (min(r[0] for r in ranges), max(r[1] for r in ranges))


@dataclass(frozen=True)
class ClockLink:
    """The conversion of a clock to the common clock.

    Attributes:
        through: The maps to apply, one after the other. Empty for the common clock itself.
        calls: Number of bounds from which the first map was derived.
    """

    through: tuple[ClockMap, ...] = ()
    calls: int = 0

    def __call__(self, ns: int) -> int:
        """Return a time in the common clock, in ns."""
        for each in self.through:
            ns = each(ns)
        return ns

    def error(self, ns: int) -> float:
        """Return the error of the converted time, in ns."""
        error = 0.0
        for each in self.through:
            error += each.error(ns)
            ns = each(ns)
        return error

    @property
    def largest_error(self) -> float:
        """The sum of the largest errors of the maps, in ns."""
        return sum(each.largest_error for each in self.through)


def join_clocks(
    common: int, spans: Mapping[int, tuple[int, int]], bounds: Mapping[tuple[int, int], Bounds]
) -> dict[int, ClockLink]:
    """Return the conversion of each clock to a common clock: the path through other clocks with the smallest error.
    Args:
        common: Number of the common clock.
        spans: By clock, the first and the last time that must be converted, in ns of that clock.
        bounds: By a pair of clocks, the bounds of the value to add to the first to get the second.

    Returns:
        The conversion, by clock. Clocks that no bounds connect to the common clock are missing.
    """
    maps: dict[tuple[int, int], ClockMap] = {}
    for (one, other), found in bounds.items():
        if (fitted := fit(found, *spans[one])) is not None:
            maps[one, other] = fitted
    links: dict[int, ClockLink] = {}
    # Breaks ties of equal errors, because links cannot be compared.
    order = itertools.count(1)
    # Dijkstra's algorithm: the length of a path is the sum of the errors of its maps.
    ways: list[tuple[float, int, int, ClockLink]] = [(0.0, 0, common, ClockLink())]
    while ways:
        error, _, clock, link = heapq.heappop(ways)
        if clock in links:
            continue
        links[clock] = link
        for one, step in _into(clock, maps):
            if one not in links:
                way = ClockLink((step, *link.through), len(bounds[one, clock]))
                heapq.heappush(ways, (error + step.largest_error, next(order), one, way))
    return links


def _into(clock: int, maps: Mapping[tuple[int, int], ClockMap]) -> Iterable[tuple[int, ClockMap]]:
    return ((one, step) for (one, other), step in maps.items() if other == clock)
