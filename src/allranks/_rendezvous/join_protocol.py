"""Protocol by which a rank joins a job: a pure state machine of store requests and replies.

It uses no socket, no clock and no thread. A generator yields the next act: connect, a request to the store, a pause,
or a notice. It receives the time and the answer. ``rendezvous`` drives it with real stores. The tests drive thousands
of whole jobs with simulated links, deaths and restarts, each from a seed.

``CompareSet`` makes every decision that must be made once. It is one atomic step, so the death of a rank cannot leave
it half done. It decides which rank is first and thereby sets the world size, which process has a rank, and the
verdict. The verdict states that all ranks have joined, or what is wrong.

The requests and replies of a rank do not grow with the number of ranks. The last rank to join reads all records and
writes one packed table of them. The whole job therefore moves O(n) bytes. If every rank reads the table, it moves n
times the table (about 6 bytes per rank) in addition.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from allranks._base.errors import ConfigError, JoinError, TimeoutError, rank_list
from allranks._base.timeouts import LONGEST_WAIT_S
from allranks._store.wire import (
    Add,
    CompareSet,
    FoundValues,
    Peek,
    Reply,
    Request,
    RequestDone,
    Set,
    WaitForKeys,
    WaitTimedOut,
)

__all__ = [
    "Act",
    "Answer",
    "Connect",
    "GRACE_S",
    "JoinProtocol",
    "Leave",
    "Lost",
    "Member",
    "NOTICE_S",
    "Pause",
    "Notify",
    "Steps",
    "TABLE",
    "exchange",
    "unpack_members",
]

GRACE_S = 0.5
"""Seconds after the timeout in which a rank may still fetch and report what is missing."""

NOTICE_S = 5.0
"""Seconds after which a waiting rank prints one notice, because the timeout may be half an hour away."""

TABLE = "join/members"
"""Key of the table of all members. The prefix that ``JoinProtocol`` returns and a slash precede it."""

_PROTOCOL = 2  # version of the keys and records here; version 1 had no such number


class Member(msgspec.Struct, frozen=True):
    """One rank of a rendezvous, as it describes itself.

    Attributes:
        rank: Its rank.
        pid: Its process ID on its host.
        host: The name of its host.
        machine: The same for all processes that share memory and unix sockets.
        world_size: The number of ranks that it expects.
        addresses: Addresses at which other hosts may reach its host.
    """

    rank: int
    pid: int
    host: str
    machine: str
    world_size: int
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Connect:
    """Find the store, and disconnect from the previous one. The answer is None or Lost."""


@dataclass(frozen=True)
class Leave:
    """Disconnect from the store that was found."""


@dataclass(frozen=True)
class Pause:
    """Let time pass."""

    seconds: float


@dataclass(frozen=True)
class Notify:
    """Print a line for the user."""

    line: str


@dataclass(frozen=True)
class Lost:
    """The store did not answer or does not exist: the text of the system, and the error if there was one."""

    text: str
    cause: Exception | None = None


Act: TypeAlias = Connect | Leave | Pause | Notify | Request
Answer: TypeAlias = Reply | Lost | None
_T = TypeVar("_T")
Steps: TypeAlias = Generator[Act, tuple[float, Answer], _T]


class _Claim(msgspec.Struct, frozen=True):
    """A registration for a rank. ``process`` distinguishes processes of two containers with equal host name and pid."""

    process: str
    member: Member
    protocol: int = 1


class _JoinVerdict(msgspec.Struct, frozen=True):
    error: str = ""
    missing: tuple[int, ...] = ()


@dataclass
class JoinProtocol:
    """The state machine with which one rank joins a rendezvous.

    Attributes:
        me: This rank.
        process: Identifies this process among all processes on all hosts. It may join many rendezvous.
        began: The current time.
        timeout_s: Seconds to wait for the other ranks.
        where: Name of the store in error messages.
        advice: What the user should check if the store does not answer.
        fresh: Rank 0 serves the store for this rendezvous only.
        listens: Returns where this process listens if it serves the store. Called if the rendezvous fails or is late.
        refusals: Returns the clients that this process has refused.
        notice_s: Seconds after which a notice names the missing ranks.
        started: The number of ranks started on each host, if a scheduler has set it.
        longer: Name of the argument that extends the timeout, for error messages.
    """

    me: Member
    process: str
    began: float
    timeout_s: float
    where: str
    advice: str
    fresh: bool = False
    listens: Callable[[], str] = str
    refusals: Callable[[], Iterable[str]] = tuple
    notice_s: float = NOTICE_S
    started: Mapping[str, int] = field(default_factory=dict)
    longer: str = "init_process_group(timeout=...)"

    def __post_init__(self) -> None:
        self._now = self.began
        self._deadline = self.began + self.timeout_s
        self._notice_printed = False
        self._key_prefix = ""

    def steps(self) -> Steps[str]:
        """Find the store, register there, and wait for the other ranks.

        Returns:
            The prefix of the rendezvous's keys. The table of its members is stored under it.

        Raises:
            JoinError: The store or ranks are missing when the timeout expires, or two ranks disagree.
            ConfigError: The ranks run different versions.
        """
        generation = yield from self._reach_store()
        prefix = f"allranks/{generation}"
        self._key_prefix = f"{prefix}/join/"
        yield from self._register()
        return prefix

    def _perform(self, act: Act) -> Steps[Answer]:
        self._now, answer = yield act
        return answer

    def _remaining_s(self) -> float:
        return self._deadline - self._now

    # Connection to the store.

    def _reach_store(self) -> Steps[int]:
        """Return the number of this rendezvous among those that this process has joined on this store."""
        pause_s = 0.01
        while True:
            answer = yield from self._perform(Connect())
            if answer is None:
                answer = yield from self._count_joins()
            match answer:
                # A server that already knows this process is that of its previous rendezvous, which is about to close.
                case RequestDone(number) if number == 1 or not self.fresh:
                    return number
                case RequestDone():
                    trouble = Lost("it still serves the previous rendezvous")
                case Lost():
                    trouble = answer
                case _:
                    raise self._unexpected_answer(answer)
            # Before the pause: the closing server of the previous rendezvous waits until its clients have disconnected.
            yield from self._perform(Leave())
            if self._remaining_s() <= 0:
                raise JoinError(
                    f"{self.me}: {self.where} did not answer for {self.timeout_s:.1f} s (last: {trouble.text}).\n"
                    f"  {self.advice}\n  To wait longer, set {self.longer}."
                ) from trouble.cause
            if self._now - self.began >= self.notice_s:
                yield from self._print_notice(f"for {self.where}; last: {trouble.text}")
            yield from self._perform(Pause(min(pause_s, self._remaining_s())))
            pause_s = min(pause_s * 1.5, 0.1)

    def _count_joins(self) -> Steps[Answer]:
        # Add cannot be used: if the connection breaks before its reply, the rank cannot find out whether Add was
        # executed. CompareSet with a unique value can be repeated safely.
        key, visit, known = f"allranks/joins/{self.me.rank}/{self.process}", repr(self.began), b""
        while True:
            number = int(known.partition(b" ")[0] or b"0") + 1
            answer = yield from self._perform(CompareSet(key, known, b"%d %s" % (number, visit.encode())))
            if not isinstance(answer, FoundValues) or not answer.values[0]:
                return answer
            known = answer.values[0]
            counted, _, counted_visit = known.partition(b" ")
            if counted_visit == visit.encode():
                return RequestDone(int(counted))

    # Registration in the store.

    def _register(self) -> Steps[None]:
        claim = _Claim(self.process, self.me, _PROTOCOL)
        encoded_claim = msgspec.msgpack.encode(claim)
        first = yield from self._claim("first", encoded_claim)
        if first.protocol != _PROTOCOL:
            yield from self._fail(ConfigError, self._version_text(first))
        if first.member.world_size != self.me.world_size:
            yield from self._fail(
                JoinError,
                f"The ranks disagree on the world size: {first.member} has {first.member.world_size}, {self.me} has"
                f" {self.me.world_size}.\n  Start all ranks with the same WORLD_SIZE (or world_size=).",
            )
        holder = yield from self._claim(f"member/{self.me.rank}", encoded_claim)
        if holder != claim:
            # The roll call of the other ranks, which miss a rank, reports this duplicate as the likely cause.
            yield from self._request(Set(f"{self._key_prefix}double/{self.me.rank}", encoded_claim))
            raise JoinError(_duplicate_rank_text(holder.member, self.me))
        # After the registration: when the counter reaches the world size, all records can be read.
        joined = yield from self._request(Add(f"{self._key_prefix}joined", 1))
        assert isinstance(joined, RequestDone)
        # The last rank to join writes the verdict, so no other rank has to read all records.
        verdict = (yield from self._check_members()) if joined.number == self.me.world_size else None
        if verdict is None:
            verdict = yield from self._await_verdict()
        if verdict.error:
            listens = self.listens() if verdict.missing else ""
            raise JoinError(verdict.error + (f"\n  Rank 0 listened {listens}." if listens else ""))

    def _await_verdict(self) -> Steps[_JoinVerdict]:
        # The wait is split, because one notice is due before the timeout.
        until_notice_s = self.began + self.notice_s - self._now
        if until_notice_s < self._remaining_s():
            verdict = yield from self._wait_verdict(max(until_notice_s, 0.0))
            if verdict is None:
                verdict = yield from self._report_missing()
            if verdict is not None:
                return verdict
        verdict = yield from self._wait_verdict(max(self._remaining_s(), 0.0))
        if verdict is None and not (yield from self._is_first("settle")):
            # One rank reads the list for all, because n ranks that each read n records would be slow. If it dies while
            # it does this, the others read the list after this wait.
            # The other half of the grace time remains for the roll call below.
            verdict = yield from self._wait_verdict(GRACE_S / 2)
        if verdict is None:
            verdict = yield from self._check_members(give_up=True)
        assert verdict is not None
        return verdict

    def _wait_verdict(self, timeout_s: float) -> Steps[_JoinVerdict | None]:
        answer = yield from self._request(
            WaitForKeys([f"{self._key_prefix}verdict"], min(timeout_s, LONGEST_WAIT_S), True)
        )
        return _verdict(answer) if isinstance(answer, FoundValues) else None

    def _report_missing(self) -> Steps[_JoinVerdict | None]:
        # One rank prints for all waiting ranks: rank 0, which can report its address, or else the first that requests
        # it.
        if self.me.rank:
            rank_0 = yield from self._request(Peek([f"{self._key_prefix}member/0"]))
            if rank_0 != FoundValues([None]) or not (yield from self._is_first("notice")):
                return None
        claims = yield from self._read_claims("member")
        missing = [rank for rank, claim in enumerate(claims) if claim is None]
        if not missing:  # the last rank died before it wrote the verdict
            return (yield from self._check_members())
        listens = self.listens()
        where = f"(rank 0 listens {listens})" if listens else f"on {self.where}"
        yield from self._print_notice(f"for {rank_list(missing)} {where}")
        return None

    def _check_members(self, give_up: bool = False) -> Steps[_JoinVerdict | None]:
        size = self.me.world_size
        claims = yield from self._read_claims("member", "double") if give_up else self._read_claims("member")
        claims, duplicates = claims[:size], claims[size:]
        members = [claim.member for claim in claims if claim is not None]
        missing = tuple(rank for rank, claim in enumerate(claims) if claim is None)
        if not missing:
            # Before the verdict: a rank that has received the verdict may read the table immediately.
            yield from self._request(Set(f"{self._key_prefix}{TABLE.rpartition('/')[2]}", _pack_members(members)))
            return (yield from self._write_verdict(_JoinVerdict()))
        if not give_up:
            return None
        lines = [
            f"{len(missing)} of {size} ranks did not join in {self.timeout_s:.1f} s: missing {rank_list(missing)}.",
            f"Joined: {', '.join(map(str, members[:8]))}{' and others' if len(members) > 8 else ''}.",
            *(
                _duplicate_rank_text(first.member, second.member)
                for first, second in zip(claims, duplicates, strict=True)
                if first and second
            ),
            *self.refusals(),
            *self._empty_hosts(members),
            "Check the output of the missing ranks.",
            f"To wait longer, set {self.longer}.",
        ]
        return (yield from self._write_verdict(_JoinVerdict("\n  ".join(lines), missing)))

    def _empty_hosts(self, members: Sequence[Member]) -> list[str]:
        joined = Counter(member.host.partition(".")[0] for member in members)
        fewer = [
            f"{host} ({joined[name]} of {count})"
            for host, count in self.started.items()
            if joined[name := host.partition(".")[0]] < count
        ]
        return [f"Fewer ranks joined than were started: {', '.join(fewer)}."] if fewer else []

    def _write_verdict(self, verdict: _JoinVerdict) -> Steps[_JoinVerdict]:
        # The first verdict counts, so no rank continues after another one has given up.
        answer = yield from self._request(
            CompareSet(f"{self._key_prefix}verdict", b"", msgspec.msgpack.encode(verdict))
        )
        return _verdict(answer)

    def _fail(self, kind: type[JoinError | ConfigError], error: str) -> Steps[None]:
        # The other ranks receive this verdict, and fail now and not at the timeout.
        yield from self._write_verdict(_JoinVerdict(error))
        raise kind(error)

    # Requests.

    def _request(self, request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        answer = yield from self._perform(request)
        match answer:
            case RequestDone() | FoundValues() | WaitTimedOut():
                return answer
            case Lost(text, cause) if self._remaining_s() <= 0:
                raise JoinError(
                    f"{self.me}: not all ranks joined in {self.timeout_s:.1f} s, and {self.where} did not report the"
                    f" missing ranks in time ({text}).\n  Check its output.\n  To wait longer, set {self.longer}."
                ) from cause
            case Lost(text, cause):
                raise JoinError(
                    f"{self.me}: {self.where} became unreachable while the ranks joined ({text}).\n"
                    "  Check the end of its output."
                ) from cause
            case _:
                raise self._unexpected_answer(answer)

    def _claim(self, key: str, encoded_claim: bytes) -> Steps[_Claim]:
        answer = yield from self._request(CompareSet(self._key_prefix + key, b"", encoded_claim))
        assert isinstance(answer, FoundValues)
        try:
            claim = _decode(answer.values[0])
        except msgspec.MsgspecError:
            claim = None
        if claim is None:
            raise self._unexpected_answer(answer)
        return claim

    def _read_claims(self, *kinds: str) -> Steps[list[_Claim | None]]:
        keys = [f"{self._key_prefix}{kind}/{rank}" for kind in kinds for rank in range(self.me.world_size)]
        answer = yield from self._request(Peek(keys))
        assert isinstance(answer, FoundValues)
        return [_decode(value) for value in answer.values]

    def _is_first(self, what: str) -> Steps[bool]:
        return (yield from self._request(Add(self._key_prefix + what, 1))) == RequestDone(1)

    # Texts.

    def _print_notice(self, facts: str) -> Steps[None]:
        if not self._notice_printed:
            self._notice_printed = True
            waited_s = self._now - self.began
            yield from self._perform(
                Notify(
                    f"allranks: rank {self.me.rank} has waited {waited_s:.0f} s {facts};"
                    f" it gives up after {self.timeout_s:.0f} s, see {self.longer}"
                )
            )

    def _version_text(self, first: _Claim) -> str:
        return (
            f"{self.me} joins with protocol {_PROTOCOL}, {first.member} with protocol {first.protocol}: they run"
            " different versions of allranks.\n  Install one version on all hosts."
        )

    def _unexpected_answer(self, answer: Answer) -> ConfigError:
        return ConfigError(
            f"{self.me}: {self.where} returned an unexpected answer: {answer!r}.\n"
            "  Another version of allranks may be using it. Install one version on all hosts."
        )


def exchange(prefix: str, rank: int, size: int, record: bytes, timeout_s: float) -> Steps[list[bytes]]:
    """Give every rank the records of all ranks, by rank. The last rank to arrive combines them.

    Args:
        prefix: Prefix of the keys of this exchange.
        rank: This rank.
        size: Number of ranks that take part.
        record: The record of this rank.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        TimeoutError: Ranks did not arrive in time. The message names them.
    """
    keys = [f"{prefix}{r}" for r in range(size)]

    def send(request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        _, answer = yield request
        assert isinstance(answer, RequestDone | FoundValues | WaitTimedOut), answer
        return answer

    def gather() -> Steps[list[bytes | None]]:
        found = yield from send(Peek(keys))
        assert isinstance(found, FoundValues)
        if None not in found.values:
            yield from send(Set(f"{prefix}all", msgspec.msgpack.encode(found.values)))
        return found.values

    yield from send(Set(keys[rank], record))
    # After the record: when the counter reaches the size, all records can be read.
    arrived = yield from send(Add(f"{prefix}posted", 1))
    if arrived == RequestDone(size):
        rows = yield from gather()
    else:
        answer = yield from send(WaitForKeys([f"{prefix}all"], min(timeout_s, LONGEST_WAIT_S), True))
        if isinstance(answer, FoundValues) and answer.values[0] is not None:
            return msgspec.msgpack.decode(answer.values[0], type=list[bytes])
        # The last rank may have died between its count and the combined record, so each rank checks the records itself.
        rows = yield from gather()
    missing = [r for r, row in enumerate(rows) if row is None]
    if missing:
        raise TimeoutError(
            f"rank {rank}: {rank_list(missing)} did not take part in an exchange of {size} ranks in {timeout_s:.1f}"
            " s.\n"
            "  They may be late or may have exited. Check their output.\n"
            "  To wait longer, set init_process_group(timeout=...)."
        )
    return [row for row in rows if row is not None]


# --- records --------------------------------------------------------------------------------------------------


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """All members, by column. Values that the ranks of a host share are stored once."""

    hosts: list[tuple[str, str, tuple[str, ...]]]  # name, machine, addresses
    host_of: list[int]
    pids: list[int]  # differences: ranks of one host start one after the other, so the differences are small


def _pack_members(members: Sequence[Member]) -> bytes:
    hosts: dict[tuple[str, str, tuple[str, ...]], int] = {}
    host_of = [hosts.setdefault((m.host, m.machine, m.addresses), len(hosts)) for m in members]
    pids = [m.pid for m in members]
    steps = [pid - before for before, pid in zip([0, *pids], pids, strict=False)]
    return zlib.compress(msgspec.msgpack.encode(_Table(list(hosts), host_of, steps)))


def unpack_members(packed: bytes) -> tuple[Member, ...]:
    """Return the members of a table, by rank."""
    table = msgspec.msgpack.decode(zlib.decompress(packed), type=_Table)
    size = len(table.host_of)

    def each() -> Iterator[Member]:
        for rank, (at, pid) in enumerate(zip(table.host_of, itertools.accumulate(table.pids), strict=True)):
            host, machine, addresses = table.hosts[at]
            yield Member(rank, pid, host, machine, size, addresses)

    return tuple(each())


def _decode(value: bytes | None) -> _Claim | None:
    return None if value is None else msgspec.msgpack.decode(value, type=_Claim)


def _verdict(answer: RequestDone | FoundValues | WaitTimedOut) -> _JoinVerdict:
    assert isinstance(answer, FoundValues)
    assert answer.values[0] is not None
    return msgspec.msgpack.decode(answer.values[0], type=_JoinVerdict)


def _duplicate_rank_text(first: Member, second: Member) -> str:
    return (
        f"Two processes have the same rank: {first} joined first, then {second}.\n"
        "  Give each process its own rank (RANK, or rank=). A restarted process cannot rejoin alone: restart all ranks."
    )
