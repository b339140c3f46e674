"""Calls from a dump of torch's Flight Recorder. Pure.

The Flight Recorder keeps the newest collectives of torch's own backends, also those that C++ code begins (the gradients
of DistributedDataParallel). For each group it numbers them from 1, so equal numbers on two ranks are the same call.

Source: dumps of torch 2.10 to 2.13, version 2.10 of the format (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allranks._trace.stacks import Frame, place, torch_function
from allranks._trace.state import CallState, GroupState

__all__ = ["FlightCall", "FlightGroup", "group_states", "in_progress", "read_dump"]

_TYPES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip

# Names of torch's backends for functions that the program calls by another name.
_VERBS = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor", "allgather": "all_gather", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}  # fmt: skip


@dataclass(frozen=True)
class FlightGroup:
    """A process group of torch.

    Attributes:
        name: Its name in torch, equal on all its ranks.
        title: Its name in reports. "" for the default group.
        ranks: Its members, as world ranks.
        backend: Name of its backend.
    """

    name: str
    title: str
    ranks: tuple[int, ...]
    backend: str


@dataclass(frozen=True)
class FlightCall:
    """A collective or a message that torch has recorded.

    Attributes:
        state: The call.
        thread: The thread that made it, as ``threading.get_ident`` returns it. 0 if unknown.
        on_device: "" for a call without a GPU; ``scheduled`` or ``started`` for one that has not ended on its GPU.
    """

    state: CallState
    thread: int
    on_device: str


def read_dump(dump: Mapping[str, Any], groups: Mapping[str, FlightGroup], wall_ns: int, now: float) -> list[FlightCall]:
    """Return the calls of known groups, oldest first.

    Args:
        dump: The content of the dump.
        groups: The groups of this process, by name.
        wall_ns: The current time, in nanoseconds of ``time.time_ns``.
        now: The current time, in seconds of ``time.monotonic``.
    """
    calls = []
    for entry in dump.get("entries", ()):
        group = groups.get(entry["process_group"][0])
        if group is not None:
            calls.append(_read_entry(entry, group, wall_ns, now))
    return calls


def _read_entry(entry: Mapping[str, Any], group: FlightGroup, wall_ns: int, now: float) -> FlightCall:
    backend, _, words = entry["profiling_name"].partition(":")
    verb, _, direction = words.partition(" ")
    verb = _VERBS.get(verb, verb)
    message = bool(entry.get("is_p2p"))
    number = 0 if message else entry["collective_seq_id"]
    peer = _peer(verb, direction, group) if message else -1
    frames = [Frame(each["filename"], str(each["line"]), each["name"]) for each in entry.get("frames", ())]
    function = torch_function(frames)
    # Retired: the backend no longer waits for it. gloo sets no other mark.
    ended = bool(entry.get("retired")) or entry.get("state") == "completed"
    sizes = entry.get("input_sizes") or [[]]
    dtypes = entry.get("input_dtypes") or [""]
    seconds = (wall_ns - entry["time_created_ns"]) / 1e9
    title = f"{verb if function is None else frames[function].function} #{number}"
    if message:
        title = f"{verb} {'to' if verb == 'send' else 'from'} rank {peer}"
    thread = str(entry.get("thread_id", ""))
    return FlightCall(
        CallState(
            index=entry["record_id"],
            title=title,
            verb=verb,
            group=group.title,
            ranks=group.ranks,
            number=number,
            tag=0,
            dtype=_TYPES.get(dtypes[0], dtypes[0].lower()),
            count=_elements(sizes),
            peer=peer,
            site=place(frames),
            began=now - seconds,
            seconds=seconds,
            met=False,
            last=-1,
            outcome="",
            ended=ended,
            waits=False,
        ),
        int(thread) if thread.isdecimal() else 0,
        "" if backend == "gloo" or ended else entry.get("state", ""),
    )


def in_progress(calls: Sequence[FlightCall]) -> list[FlightCall]:
    """Return the calls that have not ended."""
    return [call for call in calls if not call.state.ended]


def group_states(calls: Sequence[FlightCall], groups: Mapping[str, FlightGroup]) -> list[GroupState]:
    """Return for each group the number of the last collective that this rank has begun."""
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for call in calls:
        key = call.state.group, call.state.ranks
        last[key] = max(last.get(key, 0), call.state.number)
    return [
        GroupState(group.title, group.ranks, group.backend, last.get((group.title, group.ranks), 0), True)
        for group in groups.values()
    ]


def _elements(sizes: Sequence[Sequence[int]]) -> int:
    total = 0
    for size in sizes:
        count = 1
        for length in size:
            count *= length
        total += count
    return total


def _peer(verb: str, direction: str, group: FlightGroup) -> int:
    """Return the world rank of the other side from torch's description, such as ``0->1`` or ``1<-0``."""
    words = direction.replace("<-", "->").split("->")
    if len(words) != 2 or not words[1].isdecimal() or int(words[1]) >= len(group.ranks):
        return -1
    return group.ranks[int(words[1])]
