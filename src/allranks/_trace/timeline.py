"""The calls of all ranks on one clock, which ranks waited for which, and the error of the times.

``chrome``, ``page`` and ``picture`` draw it. The clock is that of the host of the lowest rank. Its zero is the first
call, or a later time if only the last calls are shown. Only ``read`` performs I/O.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allranks._base.verbs import MESSAGES
from allranks._trace.clocks import ClockLink, join_clocks
from allranks._trace.files import open_trace, trace_files
from allranks._trace.inspection import OF_MASTER
from allranks._trace.matching import (
    MatchedCollective,
    MatchedMessage,
    RecordedProcess,
    clock_bounds,
    clocks_of,
    match,
    read_process,
)
from allranks._trace.reader import COMMAND, RecordedCall, TraceError

__all__ = ["Arrow", "Clock", "LateInCall", "TimelineRow", "Slice", "Timeline", "Times", "build", "read"]

_MESSAGES = "messages"
_COMMANDS = "commands"
_WAITS = "waits for workers"
_SAME_HOST_NS = 1_000_000_000  # tolerance for offsets of one clock


@dataclass(frozen=True)
class Clock:
    """The clock of a host.

    Attributes:
        host: Name of the host.
        ranks: Ranks that run there.
        added: Value that was added to its time at the beginning, in ns.
        error: Largest error of its times, in ns. None: unknown, because only wall clocks were compared.
        drift: How much faster the common clock runs; 1e-6 is one microsecond per second.
        calls: Number of calls by which it was compared.
    """

    host: str
    ranks: tuple[int, ...]
    added: int
    error: float | None
    drift: float
    calls: int


@dataclass(frozen=True)
class Slice:
    """A call. Times are in ns since the beginning of the timeline, and ranks are world ranks.

    Attributes:
        row: Number of its row.
        lane: Number of its lane. Calls of a row that overlap have different lanes.
        begin: When it began.
        end: When it ended, or the last known time.
        ended: It has ended.
        waited_until: When the last rank had arrived. ``begin`` if the call did not wait, or if that is unknown.
        title: Title such as ``all_reduce #42``.
        call: The call as it was recorded.
        group: Name of its group.
        last: Rank that arrived last. -1: unknown.
        peer: The root, or the other side of a message. -1: none.
    """

    row: int
    lane: int
    begin: int
    end: int
    ended: bool
    waited_until: int
    title: str
    call: RecordedCall
    group: str
    last: int
    peer: int


@dataclass(frozen=True)
class TimelineRow:
    """The calls of a process in a group, or its messages.

    Attributes:
        process: Number of the process.
        title: Name of the group, or "messages".
        lanes: How many of its calls overlap at most.
    """

    process: int
    title: str
    lanes: int


@dataclass(frozen=True)
class Arrow:
    """An arrow from the last rank to arrive to a rank that waited for it, or from a send to its recv.

    ``source`` and ``target`` are numbers of slices, and the times are within these slices.
    """

    kind: str
    source: int
    source_ns: int
    target: int
    target_ns: int


class Times:
    """Converts times of processes to the common clock.

    Args:
        links: Conversion to the common clock, by clock.
        walls: By clock, how far the wall clock of its host is ahead of it, in ns.
    """

    def __init__(self, links: Mapping[int, ClockLink], walls: Mapping[int, int]) -> None:
        self.links = links
        self.walls = walls

    def __call__(self, process: RecordedProcess, ns: int) -> int:
        """Convert a time of a process's monotonic clock, in ns, by wall clocks if calls do not connect the clocks."""
        link = self.links.get(process.clock)
        return link(ns) if link is not None else ns + self.walls[process.clock] - self.walls[0]

    def of_wall(self, process: RecordedProcess, wall: int) -> int:
        """Convert a time of the wall clock of a process's host, in ns."""
        return self(process, wall - process.wall + process.began)

    def error(self, clock: int) -> float:
        """Return the largest error of the converted times of a clock, in ns."""
        link = self.links.get(clock)
        return link.largest_error if link is not None else float("inf")


@dataclass(frozen=True)
class LateInCall:
    """A rank that arrived last in some calls.

    Attributes:
        rank: World rank.
        times: Number of these calls.
        waited: How long all other ranks have waited in these calls, in ns.
    """

    rank: int
    times: int
    waited: int


@dataclass(frozen=True)
class Timeline:
    """The calls of all ranks.

    Attributes:
        processes: The processes, by rank.
        rows: Rows of each process, one process after the other.
        slices: The calls, by row and begin.
        arrows: Which ranks waited for which.
        clocks: Clocks of the hosts.
        late: Ranks that arrived last; first the rank for which the others waited longest.
        compared: Number of collectives for which the last rank to arrive is known.
        zero: Time 0 of the timeline, in ns of the monotonic clock of the host of the lowest rank.
        zero_wall: The same time by the wall clock of that host.
        times: Converts other times.
    """

    processes: tuple[RecordedProcess, ...]
    rows: tuple[TimelineRow, ...]
    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...]
    clocks: tuple[Clock, ...]
    late: tuple[LateInCall, ...]
    compared: int
    zero: int
    zero_wall: int
    times: Times

    @property
    def end(self) -> int:
        """The last time of the timeline, in ns."""
        return max((each.end for each in self.slices), default=0)

    @property
    def calls(self) -> int:
        """Number of calls."""
        return sum(each.call.verb != COMMAND for each in self.slices)

    @property
    def commands(self) -> int:
        """Number of commands that workers have executed."""
        return sum(each.call.count for each in self.slices if each.call.verb == COMMAND)

    @property
    def missing(self) -> int:
        """Number of calls that were made but are not in the files."""
        return sum(process.missing for process in self.processes)

    @property
    def error(self) -> float | None:
        """The largest error between the times of two ranks, in ns. None if it is unknown."""
        errors = [clock.error for clock in self.clocks]
        return None if None in errors else sum(sorted(error for error in errors if error is not None)[-2:])


def read(paths: Sequence[Path], last_s: float | None = None, just_ended: bool = False) -> Timeline:
    """Return the timeline of trace files. Their processes may still run; calls in progress then last until now.

    Args:
        paths: Files, and folders with files.
        last_s: Only the calls of the last ``last_s`` seconds.
        just_ended: The processes of this host have exited just now, so their calls in progress lasted until now.

    Raises:
        TraceError: A file cannot be read or is not a trace, or no file contains a call.
    """
    processes = []
    for number, path in enumerate(trace_files(paths)):
        process = read_process(number, str(path), open_trace(path))
        if _is_of_this_host(process) and (just_ended or _is_written(path, process.pid)):
            process = replace(process, until=time.monotonic_ns())
        processes.append(process)
    return build(processes, last_s)


def _is_of_this_host(process: RecordedProcess) -> bool:
    ahead = time.time_ns() - time.monotonic_ns()
    return process.host == socket.gethostname() and abs(ahead - process.wall + process.began) < _SAME_HOST_NS


def _is_written(path: Path, pid: int) -> bool:
    """Return whether the process that writes the file is alive. Its pid alone may belong to another process by now."""
    try:
        return str(path.resolve()) in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return False


def build(processes: Sequence[RecordedProcess], last_s: float | None = None) -> Timeline:
    """Return the timeline of processes.

    Raises:
        TraceError: There is no call.
    """
    clocks = clocks_of(processes)
    placed = [replace(process, clock=clocks[process.number]) for process in processes]
    if not any(process.calls or process.alone for process in placed):
        raise TraceError("no calls to draw: no rank has made a call")
    _, collectives, messages = match(placed)
    links = _links(placed, collectives, messages)
    return _Builder(placed, links, last_s).build(collectives, messages)


def _links(
    processes: Sequence[RecordedProcess], collectives: Sequence[MatchedCollective], messages: Sequence[MatchedMessage]
) -> dict[int, ClockLink]:
    spans: dict[int, tuple[int, int]] = {}
    for process in processes:
        begin, end = spans.get(process.clock, (process.began, process.began))
        first = process.calls[0].entered_ns if process.calls else process.began
        spans[process.clock] = min(begin, first), max(end, process.ended)
    return join_clocks(0, spans, clock_bounds(processes, collectives, messages))


class _Builder:
    """Places the calls in rows and lanes, on the common clock."""

    def __init__(
        self, processes: Sequence[RecordedProcess], links: Mapping[int, ClockLink], last_s: float | None
    ) -> None:
        self._processes = sorted(processes, key=lambda p: (p.rank, p.wall, p.number))
        self._by_number = {process.number: process for process in processes}
        self._times = Times(links, {p.clock: p.wall - p.began for p in reversed(self._processes)})
        self._slices: list[Slice] = []
        self._slice_of: dict[tuple[int, int], int] = {}  # number of the slice, by process and index of the call
        self._rows: list[TimelineRow] = []
        begun = [(p, calls[0]) for p in self._processes for calls in (p.calls, p.alone) if calls]
        self._zero = min(self._times(p, call.entered_ns) for p, call in begun)
        self._until = max(self._times(p, p.seen) for p in self._processes)
        self._cut = last_s is not None
        if last_s is not None:
            self._zero = max(self._zero, self._until - round(last_s * 1e9))

    def _since_zero(self, process: RecordedProcess, ns: int) -> int:
        return self._times(process, ns) - self._zero

    def build(self, collectives: Sequence[MatchedCollective], messages: Sequence[MatchedMessage]) -> Timeline:
        """Return the timeline."""
        collective_of = {
            (process, call.index): collective
            for collective in collectives
            for process, call in collective.calls.items()
        }
        for process in self._processes:
            self._add_process(process, collective_of)
        late: dict[int, LateInCall] = {}
        arrows = [*self._arrivals(collectives, late), *self._sent(messages)]
        return Timeline(
            processes=tuple(self._processes),
            rows=tuple(self._rows),
            slices=tuple(self._slices),
            arrows=tuple(sorted(arrows, key=lambda arrow: arrow.source_ns)),
            clocks=tuple(self._clocks()),
            late=tuple(sorted(late.values(), key=lambda each: (-each.waited, each.rank))),
            compared=sum(each.times for each in late.values()),
            zero=self._zero,
            zero_wall=self._zero + self._times.walls[0],
            times=self._times,
        )

    def _add_process(
        self, process: RecordedProcess, collective_of: Mapping[tuple[int, int], MatchedCollective]
    ) -> None:
        by_row: dict[str, list[RecordedCall]] = defaultdict(list)
        for call in process.alone:
            by_row[_COMMANDS if call.verb == COMMAND else _WAITS].append(call)
        for call in process.calls:
            group = process.groups.get(call.group)
            name = group.name if group is not None else "an unknown group"
            by_row[_MESSAGES if call.verb in MESSAGES else name].append(call)
        by_row[_MESSAGES] = by_row.pop(_MESSAGES, [])  # move the messages to the last row
        for title, calls in by_row.items():
            free: list[int] = []  # when the last call of each lane ends
            # Of calls that begin at the same time, the longest takes the first lane. A call in progress is the longest.
            for call in sorted(calls, key=lambda call: (call.entered_ns, -(call.returned_ns or 1 << 62))):
                made = self._slice(process, call, collective_of.get((process.number, call.index)))
                if made.end <= 0 and self._cut:
                    continue
                lane = next((i for i, end in enumerate(free) if end <= made.begin), len(free))
                free[lane : lane + 1] = [made.end]
                self._slice_of[process.number, call.index] = len(self._slices)
                self._slices.append(replace(made, row=len(self._rows), lane=lane))
            if free:
                self._rows.append(TimelineRow(process.number, title, len(free)))

    def _slice(self, process: RecordedProcess, call: RecordedCall, collective: MatchedCollective | None) -> Slice:
        group = process.groups.get(call.group)
        ranks = group.ranks if group is not None else ()

        def world(rank: int) -> int:
            return ranks[rank] if 0 <= rank < len(ranks) else -1

        begin = self._since_zero(process, call.entered_ns)
        end = self._since_zero(process, call.returned_ns) if call.returned_ns else self._until - self._zero
        met, last = begin, world(call.last)
        if call.met_ns:
            met = self._since_zero(process, call.met_ns)
        elif collective is not None and collective.complete and len(collective.calls) > 1:
            met, last = self._computed(collective)
        elif not call.returned_ns and call.number:
            met = end  # a call in progress may hang: all of its time counts as waiting
        if group is not None and group.engine == OF_MASTER:
            title, met, last = f"a wait for worker {call.peer}", end, world(call.peer)
        elif call.verb in MESSAGES:
            way = "to" if call.verb == "send" else "from"
            title = f"{call.verb} {way} {'any rank' if call.peer < 0 else f'rank {world(call.peer)}'}"
        else:
            title = call.title
        return Slice(
            row=0,
            lane=0,
            begin=max(0, begin) if end >= 0 else begin,
            end=max(begin, end),
            ended=call.returned_ns != 0,
            waited_until=min(max(begin, met, 0), max(begin, end)),
            title=title,
            call=call,
            group=group.name if group is not None else "",
            last=last,
            peer=world(call.peer),
        )

    def _computed(self, collective: MatchedCollective) -> tuple[int, int]:
        """Return when the last rank arrived, and that rank, from the entries of all ranks.

        The rank is -1 if the errors of the clocks are too large to distinguish the last two ranks.
        """
        came = sorted(
            (self._since_zero(self._by_number[number], call.entered_ns), number)
            for number, call in collective.calls.items()
        )
        (before, one), (met, other) = came[-2:]
        clocks = {self._by_number[number].clock for number in (one, other)}
        error = sum(self._times.error(clock) for clock in clocks) if len(clocks) > 1 else 0.0
        return met, self._by_number[other].rank if met - before > error else -1

    def _arrivals(self, collectives: Sequence[MatchedCollective], late: dict[int, LateInCall]) -> list[Arrow]:
        """Return arrows from the last rank to arrive to the ranks that waited. Add these last ranks to ``late``."""
        arrows = []
        for collective in collectives:
            keys = [(number, call.index) for number, call in collective.calls.items()]
            there = [(self._by_number[key[0]].rank, self._slice_of[key]) for key in keys if key in self._slice_of]
            last = max((self._slices[i].last for _, i in there), default=-1)
            if last < 0:
                continue
            waited_ns = sum(self._slices[i].waited_until - self._slices[i].begin for rank, i in there if rank != last)
            before = late.get(last, LateInCall(last, 0, 0))
            late[last] = LateInCall(last, before.times + 1, before.waited + waited_ns)
            source = next((i for rank, i in there if rank == last), None)
            if source is None:
                continue
            for _, i in there:
                waited = self._slices[i].waited_until
                if i != source and waited > self._slices[i].begin:
                    arrows.append(Arrow("arrival", source, self._slices[source].begin, i, waited))
        return arrows

    def _sent(self, messages: Sequence[MatchedMessage]) -> list[Arrow]:
        arrows = []
        for message in messages:
            source = self._slice_of.get((message.sender, message.send.index))
            target = self._slice_of.get((message.receiver, message.recv.index))
            if source is not None and target is not None:
                arrows.append(Arrow("message", source, self._slices[source].begin, target, self._slices[target].end))
        return arrows

    def _clocks(self) -> list[Clock]:
        found = []
        for number in sorted({process.clock for process in self._processes}):
            mine = [process for process in self._processes if process.clock == number]
            link = self._times.links.get(number)
            at = mine[0].began
            found.append(
                Clock(
                    host=mine[0].host,
                    ranks=tuple(dict.fromkeys(process.rank for process in mine)),
                    added=self._times(mine[0], at) - at,
                    error=None if link is None else link.largest_error,
                    drift=sum(each.drift for each in link.through) if link is not None else 0.0,
                    calls=0 if link is None else link.calls,
                )
            )
        return found
