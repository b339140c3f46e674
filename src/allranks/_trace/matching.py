"""Matches the calls of several processes that belong together: a collective on all its ranks, a send and its recv.

A group is identified by its name and its ranks, a collective by its number. A rank may have been restarted, or a folder
may contain the files of two jobs. One name may therefore stand for several groups, one after the other. This module
performs no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from allranks._base import verbs
from allranks._trace.clocks import Bounds
from allranks._trace.inspection import OF_MASTER, OF_WORKER
from allranks._trace.reader import RecordedCall, RecordedGroup, TraceReader

__all__ = [
    "MatchedCollective",
    "GroupRun",
    "MatchedMessage",
    "RecordedProcess",
    "clock_bounds",
    "clocks_of",
    "match",
    "read_process",
]

_SAME_CLOCK_NS = 1_000_000_000  # tolerance for offsets of one clock, and for comparing wall clocks
_ALL_WAIT = verbs.names(waits=True)
_FROM_ROOT = verbs.names(root="src")
_TO_ROOT = verbs.names(root="dst")
_NATIVE = ("native", "tcp")
_WITHOUT_COUNT = ("barrier", "all_to_all")

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class RecordedProcess:
    """A process and its recorded calls.

    Attributes:
        number: Number in the order in which the processes were read.
        source: Origin of the record.
        rank: World rank.
        world_size: Number of ranks.
        pid: Pid on its host.
        host: Name of its host.
        began: When it began to record, by the monotonic clock of its host, in ns.
        wall: The same time by the wall clock, in ns.
        groups: Its groups, by index.
        calls: All calls that are available, oldest first.
        alone: Calls in which no other process takes part, oldest first: a worker's commands, a master's waits for its
            workers.
        until: When it was last observed, by the monotonic clock of its host; calls that had not finished were still in
            progress then.
        missing: Number of calls that were recorded but are not available, because newer calls replaced them or the disk
            was full.
        clock: Number of its clock. The processes of one host have the same.
    """

    number: int
    source: str
    rank: int
    world_size: int
    pid: int
    host: str
    began: int
    wall: int
    groups: Mapping[int, RecordedGroup]
    calls: Sequence[RecordedCall]
    alone: Sequence[RecordedCall] = ()
    until: int = 0
    missing: int = 0
    clock: int = 0

    @property
    def ended(self) -> int:
        """The last known time of the process, by its monotonic clock, in ns."""
        calls = (*self.calls, *self.alone)
        return max((max(call.entered_ns, call.returned_ns) for call in calls), default=self.began)

    @property
    def seen(self) -> int:
        """The last known time, or the time of the last observation if the process was in a call then."""
        in_call = any(call.returned_ns == 0 for call in (*self.calls, *self.alone))
        return max(self.ended, self.until) if in_call else self.ended


@dataclass(frozen=True)
class GroupRun:
    """The calls of a group from its creation to its end, by the number of the process."""

    name: str
    ranks: tuple[int, ...]
    engine: str
    calls: Mapping[int, Sequence[RecordedCall]]


@dataclass(frozen=True)
class MatchedCollective:
    """One collective, with the calls of the known processes."""

    run: GroupRun
    calls: Mapping[int, RecordedCall]

    @property
    def complete(self) -> bool:
        """Whether the calls of all ranks of the group are known."""
        return len(self.calls) == len(self.run.ranks)


@dataclass(frozen=True)
class MatchedMessage:
    """A send and its recv, and the numbers of their processes."""

    sender: int
    send: RecordedCall
    receiver: int
    recv: RecordedCall


@dataclass
class _Stretch:
    """The calls of one process in one group, from the creation of the group to its end."""

    process: RecordedProcess
    group: RecordedGroup
    calls: list[RecordedCall] = field(default_factory=list)

    def span(self) -> tuple[int, int]:
        """Return the first and the last time, by the wall clock."""
        offset = self.process.wall - self.process.began
        ends = (max(call.entered_ns, call.returned_ns) for call in self.calls)
        return self.calls[0].entered_ns + offset, max(ends) + offset


def read_process(number: int, source: str, reader: TraceReader) -> RecordedProcess:
    """Return all recorded calls of a process."""
    who = reader.identity
    calls = list(reader.calls())
    groups = reader.groups()
    own = {index for index, group in groups.items() if group.engine in (OF_MASTER, OF_WORKER)}
    return RecordedProcess(
        number=number,
        source=source,
        rank=who.rank,
        world_size=who.world_size,
        pid=who.pid,
        host=who.host,
        began=who.monotonic_ns,
        wall=who.wall_ns,
        groups=groups,
        calls=[call for call in calls if call.group not in own],
        alone=[call for call in calls if call.group in own],
        missing=reader.count - len(calls),
    )


def clocks_of(processes: Sequence[RecordedProcess]) -> dict[int, int]:
    """Return the number of the clock of each process. The clock of the lowest rank has number 0.

    Two hosts may have the same name, and a host may have been rebooted. Processes therefore share a clock only if the
    offsets between their monotonic and wall clocks also agree, within 1 s.
    """
    clocks: list[tuple[str, int]] = []
    found: dict[int, int] = {}
    for process in sorted(processes, key=lambda p: (p.rank, p.wall)):
        ahead = process.wall - process.began
        for number, (host, other) in enumerate(clocks):
            if host == process.host and abs(ahead - other) < _SAME_CLOCK_NS:
                found[process.number] = number
                break
        else:
            found[process.number] = len(clocks)
            clocks.append((process.host, ahead))
    return found


def match(processes: Sequence[RecordedProcess]) -> tuple[list[GroupRun], list[MatchedCollective], list[MatchedMessage]]:
    """Return the groups, the matched collectives and the matched messages.

    Groups and collectives that only one of the processes has recorded are included.
    """
    runs = _runs(processes)
    collectives: list[MatchedCollective] = []
    messages: list[MatchedMessage] = []
    for run in runs:
        by_number: dict[int, dict[int, RecordedCall]] = defaultdict(dict)
        for process, calls in run.calls.items():
            for call in calls:
                if call.number:
                    by_number[call.number][process] = call
        collectives += [MatchedCollective(run, calls) for calls in by_number.values()]
        messages += _messages(run, {process.number: process for process in processes})
    return runs, collectives, messages


def _runs(processes: Sequence[RecordedProcess]) -> list[GroupRun]:
    by_key: dict[Key, dict[int, list[_Stretch]]] = defaultdict(lambda: defaultdict(list))
    for process in processes:
        for stretch in _stretches(process):
            by_key[stretch.group.name, stretch.group.ranks][process.rank].append(stretch)
    runs: list[GroupRun] = []
    for by_rank in by_key.values():
        for stretches in by_rank.values():
            stretches.sort(key=lambda stretch: stretch.span())
        counts = {len(stretches) for stretches in by_rank.values()}
        # With equal numbers on all ranks, the order of creation matches the groups, whatever their clocks show.
        if len(counts) == 1:
            together = [[stretches[i] for stretches in by_rank.values()] for i in range(counts.pop())]
        else:
            together = _overlapping([stretch for stretches in by_rank.values() for stretch in stretches])
        for found in together:
            group = found[0].group
            calls = {stretch.process.number: stretch.calls for stretch in found}
            runs.append(GroupRun(group.name, group.ranks, group.engine, calls))
    return runs


def _stretches(process: RecordedProcess) -> Iterator[_Stretch]:
    open_: dict[int, _Stretch] = {}
    highest: dict[int, int] = defaultdict(int)
    for call in process.calls:
        group = process.groups.get(call.group)
        if group is None or not group.ranks:
            continue
        if call.number == 1 and highest[call.group] > 0:  # a later group uses the same index
            yield open_.pop(call.group)
            highest[call.group] = 0
        highest[call.group] = max(highest[call.group], call.number)
        open_.setdefault(call.group, _Stretch(process, group)).calls.append(call)
    yield from open_.values()


def _overlapping(stretches: list[_Stretch]) -> list[list[_Stretch]]:
    """Return the stretches grouped by group: those that overlap by the wall clock and belong to different ranks."""
    together: list[tuple[list[_Stretch], int]] = []
    for stretch in sorted(stretches, key=lambda each: each.span()):
        begin, end = stretch.span()
        for i, (found, until) in enumerate(together):
            if begin <= until + _SAME_CLOCK_NS and all(each.process.rank != stretch.process.rank for each in found):
                found.append(stretch)
                together[i] = found, max(until, end)
                break
        else:
            together.append(([stretch], end))
    return [found for found, _ in together]


def _messages(run: GroupRun, processes: Mapping[int, RecordedProcess]) -> Iterator[MatchedMessage]:
    """Match messages from one rank to another with the same tag, which arrive in the order in which they were sent."""
    number_of = {processes[number].rank: number for number in run.calls}
    sent: dict[tuple[int, int, int], list[RecordedCall]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[RecordedCall]] = defaultdict(list)
    # The sender of such a recv is unknown, so the messages of the receiver's other recvs with this tag are, too.
    from_any: set[tuple[int, int]] = set()
    for number, calls in run.calls.items():
        for call in calls:
            if call.verb == "recv" and call.peer < 0:
                from_any.add((number, call.tag))
            if call.verb in verbs.MESSAGES and 0 <= call.peer < len(run.ranks) and not call.outcome:
                other = number_of.get(run.ranks[call.peer], -1)
                if call.verb == "send":
                    sent[number, other, call.tag].append(call)
                else:
                    received[other, number, call.tag].append(call)
    for key, sends in sent.items():
        sender, receiver, tag = key
        if receiver < 0 or (receiver, tag) in from_any:
            continue
        recvs = received.get(key, [])
        surplus = len(sends) - len(recvs)
        # A process that began to record later lacks the earlier messages. At the end, some messages may not have
        # arrived.
        sends = sends[min(max(surplus, 0), _before(sends, processes[sender], processes[receiver])) :]
        recvs = recvs[min(max(-surplus, 0), _before(recvs, processes[receiver], processes[sender])) :]
        for send, recv in zip(sends, recvs, strict=False):
            yield MatchedMessage(sender, send, receiver, recv)


def _before(calls: Sequence[RecordedCall], process: RecordedProcess, other: RecordedProcess) -> int:
    """Return how many calls of a process began before the first recorded call of the other, by the wall clock."""
    first = (other.calls[0].entered_ns if other.missing and other.calls else other.began) + other.wall - other.began
    offset = process.wall - process.began
    return sum(call.entered_ns + offset < first for call in calls)


def clock_bounds(
    processes: Sequence[RecordedProcess], collectives: Sequence[MatchedCollective], messages: Sequence[MatchedMessage]
) -> dict[tuple[int, int], Bounds]:
    """Return, for each pair of clocks, the bounds of the value to add to the first to get the second."""
    clock = {process.number: process.clock for process in processes}
    bounds: dict[tuple[int, int], Bounds] = defaultdict(Bounds)

    def after(returned: RecordedCall, its: int, entered: RecordedCall, other: int) -> None:
        """Add the bound from a call that returned after another call had begun."""
        late, early = returned.returned_ns, entered.entered_ns
        bounds[other, its].upper.append((early, late - early))
        bounds[its, other].lower.append((late, early - late))

    for collective in collectives:
        by_clock: dict[int, list[tuple[bool, RecordedCall]]] = defaultdict(list)
        for process, call in collective.calls.items():
            group = processes[process].groups[call.group]
            by_clock[clock[process]].append((call.peer == group.rank, call))
        if len(by_clock) < 2:
            continue
        for its, calls in by_clock.items():
            returned = [(is_root, call) for is_root, call in calls if call.returned_ns and not call.outcome]
            for other, others in by_clock.items():
                if other == its or not returned:
                    continue
                _compare(collective.run.engine, returned, others, its, other, after)
    for message in messages:
        its, other = clock[message.receiver], clock[message.sender]
        if its != other and message.recv.returned_ns:
            after(message.recv, its, message.send, other)
    return dict(bounds)


def _compare(
    engine: str,
    returned: Sequence[tuple[bool, RecordedCall]],
    others: Sequence[tuple[bool, RecordedCall]],
    its: int,
    other: int,
    after: Callable[[RecordedCall, int, RecordedCall, int], None],
) -> None:
    """Add the bound from one collective: the first return on one clock follows the last entry on the other clock.
    Only calls that depend on each other count: for ``_FROM_ROOT``, the other ranks on the root; for ``_TO_ROOT``, the
    root on all ranks.
    """
    verb = returned[0][1].verb
    if any(call.verb != verb or (call.count == 0 and verb not in _WITHOUT_COUNT) for _, call in (*returned, *others)):
        return
    everywhere = verb in _ALL_WAIT or (verb == "all_to_all" and engine in _NATIVE)
    late = [call for is_root, call in returned if everywhere or is_root == (verb in _TO_ROOT)]
    early = [call for is_root, call in others if everywhere or verb in _TO_ROOT or is_root]
    if late and early and (everywhere or verb in _FROM_ROOT or verb in _TO_ROOT):
        first, last = min(late, key=lambda call: call.returned_ns), max(early, key=lambda call: call.entered_ns)
        after(first, its, last, other)
