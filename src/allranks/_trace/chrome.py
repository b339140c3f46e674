"""Writes a timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing display.

A rank is a process in that format, and a group is a thread. A call is a slice. The time that it waited for other ranks
is a slice inside it. Flows connect the rank that arrived last to the ranks that waited, and a send to its recv. Traces
of torch.profiler can be merged, because their times are of the wall clock.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from allranks._base.verbs import MESSAGES
from allranks._trace.matching import RecordedProcess
from allranks._trace.reader import COMMAND, TraceError
from allranks._trace.timeline import Arrow, Slice, Timeline

__all__ = ["events", "name_of", "other_data", "read_profile", "slice_arguments", "write"]

_ABOVE_THREADS = 1_000_000_000  # above the numbers of real threads, which are in a profile
_INSTANT = 4  # ns; length of the slice that marks the arrival of the last rank
_PROFILE = 100_000  # numbers of the other processes in a profile, such as devices and spans


def write(timeline: Timeline, file: Path, profiles: Sequence[tuple[RecordedProcess, dict[str, Any]]] = ()) -> None:
    """Write the file; compressed with gzip if its name ends in .gz.

    Args:
        timeline: The timeline to draw.
        file: The file to write.
        profiles: Results of ``read_profile``.

    Raises:
        OSError: The file cannot be written.
    """
    with gzip.open(file, "wt") if file.suffix == ".gz" else open(file, "w") as out:
        _write(timeline, out, profiles)


def _write(timeline: Timeline, out: IO[str], profiles: Sequence[tuple[RecordedProcess, dict[str, Any]]]) -> None:
    encode = json.JSONEncoder(separators=(",", ":")).encode
    out.write('{"displayTimeUnit":"ms","otherData":' + encode(other_data(timeline)) + ',"traceEvents":[\n')
    separator = ""
    for event in events(timeline, bool(profiles)):
        out.write(separator + encode(event))
        separator = ",\n"
    for number, (process, profile) in enumerate(profiles):
        for event in _profile_events(timeline, number, process, profile):
            out.write(separator + encode(event))
            separator = ",\n"
    out.write("\n]}\n")


def other_data(timeline: Timeline) -> dict[str, Any]:
    """Return what a viewer shows about the trace: its clocks, and their errors."""
    error = timeline.error
    return {
        "written by": "allranks trace timeline",
        "ranks": len({process.rank for process in timeline.processes}),
        "calls": timeline.calls,
        "commands of workers": timeline.commands,
        "calls that are missing": timeline.missing,
        "time 0 (ns of the wall clock)": timeline.zero_wall,
        "error between any two ranks (us)": "not known" if error is None else round(error / 1e3, 1),
        "collectives whose last rank is known": timeline.compared,
        "arrived last": [
            {"rank": late.rank, "calls": late.times, "others waited (ms)": round(late.waited / 1e6, 3)}
            for late in timeline.late
        ],
        "clocks": [
            {
                "host": clock.host,
                "ranks": list(clock.ranks),
                "added (ns)": clock.added,
                "error (us)": "not known" if clock.error is None else round(clock.error / 1e3, 1),
                "drift (ppm)": round(clock.drift * 1e6, 3),
                "compared by calls": clock.calls,
            }
            for clock in timeline.clocks
        ],
    }


def name_of(timeline: Timeline, process: RecordedProcess) -> str:
    """Return a name such as ``rank 3 (node1)``. The second process of the same rank is ``rank 3.1 (node1)``."""
    before = sum(1 for other in timeline.processes[: timeline.processes.index(process)] if other.rank == process.rank)
    return f"rank {process.rank}{f'.{before}' if before else ''} ({process.host})"


def slice_arguments(each: Slice) -> dict[str, Any]:
    """Return the attributes of a call other than its times."""
    call = each.call
    if call.verb == COMMAND:
        return {"commands": call.count} | ({"took longest": call.site} if call.count > 1 else {})
    found: dict[str, Any] = {"group": each.group}
    if call.dtype and call.count:
        found["elements"] = f"{call.count} x {call.dtype}"
    if call.op:
        found["op"] = call.op
    if call.verb in MESSAGES:
        found["tag"] = call.tag
    elif each.peer >= 0:
        found["root"] = each.peer
    if call.purpose:
        found["part of"] = call.purpose
    if call.site:
        found["line"] = call.site
    if each.last >= 0:
        found["arrived last"] = f"rank {each.last}"
    if each.waited_until > each.begin:
        found["waited (us)"] = (each.waited_until - each.begin) / 1e3
    if call.async_op:
        found["async_op"] = True
    if call.outcome:
        found["outcome"] = call.outcome
    elif not each.ended:
        found["outcome"] = "not finished"
    return found


@dataclass(frozen=True)
class _Places:
    """The numbers of processes and threads in the file: of each process, and of the first lane of each row."""

    processes: Mapping[int, int]
    rows: Sequence[int]


def events(timeline: Timeline, merged: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the events of the calls. ``merged``: real threads follow, and rows have numbers above theirs."""
    rows: list[int] = []
    following = _ABOVE_THREADS if merged else 1
    for row in timeline.rows:
        rows.append(following)
        following += row.lanes
    places = _Places({process.number: place for place, process in enumerate(timeline.processes)}, rows)
    for place, process in enumerate(timeline.processes):
        yield _named("process_name", place, 0, name_of(timeline, process))
        yield {"ph": "M", "name": "process_sort_index", "pid": place, "tid": 0, "args": {"sort_index": place}}
    for number, row in enumerate(timeline.rows):
        for lane in range(row.lanes):
            title = row.title if lane == 0 else f"{row.title} ({lane + 1})"
            yield _named("thread_name", places.processes[row.process], rows[number] + lane, title)
    arrived = {
        number for arrow in timeline.arrows if arrow.kind == "arrival" for number in (arrow.source, arrow.target)
    }
    for number, each in enumerate(timeline.slices):
        yield from _call_events(each, _place(timeline, places, each), number in arrived)
    for number, arrow in enumerate(timeline.arrows):
        yield from _flow(timeline, places, number, arrow)


def _call_events(each: Slice, where: dict[str, int], arrived: bool) -> Iterator[dict[str, Any]]:
    """Yield the slice of a call and, inside it, the slices of its waiting and of the ends of its arrows.

    Viewers draw an arrow from slice to slice, so each end of an arrow needs a slice.
    """
    yield _slice(each.title, each.call.verb, each.begin, each.end, where) | {"args": slice_arguments(each)}
    if each.waited_until > each.begin:
        last = f"waits for rank {each.last}" if each.last >= 0 else "waits for ranks"
        yield _slice(last, "waiting", each.begin, each.waited_until, where)
        if arrived:
            yield _slice("all ranks have arrived", "met", each.waited_until, each.end, where)
    elif arrived:
        yield _slice("arrived last", "met", each.begin, min(each.begin + _INSTANT, each.end), where)


def _flow(timeline: Timeline, places: _Places, number: int, arrow: Arrow) -> Iterator[dict[str, Any]]:
    source, target = timeline.slices[arrow.source], timeline.slices[arrow.target]
    # Use times inside the slices: at the edge between two slices, viewers choose either of them.
    begin = min(arrow.source_ns + _INSTANT // 2, source.end)
    end = min(arrow.target_ns + _INSTANT, target.end) if arrow.kind == "arrival" else arrow.target_ns - 1
    for phase, each, ns in (("s", source, begin), ("f", target, max(begin, end))):
        ended = {"bp": "e"} if phase == "f" else {}
        where = _place(timeline, places, each)
        yield {"ph": phase, "id": number, "name": arrow.kind, "cat": "flow", "ts": ns / 1e3} | where | ended


def _place(timeline: Timeline, places: _Places, each: Slice) -> dict[str, int]:
    return {"pid": places.processes[timeline.rows[each.row].process], "tid": places.rows[each.row] + each.lane}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, category: str, begin: int, end: int, where: dict[str, int]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin / 1e3, "dur": (end - begin) / 1e3} | where


_EXPORTED = "Pass a file that export_chrome_trace() of the profiler has written."


def read_profile(file: Path, timeline: Timeline) -> tuple[RecordedProcess, dict[str, Any]]:
    """Return a trace of torch.profiler, and the process of the timeline that has its pid.

    Raises:
        TraceError: The file cannot be read, is not such a trace, or belongs to no process of the timeline.
    """
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as text:
            profile = json.load(text)
    except OSError as error:
        raise TraceError(f"cannot read {file}: {error.strerror or error}") from None
    except (EOFError, ValueError):
        raise TraceError(
            f"{file} is not a trace of torch.profiler: it is not JSON, or it is truncated.\n  {_EXPORTED}"
        ) from None
    found = profile.get("traceEvents") if isinstance(profile, dict) else None
    if not isinstance(found, list) or not isinstance(profile.get("baseTimeNanoseconds", 0), int):
        raise TraceError(f"{file} is not a trace of torch.profiler: it has no list of events.\n  {_EXPORTED}")
    if not all(isinstance(event, dict) for event in found):
        raise TraceError(f"{file} is not a trace of torch.profiler: an event is not an object.\n  {_EXPORTED}")
    pids = Counter(event.get("pid") for event in found if event.get("ph") == "X" and isinstance(event.get("pid"), int))
    rank = (profile.get("distributedInfo") or {}).get("rank")
    for pid, _ in pids.most_common():
        mine = [process for process in timeline.processes if process.pid == pid]
        mine = [process for process in mine if rank is None or process.rank == rank] or mine
        if len(mine) > 1:
            raise TraceError(
                f"{file} is ambiguous: ranks on different hosts have the same pid {pid}.\n  Record the profile while"
                " torch.distributed is initialized, so that it contains the rank."
            )
        if mine:
            return mine[0], profile
    raise TraceError(
        f"{file} belongs to a process that is not in the timeline (pid {pids.most_common(1)[0][0] if pids else '-'}).\n"
        "  Pass the trace file of that process, too."
    )


def _profile_events(
    timeline: Timeline, number: int, process: RecordedProcess, profile: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    place = timeline.processes.index(process)
    base = profile.get("baseTimeNanoseconds", 0)
    others: dict[Any, int] = {}
    for event in profile["traceEvents"]:
        pid = event.get("pid")
        moved = dict(event)
        if pid == process.pid:
            moved["pid"] = place
            # The timeline has already written these events for the process.
            if event.get("name") in ("process_name", "process_sort_index", "process_labels"):
                continue
        else:
            moved["pid"] = others.setdefault(pid, _PROFILE * (number + 1) + len(others))
            if event.get("name") == "process_name":
                named = (event.get("args") or {}).get("name", "")
                moved["args"] = {"name": f"{name_of(timeline, process)}: {named} {pid}"}
        if isinstance(event.get("ts"), int | float):
            wall = base + round(event["ts"] * 1e3)
            moved["ts"] = (timeline.times.of_wall(process, wall) - timeline.zero) / 1e3
        if "id" in event:
            # The ids of different profiles, and those of the timeline's own flows, must differ.
            moved["id"] = f"profile {number}: {event['id']}"
        yield moved
