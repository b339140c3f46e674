"""Reads the record of a process's calls: its own, that of a running, stopped or dead process, or a file.

The layout is defined in ``core/trace/layout.h``. No data that is read is trusted: a file may be truncated, of another
version or not a trace, and a process may write while this module reads. Pure Python, because the launcher and the
agents also read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from allranks._base import verbs
from allranks._base.errors import AllranksError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "COMMAND",
    "PURPOSES",
    "VERBS",
    "VERSION",
    "RecordedCall",
    "RecordedGroup",
    "Identity",
    "Lateness",
    "TraceReader",
    "Totals",
    "TraceError",
    "bytes_used",
    "memory_bytes",
]

VERSION: Final = 1
COMMAND: Final = verbs.COMMAND
VERBS: Final = (COMMAND, *verbs.VERBS)
DTYPES: Final = (
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32"),
    *("float64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
OPS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
PURPOSES: Final = (
    *("", "new_group", "split_group", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "empty_shared", "all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v"),
    *("all_to_all_w", "new_window", "tensor_register", "tensor_deregister"),
)
OUTCOMES: Final = {
    0: "",
    1: "timeout",
    2: "a rank died",
    3: "a rank left",
    4: "interrupted",
    5: "mismatch",
    6: "closed",
    7: "system error",
    8: "host unreachable",
    9: "out of memory",
    10: "forked",
    11: "aborted",
    255: "failed",
}

_MAGIC = b"allrtrc\0"
_HEADER = struct.Struct("<8sIiiiqq" + "QII" * 4 + "64s")
_PID = struct.Struct("<i")
# The number of records has its own cache line (64 bytes), because the rank writes it in every call.
_COUNTERS = struct.Struct("<Q56xIII")
_COUNTERS_AT = 192
_GROUP = struct.Struct("<96s16sIiiIIIQQ")
_TOTALS = struct.Struct("<QQQQ")
_MEMBER = struct.Struct("<iiQQQQQQ")
_SITE = struct.Struct("<II120s")
_RECORD = struct.Struct("<QqqqQIHHiiBBBBBBH")
_SIZES = (_GROUP.size + _TOTALS.size * len(VERBS), _MEMBER.size, _SITE.size, _RECORD.size)
_TABLES = (128, 1024)  # groups, sites
_NO_MEMBERS = 0xFFFFFFFF
_OPEN = 1


class TraceError(AllranksError):
    """A file or memory that should contain a trace has none, or a trace of another version."""


@dataclass(frozen=True)
class Identity:
    """The process that made the calls. Both clocks were read at the same time, in nanoseconds."""

    pid: int
    rank: int
    world_size: int
    host: str
    monotonic_ns: int
    wall_ns: int


@dataclass(frozen=True)
class Totals:
    """Totals of the calls of one verb. ``seconds``: inside calls. ``waiting``: its part until all ranks had arrived."""

    calls: int
    bytes: int
    seconds: float
    waiting: float


@dataclass(frozen=True)
class Lateness:
    """How often a rank arrived last, and the sum of the seconds between the second-to-last arrival and its own."""

    times: int
    seconds: float

    def __sub__(self, other: Lateness) -> Lateness:
        return Lateness(self.times - other.times, self.seconds - other.seconds)


@dataclass(frozen=True)
class RecordedGroup:
    """A process group.

    Attributes:
        index: Number by which calls refer to the group.
        name: Name of the group.
        engine: Name of its engine.
        open: The group has not been destroyed.
        rank: Rank of the process in the group.
        size: Number of ranks.
        ranks: Members, as world ranks. Empty if the table had no space for them.
        number: Number of the last collective that has begun.
        compared: Number of calls for which the last rank to arrive is known.
        shared: Number of calls that copied nothing, in shared tensors.
        totals: Totals of the calls, by verb.
        late: Lateness, by rank of the group.
        recently_late: Lateness in the last 512 to 1,024 calls that were compared, by rank of the group.
        recently: Number of these calls.
    """

    index: int
    name: str
    engine: str
    open: bool
    rank: int
    size: int
    ranks: tuple[int, ...]
    number: int
    compared: int
    shared: int
    totals: dict[str, Totals] = field(default_factory=dict)
    late: tuple[Lateness, ...] = ()
    recently_late: tuple[Lateness, ...] = ()
    recently: int = 0

    def world_rank(self, rank: int) -> int:
        """Return the world rank of a rank of the group. Return the same number if the members are not listed."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


@dataclass(frozen=True)
class RecordedCall:
    """A collective or a message; or the commands that a worker has executed one after the other (verb ``command``).

    Attributes:
        index: Number in the order of the process's calls, from 1.
        group: Index of its group.
        verb: Verb such as ``all_reduce``.
        purpose: The call of the program of which this call is a part, such as ``new_group``. "" if the program made
            this call itself.
        number: Number among the group's collectives, from 1; 0 for a message.
        tag: Tag of a message.
        dtype: Data type such as ``float32``.
        op: Operation such as ``SUM``, for verbs that reduce; else "".
        count: Number of elements; for commands, the number of commands.
        peer: The root, or the other side of a message, in the group. -1: none, or any.
        site: Call site, such as ``train.py:12 in step``. "" if it was not looked up. For commands, the name of the
            command that took longest.
        entered_ns: When it began (CLOCK_MONOTONIC of its host).
        met_ns: When the last rank arrived. 0: not yet, or unknown.
        returned_ns: When it ended. 0: not yet.
        last: Rank in the group that arrived last. -1: unknown.
        outcome: "" or how it failed.
        async_op: The caller did not wait for it.
        awaited: The caller waits for it now, and has waited for a while.
    """

    index: int
    group: int
    verb: str
    purpose: str
    number: int
    tag: int
    dtype: str
    op: str
    count: int
    peer: int
    site: str
    entered_ns: int
    met_ns: int
    returned_ns: int
    last: int
    outcome: str
    async_op: bool
    awaited: bool

    @property
    def title(self) -> str:
        """The call with its number: ``all_reduce #42``, ``send to 3``; a command's name: ``aten::mm and 7 more``."""
        if self.verb == COMMAND:
            return f"{self.site or 'a command'}{f' and {self.count - 1} more' if self.count > 1 else ''}"
        if self.verb in verbs.MESSAGES:
            way = "to" if self.verb == "send" else "from"
            return f"{self.verb} {way} {'any rank' if self.peer < 0 else self.peer}"
        return f"{self.purpose or self.verb} #{self.number}"


def memory_bytes(records: int, members: int) -> int:
    """Return the size of the memory for the given numbers of records and ranks, without loading the core."""
    # The same sizes as in core/trace/recorder.cc. `memory._given` compares the size of the agent's memory with them.
    room = 1 << (8 * members + 1024 - 1).bit_length()
    # The header, whose size a static_assert in core/trace/layout.h fixes.
    size = 320
    for entry_bytes, entries in zip(_SIZES[:3], (_TABLES[0], room, _TABLES[1]), strict=True):
        size += -(-entry_bytes * entries // 4096) * 4096
    return size + _SIZES[3] * records


def bytes_used(head: bytes) -> int:
    """Return how many bytes of a file contain data, from its first 320 bytes."""
    if len(head) < 320 or head[:8] != _MAGIC:
        return 320
    offset, _, entries = _HEADER.unpack_from(head)[16:19]
    return int(offset) + _RECORD.size * min(int(entries), int(_COUNTERS.unpack_from(head, _COUNTERS_AT)[0]))


class TraceReader:
    """A view of recorded calls. It may be read repeatedly while the process continues.

    Args:
        data: The memory or the content of the file, all of it.
        source: Name of the source in errors.

    Raises:
        TraceError: The data contains no recorded calls, is of another version, or is truncated.
    """

    def __init__(self, data: Buffer, source: str = "memory") -> None:
        self._data = memoryview(data).cast("B")
        self._source = source
        # The rank writes the magic number last, so a header with it is complete.
        if len(self._data) < 320 or bytes(self._data[:8]) != _MAGIC:
            raise TraceError(
                f"{source} is not a trace of allranks.\n  Pass a file that `allranks run --trace` has written."
            )
        head = _HEADER.unpack_from(self._data)
        _, version, self._pid, self._rank, self._world_size, self._monotonic, self._wall = head[:7]
        if version != VERSION:
            raise TraceError(
                f"{source} was written by another version of allranks (layout {version}, not {VERSION}).\n"
                "  Read it with the version that wrote it."
            )
        self._tables = [tuple(head[7 + 3 * i : 10 + 3 * i]) for i in range(4)]
        self._host = _text(head[19])
        for size, (offset, entry_bytes, entries) in zip(_SIZES[:3], self._tables[:3], strict=True):
            if entry_bytes != size or offset + size * entries > len(self._data):
                raise TraceError(f"{source} is damaged or truncated.\n  Copy it again from the host that recorded it.")
        offset, entry_bytes, entries = self._tables[3]
        # The number of entries is a power of two, because `_calls` masks the index of a call with it.
        if entry_bytes != _RECORD.size or entries == 0 or entries & (entries - 1) or offset > len(self._data):
            raise TraceError(f"{source} is damaged or truncated.\n  Copy it again from the host that recorded it.")
        # A file is only as long as its records, so its table may have fewer entries than the header states.
        self._there = min(entries, (len(self._data) - offset) // _RECORD.size)
        self._sites: dict[int, str] = {}

    @property
    def identity(self) -> Identity:
        """The process that made the calls."""
        return Identity(self._pid, self._rank, self._world_size, self._host, self._monotonic, self._wall)

    def pid(self) -> int:
        """Return the pid of the process that records in this memory at the moment."""
        # Read again: the next program of the same rank uses the same memory.
        return int(_PID.unpack_from(self._data, 12)[0])

    @property
    def count(self) -> int:
        """Number of calls that have begun since the start."""
        return int(_COUNTERS.unpack_from(self._data, _COUNTERS_AT)[0])

    def groups(self) -> dict[int, RecordedGroup]:
        """Return all groups, by index. Later groups may have replaced destroyed ones."""
        _, used, _, _ = _COUNTERS.unpack_from(self._data, _COUNTERS_AT)
        found = (self._group(index) for index in range(min(used, self._tables[0][2])))
        return {group.index: group for group in found if group is not None}

    @property
    def doing(self) -> str:
        """Worker only: the operation that it executes, such as ``aten::mm``. "" between two and for other processes."""
        return self._site(_COUNTERS.unpack_from(self._data, _COUNTERS_AT)[3])

    def last(self, most: int) -> list[RecordedCall]:
        """Return the newest calls, oldest first."""
        return list(self._calls(max(1, self.count - most + 1)))

    def calls(self) -> Iterator[RecordedCall]:
        """Return all calls that are available, oldest first."""
        return self._calls(max(1, self.count - self._tables[3][2] + 1))

    def open_calls(self, most: int = 256) -> list[RecordedCall]:
        """Return the calls among the newest that have not ended, oldest first."""
        return [call for call in self.last(most) if call.returned_ns == 0]

    def has(self, index: int) -> bool:
        """Return whether a call is available."""
        return any(self._calls(index, index))

    def _calls(self, first: int, last: int | None = None) -> Iterator[RecordedCall]:
        offset, _, entries = self._tables[3]
        for index in range(first, (self.count if last is None else last) + 1):
            slot = (index - 1) & (entries - 1)
            if slot < self._there and (call := self._call(offset + slot * _RECORD.size, index)) is not None:
                yield call

    def _call(self, at: int, index: int) -> RecordedCall | None:
        raw = bytes(self._data[at : at + _RECORD.size])
        if bytes(self._data[at : at + 8]) != raw[:8]:
            # The rank sets the index to 0 before it replaces a record, and to the new index afterwards.
            return None  # a newer call has replaced it during the read
        found, entered, met, returned, count, number, group, site, peer, last, *kinds = _RECORD.unpack(raw)
        verb, dtype, op, purpose, outcome, flags, _ = kinds
        if found != index or verb >= len(VERBS):
            return None
        message = VERBS[verb] in verbs.MESSAGES
        reduces = VERBS[verb] in verbs.REDUCING
        return RecordedCall(
            index=index,
            group=group,
            verb=VERBS[verb],
            purpose=PURPOSES[purpose] if purpose < len(PURPOSES) else "",
            number=0 if message else number,
            tag=number if message else 0,
            dtype=DTYPES[dtype] if dtype < len(DTYPES) and VERBS[verb] != COMMAND else "",
            op=OPS[op] if reduces and op < len(OPS) else "",
            count=count,
            peer=peer,
            site=self._site(site),
            entered_ns=entered,
            met_ns=met,
            returned_ns=returned,
            last=last,
            outcome=OUTCOMES.get(outcome, "failed"),
            async_op=bool(flags & 1),
            awaited=bool(flags & 2),
        )

    def _site(self, number: int) -> str:
        if number == 0 or number >= self._tables[2][2]:
            return ""
        if number not in self._sites:
            _, there, text = _SITE.unpack_from(self._data, self._tables[2][0] + number * _SITE.size)
            # The text is not complete yet, so the result is not cached.
            if not there:
                return ""
            self._sites[number] = _text(text)
        return self._sites[number]

    def _group(self, index: int) -> RecordedGroup | None:
        at = self._tables[0][0] + index * _SIZES[0]
        name, engine, state, rank, size, first, number, _, compared, shared = _GROUP.unpack_from(self._data, at)
        if state == 0:
            return None
        totals = {}
        for v, verb in enumerate(VERBS):
            calls, nbytes, ns, waited = _TOTALS.unpack_from(self._data, at + _GROUP.size + v * _TOTALS.size)
            if calls:
                totals[verb] = Totals(calls, nbytes, ns / 1e9, waited / 1e9)
        members = [] if first == _NO_MEMBERS or first + size > self._tables[1][2] else self._members(first, size)
        late = tuple(all_ for _, all_, _ in members)
        return RecordedGroup(
            index=index,
            name=_text(name),
            engine=_text(engine),
            open=state == _OPEN,
            rank=rank,
            size=size,
            ranks=tuple(world for world, _, _ in members),
            number=number,
            compared=compared,
            shared=shared,
            totals=totals,
            late=late,
            recently_late=tuple(all_ - before for _, all_, before in members),
            recently=sum(all_.times - before.times for _, all_, before in members),
        )

    def _members(self, first: int, size: int) -> list[tuple[int, Lateness, Lateness]]:
        members = []
        for index in range(first, first + size):
            world, _, times, ns, _, _, old_times, old_ns = _MEMBER.unpack_from(
                self._data, self._tables[1][0] + index * _MEMBER.size
            )
            members.append((world, Lateness(times, ns / 1e9), Lateness(old_times, old_ns / 1e9)))
        return members


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
