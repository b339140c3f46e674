"""Who goes on after a loss, as a pure state machine: the ranks of a group decide together on a store.

A group lives in generations. Those that survive a loss, and processes that take lost seats, put a claim on the store
under the generation that has ended. Whoever sees that all have come who can come writes the decision, by one
``CompareSet``: the first decision counts, for everybody. It names the members of the next generation, and the outcome
of an agreement that the loss has cut in two. docs/resilience.md has the protocol, and why no two groups can go on.

No socket, no clock and no thread, as ``join_protocol``, whose driver runs this. ``Look`` is the only act beside
requests to the store: what this process sees of the others by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from allranks._base.errors import AllranksError, ExcludedError, StoreLostError, rank_list
from allranks._rendezvous.join_protocol import Answer, Lost, Member, Steps
from allranks._rendezvous.replicas import chosen
from allranks._rendezvous.seats import GONE, OPTIONAL, TABLE_KEY, SeatTable
from allranks._store.wire import CompareSet, FoundValues, Peek, Request, RequestDone, Set, WaitForKeys, WaitTimedOut

__all__ = ["NEWCOMER", "Claim", "Decision", "Look", "See", "Succession", "Vote", "claim_key", "exchange"]

POLL_S = 0.05  # between two looks at who has come and who is lost
UNCONFIRMED_S = 5.0  # for the launcher to confirm a loss that a rank has seen; then the rank is believed
FOREVER_S = 1e9
NEWCOMER = -1
"""The progress of a process that has nothing of the program's state yet."""


@dataclass(frozen=True)
class Look:
    """See by itself which members are lost. The answer is a set of pairs of seat and start.

    Attributes:
        missing: those that are waited for.
    """

    missing: tuple[tuple[int, int], ...] = ()


Sighting: TypeAlias = frozenset[tuple[int, int]]

See: TypeAlias = Callable[[Sequence[tuple[int, int]]], Sighting]
"""Performs ``Look``: gets those that are waited for."""


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """The state of a rank's agreements.

    Attributes:
        ended: the number of the last one that has ended here.
        outcome: what it came to.
        value: this rank's value in the next one, which is under way; None if none is.
    """

    ended: int = 0
    outcome: int = 0
    value: int | None = None


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A process that wants to be in the next generation.

    Attributes:
        seat: its place in the job.
        start: how many processes had the seat before it.
        member: the process.
        lost: the members of the present generation that it knows to be lost: seat and start.
        without: seats that the next generation is to do without.
        vote: its agreements.
        progress: how far its program has come; ``NEWCOMER``: it has nothing yet.
        place: its place in a replica of the program's model, which is the rest of this number by the replica's size.
        replica: how many ranks have a replica together; 1 where each has the whole model, or that is not known here.
    """

    seat: int
    start: int
    member: Member
    lost: tuple[tuple[int, int], ...] = ()
    without: tuple[int, ...] = ()
    vote: Vote = Vote()
    progress: int = NEWCOMER
    place: int = 0
    replica: int = 1


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Who is in a generation.

    Attributes:
        generation: its number.
        claims: its members, by rank.
        ended: the number of the last agreement of the generation before.
        outcome: what that came to.
        least: the number of ranks without which the job does not go on.
        out: members of earlier generations that are none any more: seat and start. Nobody waits for them again.
        aside: those that have come and are no members, as others of their replica are missing. They may be later.
    """

    generation: int
    claims: tuple[Claim, ...]
    ended: int
    outcome: int
    least: int
    out: tuple[tuple[int, int], ...] = ()
    aside: tuple[tuple[int, int], ...] = ()

    def rank_of(self, seat: int, start: int) -> int | None:
        """The rank of a process; None if it is not a member."""
        return next((r for r, c in enumerate(self.claims) if (c.seat, c.start) == (seat, start)), None)


@dataclass
class Succession:
    """One process's way into the next generation.

    Attributes:
        prefix: of the lineage's keys: of all generations of a group.
        generation: the one that has ended.
        claim: this process.
        members: who was in it: the start by seat.
        launched: a launcher writes the table of seats (``seats``).
        replaces: processes that take lost seats are waited for, and newcomers are taken.
        began: the time now.
        timeout_s: how long to wait for members that are not known to be lost.
        where: what errors call the store.
        out: those who were left out before.
        aside: those who are no members, and whom nobody waits for.
    """

    prefix: str
    generation: int
    claim: Claim
    members: Mapping[int, int]
    launched: bool
    replaces: bool
    began: float
    timeout_s: float
    where: str = "the store"
    out: Sequence[tuple[int, int]] = ()
    aside: Sequence[tuple[int, int]] = ()
    _now: float = field(init=False, default=0.0)
    _table: SeatTable | None = field(init=False, default=None)
    _claims: dict[tuple[int, int], Claim] = field(init=False, default_factory=dict)
    _seen: dict[tuple[int, int], float] = field(init=False, default_factory=dict)

    def steps(self) -> Steps[Decision]:
        """Claims, waits for the others, decides.

        Returns:
            The decision, which is the same for all. This process is a member, or a newcomer that came too late for
            this generation, or it has a part of a replica of which others are missing.

        Raises:
            ExcludedError: it is neither.
            StoreLostError: the store ended: without it nobody can decide.
            AllranksError: too few ranks are left.
        """
        self._now = self.began
        posted = None
        while True:
            sighting = yield from self._look()
            mine = self._with(sighting)
            if mine != posted:
                yield from self._ask(Set(self._key(self.claim.seat, self.claim.start), msgspec.msgpack.encode(mine)))
                posted = mine
            decided = yield from self._read()
            if decided is None and self._is_complete():
                decided = yield from self._propose()
            if decided is not None:
                return self._judge(decided)
            yield from self._ask(WaitForKeys([self._decision], POLL_S, True))

    # What is known.

    @property
    def _decision(self) -> str:
        return f"{self.prefix}{self.generation}/decision"

    def _key(self, seat: int, start: int) -> str:
        return claim_key(self.prefix, self.generation, seat, start)

    def _with(self, sighting: Sighting) -> Claim:
        return msgspec.structs.replace(self.claim, lost=tuple(sorted(set(self.claim.lost) | sighting)))

    def _candidates(self) -> dict[tuple[int, int], bool]:
        """Who may be in the next generation, and whether the others wait for it; not those that the launcher knows
        to be gone."""
        table = self._table
        if table is None:
            return {} if self.launched else dict.fromkeys(self.members.items(), True)
        found: dict[tuple[int, int], bool] = {}
        for seat in table.seats:
            if (seat.number, seat.start) in self.out:
                continue
            member = self.members.get(seat.number) == seat.start
            if seat.state != GONE and (self.replaces or member):
                is_awaited = seat.state != OPTIONAL and (seat.number, seat.start) not in self.aside
                found[seat.number, seat.start] = member or is_awaited
        return found

    def _read(self) -> Steps[Decision | None]:
        """Reads the decision, the table of seats and the claims."""
        while True:
            known = list(self._candidates())
            keys = [self._decision, TABLE_KEY, *(self._key(*each) for each in known)]
            answer = yield from self._ask(Peek(keys))
            assert isinstance(answer, FoundValues)
            decided, table, *claims = answer.values
            if decided is not None:
                return msgspec.msgpack.decode(decided, type=Decision)
            if self.launched and table is not None:
                self._table = SeatTable.decode(table)
            self._claims = {
                each: msgspec.msgpack.decode(claim, type=Claim)
                for each, claim in zip(known, claims, strict=True)
                if claim is not None
            }
            if list(self._candidates()) == known:
                return None

    def _lost(self) -> set[tuple[int, int]]:
        """Members that others have seen to be lost. Where there is a launcher it has the word, for some seconds.

        Who has claimed is not lost, whatever others see: it has left the group's engine, or the network between is cut.
        """
        seen = {pair for claim in self._claims.values() for pair in claim.lost if pair not in self._claims}
        for pair in seen:
            self._seen.setdefault(pair, self._now)
        patience_s = UNCONFIRMED_S if self.launched else 0.0
        return {pair for pair in seen if self._now >= self._seen[pair] + patience_s}

    def _taken(self) -> dict[tuple[int, int], bool]:
        without = {seat for claim in self._claims.values() for seat in claim.without}
        lost = self._lost()
        return {
            each: awaited for each, awaited in self._candidates().items() if each not in lost and each[0] not in without
        }

    def _missing(self) -> tuple[tuple[int, int], ...]:
        """Those that are waited for."""
        return tuple(each for each, awaited in self._taken().items() if awaited and each not in self._claims)

    def _is_complete(self) -> bool:
        missing = self._missing()
        if self.launched and self._table is None:
            return False
        # A newcomer has nobody's state, and nothing to go on with alone: it waits until others decide.
        return not missing or (self.claim.progress != NEWCOMER and self._now >= self.began + self.timeout_s)

    # The decision.

    def _propose(self) -> Steps[Decision]:
        come = [self._claims[each] for each in sorted(self._taken()) if each in self._claims]
        ended, outcome = _settle([claim for claim in come if claim.progress >= 0])
        least = 1 if self._table is None else self._table.least
        claims = chosen(come)
        here, members = ({(claim.seat, claim.start) for claim in some} for some in (come, claims))
        out, aside = sorted({*self.out, *self.members.items()} - here), sorted({*self.aside, *here} - members)
        mine = Decision(self.generation + 1, tuple(claims), ended, outcome, least, tuple(out), tuple(aside))
        answer = yield from self._ask(CompareSet(self._decision, b"", msgspec.msgpack.encode(mine)))
        assert isinstance(answer, FoundValues)
        assert answer.values[0] is not None
        return msgspec.msgpack.decode(answer.values[0], type=Decision)

    def _judge(self, decision: Decision) -> Decision:
        me = self.claim
        # A newcomer, too: it was a member of a generation that did not connect. Nobody waits for it any more, and
        # waiting for the next decision it would make each of them itself, about nobody, when the others have ended.
        is_out = (me.seat, me.start) in decision.out
        if decision.rank_of(me.seat, me.start) is None and not is_out:
            return decision
        if not is_out and all(claim.progress == NEWCOMER for claim in decision.claims):
            return decision  # the others have ended
        if is_out:
            others = rank_list([claim.seat for claim in decision.claims])
            raise ExcludedError(
                f"rank {me.seat} ({me.member.host}, pid {me.member.pid}): {others} went on without it, in generation"
                f" {decision.generation} of the group: it was taken for lost, or did not answer in time.\n"
                "  It must end: nothing that it computes from here on has a part in the job."
            )
        if len(decision.claims) < decision.least:
            raise AllranksError(
                f"rank {me.seat}: {len(decision.claims)} ranks are left; the job needs at least {decision.least}"
                " (--elastic)"
            )
        return decision

    # Acts.

    def _look(self) -> Steps[Sighting]:
        self._now, answer = yield Look(self._missing())  # type: ignore[misc]
        assert isinstance(answer, frozenset)
        return answer

    def _ask(self, request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        self._now, answer = yield request
        return _checked(answer, self.where)


def claim_key(prefix: str, generation: int, seat: int, start: int) -> str:
    """Where a process puts its claim to the generation after this one."""
    return f"{prefix}{generation}/claim/{seat}.{start}"


def exchange(
    prefix: str, rank: int, decision: Decision, record: bytes, began: float, timeout_s: float, where: str
) -> Steps[list[bytes] | None]:
    """Gives every member of a new generation every member's record, by rank.

    Args:
        prefix: of the lineage's keys.
        rank: this process.
        decision: who is in it.
        record: this process's.
        began: the time now.
        timeout_s: how long to wait for the others.
        where: what errors call the store.

    Returns:
        The records; None if a member was lost meanwhile, or did not come in time: there must be another generation.
    """
    keys = [f"{prefix}{decision.generation - 1}/record/{r}" for r in range(len(decision.claims))]
    now, answer = yield Set(keys[rank], record)
    _checked(answer, where)
    missing: tuple[tuple[int, int], ...] = ()
    while now < began + timeout_s:
        now, answer = yield WaitForKeys(keys, 2 * POLL_S, True)
        found = _checked(answer, where)
        if isinstance(found, FoundValues):
            return [value for value in found.values if value is not None]
        now, sighting = yield Look(missing)  # type: ignore[misc]
        assert isinstance(sighting, frozenset)
        now, answer = yield Peek([TABLE_KEY, f"{prefix}{decision.generation}/decision", *keys])
        read = _checked(answer, where)
        assert isinstance(read, FoundValues)
        missing = tuple(
            (c.seat, c.start) for c, come in zip(decision.claims, read.values[2:], strict=True) if come is None
        )
        gone = sighting | _ended(read.values[0])
        if read.values[1] is not None or any((c.seat, c.start) in gone for c in decision.claims):
            return None
    return None


def _ended(table: bytes | None) -> set[tuple[int, int]]:
    """The processes that the launcher knows to have ended."""
    if table is None:
        return set()
    return {
        (seat.number, start)
        for seat in SeatTable.decode(table).seats
        for start in range(seat.start + (seat.state == GONE))
    }


def _settle(claims: Sequence[Claim]) -> tuple[int, int]:
    """The number and the outcome of the last agreement, which the loss may have cut in two."""
    ended = max((claim.vote.ended for claim in claims), default=0)
    outcome = next((claim.vote.outcome for claim in claims if claim.vote.ended == ended), 0)
    # A rank is in the next agreement only if all have ended the one before. So who votes beside one that has ended
    # this very agreement takes its outcome.
    voting = [claim for claim in claims if claim.vote.value is not None and claim.vote.ended == ended]
    if not voting:
        return ended, outcome
    values = [claim.vote.value if claim in voting else 0 for claim in claims]
    return ended + 1, min(value or 0 for value in values)


def _checked(answer: Answer | frozenset[tuple[int, int]], where: str) -> RequestDone | FoundValues | WaitTimedOut:
    match answer:
        case RequestDone() | FoundValues() | WaitTimedOut():
            return answer
        case Lost(text, cause):
            raise StoreLostError(
                f"{where} is gone ({text}), and nobody can decide who goes on: the job ends here.\n"
                "  It is in the launcher, or in the process that served it: look at the end of its output."
            ) from cause
        case _:
            raise AllranksError(f"{where} says {answer!r}: do all hosts run one version of allranks?")
