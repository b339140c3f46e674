"""Writes calls in the format of torch's Flight Recorder, which ``torchfrtrace`` reads: one pickled file per rank.

That tool compares the calls of the ranks of a group, by the number of the call. It treats a message as a call of all
ranks of its group. Here, messages from one rank to another with the same tag therefore form a group of these two ranks.

Source: the dumps and the tool of torch 2.10 to 2.13 (torch/distributed/flight_recorder); version 2.10 of the format.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks._base import verbs
from allranks._trace.matching import GroupRun, RecordedProcess, match
from allranks._trace.reader import RecordedCall

__all__ = ["PREFIX", "FlightDump", "dumps", "write"]

PREFIX = "allranks_trace_rank_"
"""Prefix of the names of the files. The rank follows, as the tool expects."""

_VERSION = "2.10"
_BACKEND = "gloo"  # the tool accepts only names of torch's backends
_TYPES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "uint16": "UInt16",
    "uint32": "UInt32", "uint64": "UInt64", "float16": "Half", "bfloat16": "BFloat16", "float32": "Float",
    "float64": "Double", "bool": "Bool", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "float8_e4m3fn": "Float8_e4m3fn", "float8_e5m2": "Float8_e5m2",
    "float8_e4m3fnuz": "Float8_e4m3fnuz", "float8_e5m2fnuz": "Float8_e5m2fnuz",
    "float8_e8m0fnu": "Float8_e8m0fnu", "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
}  # fmt: skip


@dataclass
class FlightDump:
    """The content of the file of one rank.

    Attributes:
        rank: World rank.
        groups: Ranks of each group, by name.
        calls: The call, the name of its group, its number in that group, and the tool's description of the call.
        left_out: Number of calls that the format cannot represent.
    """

    rank: int
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: list[tuple[RecordedCall, str, int, str]] = field(default_factory=list)
    left_out: int = 0


def dumps(processes: Sequence[RecordedProcess]) -> dict[int, tuple[FlightDump, RecordedProcess]]:
    """Return the dump of each rank. For a restarted rank, only the last process is included."""
    latest: dict[int, RecordedProcess] = {}
    for process in sorted(processes, key=lambda p: p.wall):
        latest[process.rank] = process
    kept = {process.number: process for process in latest.values()}
    found = {rank: FlightDump(rank) for rank in latest}
    seen: Counter[str] = Counter()
    runs, _, _ = match(list(kept.values()))
    for run in runs:
        seen[run.name] += 1
        name = run.name if seen[run.name] == 1 else f"{run.name}#{seen[run.name]}"
        _add_collectives(run, name, kept, found)
        _add_messages(run, name, kept, found)
    return {rank: (dump, latest[rank]) for rank, dump in sorted(found.items())}


def write(folder: Path, dump: FlightDump, process: RecordedProcess, first: int = 0) -> Path:
    """Write the file of one rank.

    Args:
        folder: Folder of the file. It is created if it is missing.
        dump: The dump of the rank.
        process: The process that made the calls.
        first: Number of the first call in the file. The tool uses this number to skip calls that another rank's file no
            longer has.

    Raises:
        OSError: The file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: number for number, name in enumerate(sorted(dump.groups))}
    entries = [
        _entry(process, first + place, numbers, dump.groups, *each)
        for place, each in enumerate(sorted(dump.calls, key=lambda each: each[0].index))
    ]
    content = {
        "version": _VERSION,
        "comm_lib_version": "",
        "pg_config": {
            name: {"name": name, "desc": name, "ranks": str(list(ranks))} for name, ranks in dump.groups.items()
        },
        "pg_status": {str(numbers[name]): _status(dump, name) for name in dump.groups},
        "entries": entries,
    }
    path = folder / f"{PREFIX}{dump.rank}"
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def _add_collectives(
    run: GroupRun, name: str, processes: Mapping[int, RecordedProcess], found: Mapping[int, FlightDump]
) -> None:
    # If the first calls of one rank are missing, the tool would report those of the other ranks as calls that this rank
    # did not make. The comparison therefore starts at the first number that all ranks still have.
    first = max(
        (min((call.number for call in calls if call.number), default=1) for calls in _incomplete(run, processes)),
        default=1,
    )
    for number, calls in run.calls.items():
        dump = found[processes[number].rank]
        for call in calls:
            if call.number >= first:
                dump.groups[name] = tuple(sorted(run.ranks))
                dump.calls.append((call, name, call.number, call.verb))


def _incomplete(run: GroupRun, processes: Mapping[int, RecordedProcess]) -> Iterator[Sequence[RecordedCall]]:
    return (calls for number, calls in run.calls.items() if processes[number].missing)


def _add_messages(
    run: GroupRun, name: str, processes: Mapping[int, RecordedProcess], found: Mapping[int, FlightDump]
) -> None:
    # The sender of such a recv is unknown, so it is also unknown which sends remain for the other receives.
    from_any = {
        (processes[number].rank, call.tag)
        for number, calls in run.calls.items()
        for call in calls
        if call.verb == "recv" and call.peer < 0
    }
    incomplete = {processes[number].rank for number in run.calls if processes[number].missing}
    for number, calls in run.calls.items():
        rank = processes[number].rank
        dump = found[rank]
        counts: dict[tuple[int, int, int], int] = defaultdict(int)
        for call in calls:
            if call.number:
                continue
            other = run.ranks[call.peer] if 0 <= call.peer < len(run.ranks) else -1
            source, target = (rank, other) if call.verb == "send" else (other, rank)
            if other in (-1, rank) or incomplete & {rank, other} or (target, call.tag) in from_any:
                dump.left_out += 1
                continue
            ranks = tuple(sorted((source, target)))
            own = f"{name}: {source} to {target}{f', tag {call.tag}' if call.tag else ''}"
            counts[source, target, call.tag] += 1
            dump.groups[own] = ranks
            here, there = ranks.index(rank), ranks.index(other)
            words = f"send {here}->{there}" if call.verb == "send" else f"recv {here}<-{there}"
            dump.calls.append((call, own, counts[source, target, call.tag], words))


def _entry(
    process: RecordedProcess,
    record: int,
    numbers: Mapping[str, int],
    groups: Mapping[str, tuple[int, ...]],
    call: RecordedCall,
    group: str,
    number: int,
    words: str,
) -> dict[str, Any]:
    ahead = process.wall - process.began
    message = call.verb in verbs.MESSAGES
    gets, gives = _sizes(call, len(groups[group]))
    kind = [_TYPES.get(call.dtype, call.dtype)] if gets else []
    ended = call.returned_ns != 0 and not call.outcome
    return {
        "record_id": record,
        "pg_id": numbers[group],
        "process_group": (group, group),
        "collective_seq_id": number,
        "p2p_seq_id": number if message else 0,
        "op_id": record,
        "profiling_name": f"{_BACKEND}:{words}",
        "time_created_ns": call.entered_ns + ahead,
        "time_discovered_started_ns": call.met_ns + ahead if call.met_ns else None,
        "time_discovered_completed_ns": call.returned_ns + ahead if ended else None,
        "input_sizes": gets,
        "output_sizes": gives,
        "input_dtypes": kind,
        "output_dtypes": kind,
        "state": "completed" if ended else "started",
        "retired": ended,
        "timeout_ms": 0,
        "is_p2p": message,
        "thread_id": "",
        "thread_name": "",
        "frames": _frames(call.site),
    }


def _sizes(call: RecordedCall, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of the input and of the output of a call. ``count`` is the size of one rank's part."""
    if call.verb in (verbs.COMMAND, "all_to_all", *verbs.MESSAGES):  # chunks of an all_to_all can have different sizes
        return [[call.count]], [[call.count]]
    sizes: dict[int, list[list[int]]] = {-1: [], 0: [[call.count * ranks]], 1: [[call.count]]}
    verb = verbs.VERBS[call.verb]
    return sizes[verb.given], sizes[verb.results]


def _frames(site: str) -> list[dict[str, Any]]:
    """Return the call site as a frame. The site has the form ``file.py:12 in step, shape (3,)``."""
    place, _, more = site.partition(" in ")
    file, _, line = place.partition(",")[0].rpartition(":")
    if not file or not line.isdecimal():
        return []
    return [{"name": more.partition(",")[0] or "<module>", "filename": file, "line": int(line)}]


def _status(dump: FlightDump, group: str) -> dict[str, int]:
    mine = [(number, call) for call, name, number, _ in dump.calls if name == group]
    ended = [number for number, call in mine if call.returned_ns and not call.outcome]
    begun = [number for number, _ in mine]
    return {
        "last_enqueued_collective": max(begun, default=-1),
        "last_started_collective": max(begun, default=-1),
        "last_completed_collective": max(ended, default=-1),
    }
