"""Determines the state of a rank of this host, also after its exit: from its record of calls, and from the kernel."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from allranks._trace.kernel import KernelWait, kernel_wait, process_state
from allranks._trace.notes import notes_of
from allranks._trace.reader import COMMAND, RecordedCall, RecordedGroup, TraceReader
from allranks._trace.state import CallState, GroupState, RankState, Usage

__all__ = ["OF_MASTER", "OF_WORKER", "QuietClock", "call_state", "next_limit", "rank_state", "usage"]

_MESSAGES = ("send", "recv")
OF_MASTER = "master"
"""The engine of the group whose messages are a master's waits for its workers."""
OF_WORKER = "worker"
"""The engine of the group that contains only one worker, whose calls are the commands that it has executed."""
_MOST_OPEN = 16  # the most calls in progress in the state of a rank
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


# A wait is reported again after each of these times, and after the last one every 1800 s.
_REPORT_AGAIN_S = (60.0, 300.0, 1800.0)


class QuietClock:
    """Measures how long a rank has begun no call. A rank that hangs in one begins no other, except in other threads."""

    def __init__(self) -> None:
        self._count = -1
        self._since = 0.0
        self._reported_s = 0.0

    def long_wait(self, reader: TraceReader, first_s: float) -> tuple[RecordedCall, float] | None:
        """Return the call in which the rank has waited beyond a limit, and that limit.

        Return None if there is no such call, or if it was returned for this limit before. Call this about once per
        second. It reads little, unless the rank has begun no call for a long time.

        Args:
            reader: The record of the rank.
            first_s: The first limit, in seconds.
        """
        now = time.monotonic()
        if (count := reader.count) != self._count:
            self._count, self._since, self._reported_s = count, now, 0.0
        limit_s = next_limit(first_s, self._reported_s)
        # `_since` is up to one interval of this method later than the call.
        if now - self._since < limit_s - 1.5:
            return None
        waits = [call for call in reader.open_calls() if not call.async_op or call.awaited]
        if not waits and now - self._since >= limit_s:
            self._reported_s = limit_s  # the record is searched once per limit, and not every second
        # Half an interval before the limit, so that a report comes at the limit on average.
        if not waits or now - waits[0].entered_ns / 1e9 < limit_s - min(0.5, limit_s / 10):
            return None
        self._reported_s = limit_s
        return waits[0], limit_s


def next_limit(first_s: float, reported_s: float) -> float:
    """Return the seconds of waiting after which the wait of a rank is reported next."""
    if reported_s == 0:
        return first_s
    later = [limit_s for limit_s in _REPORT_AGAIN_S if limit_s > max(reported_s, first_s)]
    return later[0] if later else reported_s + _REPORT_AGAIN_S[-1]


def rank_state(rank: int, pid: int, reader: TraceReader | None, recent: int = 0, ended: bool = False) -> RankState:
    """Return the state of a rank of this host.

    Args:
        rank: Number of the rank.
        pid: Pid of its process.
        reader: The record of the rank. None if it records nothing.
        recent: How many of its newest calls to include.
        ended: Its process has exited, although its pid is still in use.
    """
    now = time.monotonic()
    process = "gone" if ended else process_state(pid)
    kernel = KernelWait() if ended else kernel_wait(pid)
    if reader is None:
        return RankState(rank, pid, process, now, kernel=kernel, usage=usage(pid, ()), notes=notes_of(pid))
    groups = reader.groups()
    # A call in progress that is older than the newest 256 calls is not found.
    newest = reader.last(max(256, recent))
    states = {call.index: call_state(call, groups, now) for call in newest[-max(1, recent) :]}
    under_way = [call_state(call, groups, now) for call in newest if call.returned_ns == 0]
    if newest and newest[-1].outcome == "timeout":  # its wait timed out, and it has begun no call since
        under_way.append(states[newest[-1].index])
    return RankState(
        rank,
        pid,
        process,
        now,
        recorded=True,
        kernel=kernel,
        calls=tuple(under_way[:_MOST_OPEN]),
        last=states[newest[-1].index] if newest else None,
        near=next((_short(call.site) for call in reversed(newest) if call.site), ""),
        recent=tuple(states[call.index] for call in newest[-recent:]) if recent else (),
        groups=tuple(GroupState(g.name, g.ranks, g.engine, g.number, g.open) for g in groups.values()),
        usage=usage(pid, tuple(groups.values())),
        doing=reader.doing,
        notes=notes_of(pid),
    )


def call_state(call: RecordedCall, groups: dict[int, RecordedGroup], now: float) -> CallState:
    """Return the state of a call, with world ranks."""
    group = groups.get(call.group)
    name, ranks = (group.name, group.ranks) if group is not None else ("", ())

    def world(rank: int) -> int:
        return group.world_rank(rank) if group is not None and rank >= 0 else rank

    title = call.title
    if group is not None and group.engine == OF_MASTER:
        name, title = "", f"a wait for worker {call.peer}"
    elif call.verb in _MESSAGES:
        peer = "any rank" if call.peer < 0 else f"rank {world(call.peer)}"
        title = f"{call.verb} {'to' if call.verb == 'send' else 'from'} {peer}"
    ended = call.returned_ns != 0
    began = call.entered_ns / 1e9
    return CallState(
        index=call.index,
        title=title,
        verb=call.verb,
        group=name,
        ranks=ranks,
        number=call.number,
        tag=call.tag,
        dtype=call.dtype,
        count=call.count,
        peer=world(call.peer),
        site=_short(call.site),
        began=began,
        seconds=(call.returned_ns / 1e9 if ended else now) - began,
        met=call.met_ns != 0,
        last=world(call.last),
        outcome=call.outcome,
        ended=ended,
        waits=call.outcome == "timeout" or (not ended and (not call.async_op or call.awaited)),
    )


def usage(pid: int, groups: Sequence[RecordedGroup]) -> Usage:
    """Return the resources that a process of this host has used until now."""
    totals = [total for group in groups for verb, total in group.totals.items() if verb != COMMAND]
    commands = sum(group.totals[COMMAND].calls for group in groups if COMMAND in group.totals)
    try:
        with open(f"/proc/{pid}/stat", errors="surrogateescape") as file:
            # The program's name, in parentheses, may contain spaces. After it, word 0 is field 3 (the state).
            words = file.read().rpartition(") ")[2].split()
        with open(f"/proc/{pid}/statm") as file:
            resident = int(file.read().split()[1]) * _PAGE
        # Fields 14 and 15: user and system time, in clock ticks.
        cpu = (int(words[11]) + int(words[12])) / _TICK
    except (OSError, IndexError):  # the process has exited
        cpu, resident = 0.0, 0
    return Usage(
        calls=sum(total.calls for total in totals),
        bytes=sum(total.bytes for total in totals),
        in_calls=sum(total.seconds for total in totals),
        waiting=sum(total.waiting for total in totals),
        cpu=cpu,
        resident=resident,
        commands=commands,
    )


def _short(site: str) -> str:
    """Return a call site relative to this process's working directory, which is that of the ranks."""
    return site.removeprefix(os.getcwd() + os.sep)
