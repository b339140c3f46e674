"""How a rank joins a job, as a pure state machine: what it requests of a store, and what follows from each reply.

No socket, no clock and no thread: a generator yields what is to be done (connect, a request to the store, pause, print
a notice) and is sent the time and the answer. ``rendezvous`` drives it with real stores; the tests drive thousands
of whole jobs with simulated links, deaths and restarts, each from a seed.

All that must be decided once is decided by ``CompareSet``, one step that no death can cut in two: who comes first
and so sets how many ranks there are, who has a rank, and the verdict: all are here, or what is wrong.

What a rank asks and gets does not grow with the number of ranks; whoever comes last reads all and writes one table
of them, packed. So the whole job moves O(n) bytes, and n times the table (6 bytes per rank or so) where every rank
reads it.
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
    "Joining",
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
"""How long after the timeout a rank may still learn and report what was missing."""

NOTICE_S = 5.0
"""A rank that waits longer prints so, once: the timeout may be half an hour away."""

TABLE = "join/members"
"""The key of the table of all members, behind the prefix that ``Joining`` returns, and a slash."""

_PROTOCOL = 2  # of the keys and records here; 1 had no such number


class Member(msgspec.Struct, frozen=True):
    """One rank of a meeting, as it describes itself.

    Attributes:
        rank: its number.
        pid: its process on its host.
        host: its host's name.
        machine: the same for all processes that share memory and unix sockets.
        world_size: how many ranks it expects.
        addresses: where other hosts may reach its host.
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
    """Find the store, and leave what was found before. The answer is None or Lost."""


@dataclass(frozen=True)
class Leave:
    """Leave the store that was found."""


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
    """The store did not answer, or is not there: the system's text, and the error, if there was one."""

    text: str
    cause: Exception | None = None


Act: TypeAlias = Connect | Leave | Pause | Notify | Request
Answer: TypeAlias = Reply | Lost | None
_T = TypeVar("_T")
Steps: TypeAlias = Generator[Act, tuple[float, Answer], _T]


class _Claim(msgspec.Struct, frozen=True):
    """Who takes a rank. ``process`` distinguishes two processes with the same host name and pid, in two containers."""

    process: str
    member: Member
    protocol: int = 1


class _JoinVerdict(msgspec.Struct, frozen=True):
    error: str = ""
    missing: tuple[int, ...] = ()


@dataclass
class Joining:
    """One rank's way to a meeting.

    Attributes:
        me: this rank.
        process: unlike any other process's, on any host; may join many meetings.
        began: the time now.
        timeout_s: how long to wait for the others.
        where: what errors call the store.
        advice: what to look at where it does not answer.
        fresh: rank 0 serves the store for this meeting only.
        listens: asked where the meeting fails: where this process listens, if it serves the store.
        refusals: and whom it refused.
        notice_s: when to print who is missing.
        started: how many ranks were started on which host, where a scheduler has set it.
        longer: how errors call the argument by which this takes longer.
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
        self._noticed = False
        self._board = ""

    def steps(self) -> Steps[str]:
        """Finds the store, registers there, waits for the others.

        Returns:
            The prefix of the meeting's keys. The table of its members is there.

        Raises:
            JoinError: the store or ranks are missing when the time is over, or two ranks disagree.
            ConfigError: they run different versions.
        """
        generation = yield from self._reach()
        prefix = f"allranks/{generation}"
        self._board = f"{prefix}/join/"
        yield from self._register()
        return prefix

    def _do(self, act: Act) -> Steps[Answer]:
        self._now, answer = yield act
        return answer

    def _left(self) -> float:
        return self._deadline - self._now

    # To the store.

    def _reach(self) -> Steps[int]:
        """Returns the number of this meeting among those that this process has been to on this store."""
        pause_s = 0.01
        while True:
            answer = yield from self._do(Connect())
            if answer is None:
                answer = yield from self._count()
            match answer:
                case RequestDone(number) if number == 1 or not self.fresh:
                    return number
                case RequestDone():
                    trouble = Lost("it still serves the previous rendezvous")
                case Lost():
                    trouble = answer
                case _:
                    raise self._strange(answer)
            yield from self._do(Leave())
            if self._left() <= 0:
                raise JoinError(
                    f"{self.me}: {self.where} did not answer for {self.timeout_s:.1f} s (last: {trouble.text}).\n"
                    f"  {self.advice}    Longer: {self.longer}"
                ) from trouble.cause
            if self._now - self.began >= self.notice_s:
                yield from self._notice(f"for {self.where}; last: {trouble.text}")
            yield from self._do(Pause(min(pause_s, self._left())))
            pause_s = min(pause_s * 1.5, 0.1)

    def _count(self) -> Steps[Answer]:
        # Not by Add: where the connection breaks before the answer is here, nobody knows whether it was counted.
        key, visit, known = f"allranks/joins/{self.me.rank}/{self.process}", repr(self.began), b""
        while True:
            number = int(known.partition(b" ")[0] or b"0") + 1
            answer = yield from self._do(CompareSet(key, known, b"%d %s" % (number, visit.encode())))
            if not isinstance(answer, FoundValues) or not answer.values[0]:
                return answer
            known = answer.values[0]
            counted, _, whose = known.partition(b" ")
            if whose == visit.encode():
                return RequestDone(int(counted))

    # At the store.

    def _register(self) -> Steps[None]:
        claim = _Claim(self.process, self.me, _PROTOCOL)
        mine = msgspec.msgpack.encode(claim)
        first = yield from self._claim("first", mine)
        if first.protocol != _PROTOCOL:
            yield from self._fail(ConfigError, self._other_version(first))
        if first.member.world_size != self.me.world_size:
            yield from self._fail(
                JoinError,
                f"The ranks disagree on the world size: {first.member} says {first.member.world_size}, {self.me} says"
                f" {self.me.world_size}.\n  Start all of them with the same WORLD_SIZE (or world_size=).",
            )
        holder = yield from self._claim(f"member/{self.me.rank}", mine)
        if holder != claim:
            yield from self._ask(Set(f"{self._board}double/{self.me.rank}", mine))
            raise JoinError(_twice(holder.member, self.me))
        joined = yield from self._ask(Add(f"{self._board}joined", 1))
        assert isinstance(joined, RequestDone)
        # The last rank writes the verdict for all; nobody else has to read all the others.
        verdict = (yield from self._roll_call()) if joined.number == self.me.world_size else None
        if verdict is None:
            verdict = yield from self._await_verdict()
        if verdict.error:
            listens = self.listens() if verdict.missing else ""
            raise JoinError(verdict.error + (f"\n  Rank 0 listened {listens}." if listens else ""))

    def _await_verdict(self) -> Steps[_JoinVerdict]:
        calm_s = self.began + self.notice_s - self._now
        if calm_s < self._left():
            verdict = yield from self._wait_verdict(max(calm_s, 0.0))
            if verdict is None:
                verdict = yield from self._look_around()
            if verdict is not None:
                return verdict
        verdict = yield from self._wait_verdict(max(self._left(), 0.0))
        if verdict is None and not (yield from self._first_to("settle")):
            # One reads the list for all, as n ranks that read n records would be slow. It may die over it.
            verdict = yield from self._wait_verdict(GRACE_S / 2)
        if verdict is None:
            verdict = yield from self._roll_call(give_up=True)
        assert verdict is not None
        return verdict

    def _wait_verdict(self, timeout_s: float) -> Steps[_JoinVerdict | None]:
        answer = yield from self._ask(WaitForKeys([f"{self._board}verdict"], min(timeout_s, LONGEST_WAIT_S), True))
        return _verdict(answer) if isinstance(answer, FoundValues) else None

    def _look_around(self) -> Steps[_JoinVerdict | None]:
        # One rank prints for all that wait: rank 0, which knows where it listens, or the first to ask.
        if self.me.rank:
            zero = yield from self._ask(Peek([f"{self._board}member/0"]))
            if zero != FoundValues([None]) or not (yield from self._first_to("notice")):
                return None
        found = yield from self._everyone("member")
        missing = [rank for rank, claim in enumerate(found) if claim is None]
        if not missing:  # the last to come died before it wrote the verdict
            return (yield from self._roll_call())
        listens = self.listens()
        where = f"(it listens {listens})" if listens else f"on {self.where}"
        yield from self._notice(f"for {rank_list(missing)} {where}")
        return None

    def _roll_call(self, give_up: bool = False) -> Steps[_JoinVerdict | None]:
        size = self.me.world_size
        found = yield from self._everyone("member", "double") if give_up else self._everyone("member")
        found, doubles = found[:size], found[size:]
        members = [claim.member for claim in found if claim is not None]
        missing = tuple(rank for rank, claim in enumerate(found) if claim is None)
        if not missing:
            yield from self._ask(Set(f"{self._board}{TABLE.rpartition('/')[2]}", _pack_members(members)))
            return (yield from self._settle(_JoinVerdict()))
        if not give_up:
            return None
        lines = [
            f"{len(missing)} of {size} ranks did not join in {self.timeout_s:.1f} s: missing {rank_list(missing)}.",
            f"Joined: {', '.join(map(str, members[:8]))}{' and others' if len(members) > 8 else ''}.",
            *(
                _twice(first.member, second.member)
                for first, second in zip(found, doubles, strict=True)
                if first and second
            ),
            *self.refusals(),
            *self._empty_hosts(members),
            f"Look at the output of those that are missing.    Longer: {self.longer}",
        ]
        return (yield from self._settle(_JoinVerdict("\n  ".join(lines), missing)))

    def _empty_hosts(self, members: Sequence[Member]) -> list[str]:
        came = Counter(member.host.partition(".")[0] for member in members)
        fewer = [
            f"{host} ({came[name]} of {count})"
            for host, count in self.started.items()
            if came[name := host.partition(".")[0]] < count
        ]
        return [f"Fewer ranks joined than were started: {', '.join(fewer)}."] if fewer else []

    def _settle(self, verdict: _JoinVerdict) -> Steps[_JoinVerdict]:
        # The first verdict counts, so that no rank goes on where another one has given up.
        answer = yield from self._ask(CompareSet(f"{self._board}verdict", b"", msgspec.msgpack.encode(verdict)))
        return _verdict(answer)

    def _fail(self, kind: type[JoinError | ConfigError], error: str) -> Steps[None]:
        yield from self._settle(_JoinVerdict(error))
        raise kind(error)

    # Requests.

    def _ask(self, request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        answer = yield from self._do(request)
        match answer:
            case RequestDone() | FoundValues() | WaitTimedOut():
                return answer
            case Lost(text, cause) if self._left() <= 0:
                raise JoinError(
                    f"{self.me}: not all ranks joined in {self.timeout_s:.1f} s, and {self.where} did not answer in"
                    f" time who is missing ({text}).\n  Look at its output.    Longer: {self.longer}"
                ) from cause
            case Lost(text, cause):
                raise JoinError(
                    f"{self.me}: {self.where} went away while the ranks joined ({text}).\n"
                    "  Look at the end of its output."
                ) from cause
            case _:
                raise self._strange(answer)

    def _claim(self, key: str, mine: bytes) -> Steps[_Claim]:
        answer = yield from self._ask(CompareSet(self._board + key, b"", mine))
        assert isinstance(answer, FoundValues)
        try:
            claim = _decode(answer.values[0])
        except msgspec.MsgspecError:
            claim = None
        if claim is None:
            raise self._strange(answer)
        return claim

    def _everyone(self, *kinds: str) -> Steps[list[_Claim | None]]:
        keys = [f"{self._board}{kind}/{rank}" for kind in kinds for rank in range(self.me.world_size)]
        answer = yield from self._ask(Peek(keys))
        assert isinstance(answer, FoundValues)
        return [_decode(value) for value in answer.values]

    def _first_to(self, what: str) -> Steps[bool]:
        return (yield from self._ask(Add(self._board + what, 1))) == RequestDone(1)

    # Texts.

    def _notice(self, facts: str) -> Steps[None]:
        if not self._noticed:
            self._noticed = True
            waited_s = self._now - self.began
            yield from self._do(
                Notify(
                    f"allranks: rank {self.me.rank} has waited {waited_s:.0f} s {facts};"
                    f" it gives up after {self.timeout_s:.0f} s, see {self.longer}"
                )
            )

    def _other_version(self, first: _Claim) -> str:
        return (
            f"{self.me} joins by protocol {_PROTOCOL}, {first.member} by {first.protocol}: they run different versions"
            " of allranks.\n  Install one version on all hosts."
        )

    def _strange(self, answer: Answer) -> ConfigError:
        return ConfigError(
            f"{self.me}: {self.where} says {answer!r}.\n"
            "  Another version of allranks may be using it: install one on all hosts."
        )


def exchange(place: str, rank: int, size: int, record: bytes, timeout_s: float) -> Steps[list[bytes]]:
    """Gives every rank every rank's record, by rank; the last to come puts them together.

    Args:
        place: the prefix of the exchange's own keys.
        rank: this one.
        size: how many take part.
        record: this rank's.
        timeout_s: how long to wait for the others.

    Raises:
        TimeoutError: some did not come in time; names them.
    """
    keys = [f"{place}{r}" for r in range(size)]

    def ask(request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        _, answer = yield request
        assert isinstance(answer, RequestDone | FoundValues | WaitTimedOut), answer
        return answer

    def gather() -> Steps[list[bytes | None]]:
        found = yield from ask(Peek(keys))
        assert isinstance(found, FoundValues)
        if None not in found.values:
            yield from ask(Set(f"{place}all", msgspec.msgpack.encode(found.values)))
        return found.values

    yield from ask(Set(keys[rank], record))
    posted = yield from ask(Add(f"{place}posted", 1))
    if posted == RequestDone(size):
        rows = yield from gather()
    else:
        answer = yield from ask(WaitForKeys([f"{place}all"], min(timeout_s, LONGEST_WAIT_S), True))
        if isinstance(answer, FoundValues) and answer.values[0] is not None:
            return msgspec.msgpack.decode(answer.values[0], type=list[bytes])
        rows = yield from gather()
    missing = [r for r, row in enumerate(rows) if row is None]
    if missing:
        raise TimeoutError(
            f"rank {rank}: {rank_list(missing)} did not come to an exchange of {size} ranks in {timeout_s:.1f} s.\n"
            "  They may be late or gone: look at their output.    Longer: init_process_group(timeout=...)"
        )
    return [row for row in rows if row is not None]


# --- records --------------------------------------------------------------------------------------------------


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """All members, by columns: what the ranks of a host share stands there once."""

    hosts: list[tuple[str, str, tuple[str, ...]]]  # name, machine, addresses
    host_of: list[int]
    pids: list[int]  # differences: neighbours on a host start one after the other


def _pack_members(members: Sequence[Member]) -> bytes:
    hosts: dict[tuple[str, str, tuple[str, ...]], int] = {}
    host_of = [hosts.setdefault((m.host, m.machine, m.addresses), len(hosts)) for m in members]
    pids = [m.pid for m in members]
    steps = [pid - before for before, pid in zip([0, *pids], pids, strict=False)]
    return zlib.compress(msgspec.msgpack.encode(_Table(list(hosts), host_of, steps)))


def unpack_members(packed: bytes) -> tuple[Member, ...]:
    """Returns the members that stand in a table, by rank."""
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


def _twice(first: Member, second: Member) -> str:
    return (
        f"Two processes have the same rank: {first} joined first, then {second}.\n"
        "  Give each process a rank of its own (RANK, or rank=). One that was started again cannot join again"
        " alone: start all ranks."
    )
