"""Membership change after a loss, as a pure state machine: the ranks of a group decide together on a store.

A group exists in generations. The survivors of a loss, and processes that take lost rank slots, write a proposal to
the store under the generation that has ended. A process that finds the proposals of all expected processes writes the
decision by one ``CompareSet``. The first decision counts for all processes. It names the members of the next
generation, and the outcome of an agreement that the loss has interrupted. docs/resilience.md describes the protocol,
and why two groups can never continue side by side.

The state machine uses no socket, no clock and no thread, like ``join_protocol``, whose driver runs it. ``DetectLosses``
is the only act besides requests to the store. It returns the losses that this process has detected itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from allranks._base.errors import AllranksError, ExcludedError, StoreLostError, rank_list
from allranks._elastic.replicas import choose_members
from allranks._elastic.slot_table import GONE, OPTIONAL, TABLE_KEY, SlotTable
from allranks._rendezvous.join_protocol import Answer, Lost, Member, Steps
from allranks._store.wire import CompareSet, FoundValues, Peek, Request, RequestDone, Set, WaitForKeys, WaitTimedOut

__all__ = [
    "NEWCOMER",
    "Proposal",
    "Decision",
    "DetectLosses",
    "LossDetector",
    "MembershipChange",
    "Vote",
    "proposal_key",
    "exchange",
]

POLL_S = 0.05  # seconds between two checks which processes have joined and which are lost
# Seconds in which the launcher may confirm a loss that a rank has reported; after that, the report of the rank counts.
UNCONFIRMED_S = 5.0
NEWCOMER = -1
"""Progress of a process that has no state of the program yet."""


@dataclass(frozen=True)
class DetectLosses:
    """Detect lost members without the store. The answer is a set of pairs of rank slot and start.

    Attributes:
        missing: The processes for which this process waits.
    """

    missing: tuple[tuple[int, int], ...] = ()


LostMembers: TypeAlias = frozenset[tuple[int, int]]

LossDetector: TypeAlias = Callable[[Sequence[tuple[int, int]]], LostMembers]
"""Performs ``DetectLosses``. It receives the processes for which this process waits."""


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """The state of the agreements of a rank.

    Attributes:
        ended: Number of the last agreement that has completed on this rank.
        outcome: The outcome of that agreement.
        value: The value of this rank in the next agreement if it is in progress, else None.
    """

    ended: int = 0
    outcome: int = 0
    value: int | None = None


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """The proposal of a process to be a member of the next generation.

    Attributes:
        slot: Its rank slot in the job.
        start: The number of processes that had the rank slot before it.
        member: The process.
        lost: Members of the present generation that it has detected as lost: pairs of rank slot and start.
        without: Rank slots that the next generation excludes.
        vote: The state of its agreements.
        progress: The progress of its program. ``NEWCOMER``: it has no state yet.
        place: Its position in a replica of the program's model: this number modulo the size of a replica.
        replica: The number of ranks that form a replica. 1: each rank has the whole model, or this process does not
            have the number.
    """

    slot: int
    start: int
    member: Member
    lost: tuple[tuple[int, int], ...] = ()
    without: tuple[int, ...] = ()
    vote: Vote = Vote()
    progress: int = NEWCOMER
    place: int = 0
    replica: int = 1


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The members of a generation.

    Attributes:
        generation: Its number.
        proposals: The proposals of its members, by rank.
        ended: Number of the last agreement of the previous generation.
        outcome: The outcome of that agreement.
        least: The number of ranks without which the job does not continue.
        out: Former members, as pairs of rank slot and start. No rank waits for them again.
        waiting: Processes that have joined but are not members, because other ranks of their replica are missing. They
            may become members later.
    """

    generation: int
    proposals: tuple[Proposal, ...]
    ended: int
    outcome: int
    least: int
    out: tuple[tuple[int, int], ...] = ()
    waiting: tuple[tuple[int, int], ...] = ()

    def rank_of(self, slot: int, start: int) -> int | None:
        """Return the rank of a process, or None if it is not a member."""
        return next((r for r, c in enumerate(self.proposals) if (c.slot, c.start) == (slot, start)), None)


@dataclass
class MembershipChange:
    """The state machine with which one process changes to the next generation.

    Attributes:
        prefix: Prefix of the keys of the group history, that is, of all generations of a group.
        generation: The generation that has ended.
        proposal: The proposal of this process.
        members: The members of that generation: the start of each rank slot.
        launched: A launcher writes the table of rank slots (``slot_table``).
        replaces: The ranks wait for processes that take lost rank slots, and accept newcomers.
        began: The current time.
        timeout_s: Seconds to wait for members that have not been detected as lost.
        where: Name of the store in error messages.
        out: Processes that earlier decisions excluded.
        waiting: Processes that are not members, and for which no rank waits.
    """

    prefix: str
    generation: int
    proposal: Proposal
    members: Mapping[int, int]
    launched: bool
    replaces: bool
    began: float
    timeout_s: float
    where: str = "the store"
    out: Sequence[tuple[int, int]] = ()
    waiting: Sequence[tuple[int, int]] = ()
    _now: float = field(init=False, default=0.0)
    _table: SlotTable | None = field(init=False, default=None)
    _proposals: dict[tuple[int, int], Proposal] = field(init=False, default_factory=dict)
    _first_reported: dict[tuple[int, int], float] = field(init=False, default_factory=dict)

    def steps(self) -> Steps[Decision]:
        """Write the proposal, wait for the other processes, and decide.

        Returns:
            The decision, which is the same for all processes. This process is a member of the generation, or it is a
            newcomer that joined too late for it, or it has a part of a replica of which other parts are missing.

        Raises:
            ExcludedError: The decision excludes this process.
            StoreLostError: The store is lost, so no rank can decide.
            AllranksError: Too few ranks remain.
        """
        self._now = self.began
        written = None
        while True:
            detected = yield from self._detect()
            own_proposal = self._proposal_with(detected)
            # Each write is a request to the store, so write again only if this process has detected a further loss.
            if own_proposal != written:
                yield from self._request(
                    Set(self._key(self.proposal.slot, self.proposal.start), msgspec.msgpack.encode(own_proposal))
                )
                written = own_proposal
            decided = yield from self._read()
            if decided is None and self._is_complete():
                decided = yield from self._propose()
            if decided is not None:
                return self._check_decision(decided)
            # Wait for the decision instead of sleeping: the server answers as soon as another process decides.
            yield from self._request(WaitForKeys([self._decision], POLL_S, True))

    # Knowledge of this process.

    @property
    def _decision(self) -> str:
        return f"{self.prefix}{self.generation}/decision"

    def _key(self, slot: int, start: int) -> str:
        return proposal_key(self.prefix, self.generation, slot, start)

    def _proposal_with(self, detected: LostMembers) -> Proposal:
        return msgspec.structs.replace(self.proposal, lost=tuple(sorted(set(self.proposal.lost) | detected)))

    def _candidates(self) -> dict[tuple[int, int], bool]:
        """Return the processes that may be in the next generation, and whether the others wait for each.

        Processes whose rank slot is ``GONE`` in the launcher's table are not included.
        """
        table = self._table
        if table is None:
            return {} if self.launched else dict.fromkeys(self.members.items(), True)
        found: dict[tuple[int, int], bool] = {}
        for slot in table.slots:
            if (slot.number, slot.start) in self.out:
                continue
            # A restarted process has the same slot with another start, and is a newcomer.
            member = self.members.get(slot.number) == slot.start
            if slot.state != GONE and (self.replaces or member):
                # Processes that join later never block running ranks, even if they die while they join.
                is_awaited = slot.state != OPTIONAL and (slot.number, slot.start) not in self.waiting
                found[slot.number, slot.start] = member or is_awaited
        return found

    def _read(self) -> Steps[Decision | None]:
        """Read the decision, the table of rank slots and the proposals."""
        while True:
            known = list(self._candidates())
            # One request for all keys, so that each poll costs one round trip.
            keys = [self._decision, TABLE_KEY, *(self._key(*each) for each in known)]
            answer = yield from self._request(Peek(keys))
            assert isinstance(answer, FoundValues)
            decided, table, *proposals = answer.values
            if decided is not None:
                return msgspec.msgpack.decode(decided, type=Decision)
            if self.launched and table is not None:
                self._table = SlotTable.decode(table)
            self._proposals = {
                each: msgspec.msgpack.decode(proposal, type=Proposal)
                for each, proposal in zip(known, proposals, strict=True)
                if proposal is not None
            }
            # A new table can change the candidates. Their proposals must then be read again, with the new keys.
            if list(self._candidates()) == known:
                return None

    def _lost(self) -> set[tuple[int, int]]:
        """Return the members that count as lost.

        If a launcher writes the table, the table decides for `UNCONFIRMED_S` seconds. After that, the report of any
        rank counts. A process that has written a proposal is not lost, even if other ranks report it. It has left the
        group's engine, or the network between them is interrupted.
        """
        seen = {pair for proposal in self._proposals.values() for pair in proposal.lost if pair not in self._proposals}
        for pair in seen:
            # The time of the first report counts. Otherwise each further report would restart the grace period.
            self._first_reported.setdefault(pair, self._now)
        # The launcher is the parent and sees every exit. A rank may mistake a network failure for an exit.
        patience_s = UNCONFIRMED_S if self.launched else 0.0
        return {pair for pair in seen if self._now >= self._first_reported[pair] + patience_s}

    def _eligible(self) -> dict[tuple[int, int], bool]:
        without = {slot for proposal in self._proposals.values() for slot in proposal.without}
        lost = self._lost()
        return {
            each: awaited for each, awaited in self._candidates().items() if each not in lost and each[0] not in without
        }

    def _missing(self) -> tuple[tuple[int, int], ...]:
        """Return the processes for which the ranks wait."""
        return tuple(each for each, awaited in self._eligible().items() if awaited and each not in self._proposals)

    def _is_complete(self) -> bool:
        missing = self._missing()
        # Deciding without the table could exclude a rank that the launcher is restarting.
        if self.launched and self._table is None:
            return False
        # A newcomer has no state, so it cannot continue alone. It waits until other processes decide.
        return not missing or (self.proposal.progress != NEWCOMER and self._now >= self.began + self.timeout_s)

    # The decision.

    def _propose(self) -> Steps[Decision]:
        joined = [self._proposals[each] for each in sorted(self._eligible()) if each in self._proposals]
        # Newcomers did not take part in the interrupted agreement, so they have no vote in it.
        ended, outcome = _settle_agreement([proposal for proposal in joined if proposal.progress >= 0])
        least = 1 if self._table is None else self._table.least
        proposals = choose_members(joined)
        # A process that has a proposal but is not chosen waits. A member without a proposal is out for good.
        proposed, members = ({(proposal.slot, proposal.start) for proposal in some} for some in (joined, proposals))
        out, waiting = (
            sorted({*self.out, *self.members.items()} - proposed),
            sorted({*self.waiting, *proposed} - members),
        )
        own_decision = Decision(
            self.generation + 1, tuple(proposals), ended, outcome, least, tuple(out), tuple(waiting)
        )
        # The expected value b"" means: only if the key does not exist. Exactly one process can therefore write it.
        answer = yield from self._request(CompareSet(self._decision, b"", msgspec.msgpack.encode(own_decision)))
        assert isinstance(answer, FoundValues)
        assert answer.values[0] is not None
        # The stored decision counts, which may be that of another process.
        return msgspec.msgpack.decode(answer.values[0], type=Decision)

    def _check_decision(self, decision: Decision) -> Decision:
        own_proposal = self.proposal
        # This check applies to a newcomer, too. It was a member of a generation that failed to connect, and no rank
        # waits for it any more. If it waited for the next generation after the others have exited, it would write every
        # further decision itself, without members.
        is_out = (own_proposal.slot, own_proposal.start) in decision.out
        if decision.rank_of(own_proposal.slot, own_proposal.start) is None and not is_out:
            return decision
        if not is_out and all(proposal.progress == NEWCOMER for proposal in decision.proposals):
            return decision  # the other processes have finished
        if is_out:
            others = rank_list([proposal.slot for proposal in decision.proposals])
            raise ExcludedError(
                f"rank {own_proposal.slot} ({own_proposal.member.host}, pid {own_proposal.member.pid}): {others}"
                f" continued without it, in generation {decision.generation} of the group. It was detected as lost, or"
                " did not answer in time.\n"
                "  Exit this process: the job does not use its results any more."
            )
        if len(decision.proposals) < decision.least:
            raise AllranksError(
                f"rank {own_proposal.slot}: {len(decision.proposals)} ranks remain, but the job requires at least"
                f" {decision.least} (--elastic).\n"
                "  Restart the job (automatic with allranks run --restarts), or reduce --elastic."
            )
        return decision

    # Acts.

    def _detect(self) -> Steps[LostMembers]:
        self._now, answer = yield DetectLosses(self._missing())  # type: ignore[misc]
        assert isinstance(answer, frozenset)
        return answer

    def _request(self, request: Request) -> Steps[RequestDone | FoundValues | WaitTimedOut]:
        self._now, answer = yield request
        return _checked(answer, self.where)


def proposal_key(prefix: str, generation: int, slot: int, start: int) -> str:
    """Return the key of a process's proposal for the generation after this one."""
    return f"{prefix}{generation}/proposal/{slot}.{start}"


def exchange(
    prefix: str, rank: int, decision: Decision, record: bytes, began: float, timeout_s: float, where: str
) -> Steps[list[bytes] | None]:
    """Give every member of a new generation the records of all members, by rank.

    Args:
        prefix: Prefix of the keys of the group history.
        rank: The rank of this process.
        decision: The members of the generation.
        record: The record of this process.
        began: The current time.
        timeout_s: Seconds to wait for the other members.
        where: Name of the store in error messages.

    Returns:
        The records. None if a member was lost during the exchange, or did not write its record in time. Another
        generation must then follow.
    """
    # Same prefix as the decision. The keys are new in each generation, so no record of a failed attempt is read.
    keys = [f"{prefix}{decision.generation - 1}/record/{r}" for r in range(len(decision.proposals))]
    now, answer = yield Set(keys[rank], record)
    _checked(answer, where)
    missing: tuple[tuple[int, int], ...] = ()
    while now < began + timeout_s:
        # The wait is short because a lost member never writes its record: losses are checked in between.
        now, answer = yield WaitForKeys(keys, 2 * POLL_S, True)
        found = _checked(answer, where)
        if isinstance(found, FoundValues):
            return [value for value in found.values if value is not None]
        now, detected = yield DetectLosses(missing)  # type: ignore[misc]
        assert isinstance(detected, frozenset)
        now, answer = yield Peek([TABLE_KEY, f"{prefix}{decision.generation}/decision", *keys])
        peeked = _checked(answer, where)
        assert isinstance(peeked, FoundValues)
        missing = tuple(
            (c.slot, c.start) for c, value in zip(decision.proposals, peeked.values[2:], strict=True) if value is None
        )
        gone = detected | _ended(peeked.values[0])
        # A decision about the next generation means that another member has already given up on this one.
        if peeked.values[1] is not None or any((c.slot, c.start) in gone for c in decision.proposals):
            return None
    return None


def _ended(table: bytes | None) -> set[tuple[int, int]]:
    """Return the processes that have exited according to the launcher's table."""
    if table is None:
        return set()
    return {
        (slot.number, start)
        for slot in SlotTable.decode(table).slots
        # All earlier starts of a slot have exited, too. The present one has if the slot is GONE.
        for start in range(slot.start + (slot.state == GONE))
    }


def _settle_agreement(proposals: Sequence[Proposal]) -> tuple[int, int]:
    """Return the number and the outcome of the last agreement, which the loss may have interrupted."""
    ended = max((proposal.vote.ended for proposal in proposals), default=0)
    # All ranks that completed an agreement have the same outcome, so any of them will do.
    outcome = next((proposal.vote.outcome for proposal in proposals if proposal.vote.ended == ended), 0)
    # A rank takes part in the next agreement only after all ranks have completed the previous one. If another rank has
    # already completed the agreement in which a rank still votes, the voting rank takes over its outcome.
    voting = [proposal for proposal in proposals if proposal.vote.value is not None and proposal.vote.ended == ended]
    if not voting:
        return ended, outcome
    # A rank that is not in this agreement was in another call, so the step is incomplete: 0 means undone.
    values = [proposal.vote.value if proposal in voting else 0 for proposal in proposals]
    return ended + 1, min(value or 0 for value in values)


def _checked(answer: Answer | frozenset[tuple[int, int]], where: str) -> RequestDone | FoundValues | WaitTimedOut:
    match answer:
        case RequestDone() | FoundValues() | WaitTimedOut():
            return answer
        case Lost(text, cause):
            raise StoreLostError(
                f"{where} is lost ({text}), so the remaining ranks cannot agree on a new group. The job stops.\n"
                "  Check the end of the output of the launcher, or of the process that served the store."
            ) from cause
        case _:
            raise AllranksError(
                f"{where} returned an unexpected answer: {answer!r}.\n"
                "  If the hosts run different versions of allranks, install the same one. Otherwise report this with"
                " the output of `allranks doctor`."
            )
