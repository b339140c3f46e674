"""The group history: the generations of a group, the members after a loss, and a new engine for them.

``_elastic/membership_change`` decides, as a pure state machine. This module passes it the knowledge of this process,
and turns its decision into a connected engine. If a member is lost while the engine connects, another generation
follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from allranks import _engines
from allranks._base.errors import JoinError, PeerLostError, TimeoutError, UsageError, rank_list
from allranks._elastic import membership_change
from allranks._elastic.membership_change import NEWCOMER, Decision, LossDetector, Proposal, Vote, proposal_key
from allranks._elastic.replicas import forms_replica
from allranks._elastic.slot_table import GONE, OPTIONAL

if TYPE_CHECKING:
    from allranks._elastic.membership_store import MembershipStore
    from allranks._engines.base import Engine
    from allranks._rendezvous.rendezvous import Member

__all__ = ["GroupHistory", "NextGeneration", "ChangeCounts", "no_membership_store"]

_CONNECT_S = 10.0  # seconds; all members have written proposals, and losses after that are detected earlier
_MAX_CONNECT_ATTEMPTS = 5  # number of generations with the same members that fail to connect before an error is raised


@dataclass(frozen=True)
class NextGeneration:
    """The next generation of a group, connected.

    Attributes:
        engine: The engine that transfers its tensors.
        rank: The rank of this process in it.
        members: Its members, by rank. Their ``rank`` attribute is their rank slot.
        decision: The decision about it.
    """

    engine: Engine
    rank: int
    members: tuple[Member, ...]
    decision: Decision


@dataclass(frozen=True)
class ChangeCounts:
    """Counts of the changes of a group's rank slots over its generations.

    Each generation counts, also one in which the ranks did not reach a step. All ranks of a generation therefore have
    the same counts, whichever earlier generations each of them has seen.

    Attributes:
        replaced: How often another process has taken the rank slot of a lost member.
        lost: The number of lost members.
        joined: The number of rank slots that have joined.
    """

    replaced: int = 0
    lost: int = 0
    joined: int = 0

    def after(self, before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> ChangeCounts:
        """Return the counts including the next generation. The arguments are pairs of rank slot and start."""
        old, new = dict(before), dict(now)
        # Only the start differs between a replacement process and the process that it replaces.
        restarted = sum(slot in new and new[slot] != start for slot, start in old.items())
        lost, joined = len(old.keys() - new.keys()), len(new.keys() - old.keys())
        return self + ChangeCounts(restarted, restarted + lost, joined)

    def __add__(self, other: ChangeCounts) -> ChangeCounts:
        return ChangeCounts(self.replaced + other.replaced, self.lost + other.lost, self.joined + other.joined)

    def __sub__(self, other: ChangeCounts) -> ChangeCounts:
        return ChangeCounts(self.replaced - other.replaced, self.lost - other.lost, self.joined - other.joined)


@dataclass
class GroupHistory:
    """The history of one group, as far as this process takes part in its generations.

    Attributes:
        membership: The membership table on which the generations are decided.
        prefix: Prefix of their keys.
        backend: The engine of every generation.
        name: The name of the group.
        timeout_s: The timeout of its calls, in seconds.
        slot: The rank slot of this process.
        members: Rank slot and start of the members of the present generation, by rank.
        generation: The number of the present generation.
        vote: The state of this rank's agreements in it.
        decided: The next generation, if it has already been decided.
        out: Processes that earlier generations excluded.
        replaces: The ranks wait for processes that take lost rank slots. This includes agreements, because their
            decision is also the decision on the next generation.
        counts: The counts of the generations that this process has followed.
        place: See ``Proposal``.
        replica: See ``Proposal``.
        waiting: Processes that are not members, and for which no rank waits: see ``Decision``.
        on_waiting: Called when this process has the state of the program but other ranks of its replica are missing, so
            that it waits for new processes.
        before: The members of the previous generation.
    """

    membership: MembershipStore
    prefix: str
    backend: str
    name: str
    timeout_s: float
    slot: int
    members: Sequence[tuple[int, int]]
    generation: int = 0
    vote: Vote = field(default_factory=Vote)
    decided: Decision | None = None
    out: Sequence[tuple[int, int]] = ()
    replaces: bool = False
    counts: ChangeCounts = ChangeCounts()
    place: int = 0
    replica: int = 1
    waiting: Sequence[tuple[int, int]] = ()
    on_waiting: Callable[[], None] | None = None
    before: Sequence[tuple[int, int]] = ()
    _own: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # The slot alone does not identify this process: an excluded predecessor may still run with the same slot.
        self._own = (self.slot, self.membership.start)

    def decide(
        self,
        detect: LossDetector,
        *,
        without: Sequence[int] = (),
        progress: int = 0,
        replaces: bool = False,
        timeout_s: float | None = None,
    ) -> Decision:
        """Decide with the other processes on the next generation. Returns the same decision until it is connected.

        Args:
            detect: Returns the members that this process has detected as lost.
            without: Rank slots to exclude.
            progress: The progress of this process's program. ``NEWCOMER``: it is new.
            replaces: Wait for processes that take lost rank slots.
            timeout_s: Seconds to wait for members that are not known to be lost. None: the group's timeout.

        Raises:
            ExcludedError: The decision excludes this process.
            StoreLostError: The store is lost.
            AllranksError: Too few ranks remain.
        """
        # `agree` and the recovery after it use one decision, because it contains the outcome of the agreement, too.
        if self.decided is None:
            proposal = Proposal(
                self.slot,
                self._own[1],
                # Members are identified by rank slot: their next ranks are known only after the decision.
                msgspec.structs.replace(self.membership.me, rank=self.slot),
                without=tuple(without),
                vote=self.vote,
                progress=progress,
                place=self.place,
                replica=self.replica,
            )
            machine = membership_change.MembershipChange(
                self.prefix,
                self.generation,
                proposal,
                dict(self.members),
                self.membership.launched,
                replaces,
                time.monotonic(),
                self.timeout_s if timeout_s is None else timeout_s,
                self.membership.where,
                self.out,
                self.waiting,
            )
            self.decided = self.membership.drive(machine.steps(), detect)
        return self.decided

    def connect_next_generation(
        self,
        detect: LossDetector,
        *,
        without: Sequence[int] = (),
        progress: int = 0,
        replaces: bool = False,
        timeout_s: float | None = None,
        waits: bool = True,
    ) -> NextGeneration | Decision:
        """Decide on the next generation, and connect its members.

        The other arguments and errors are those of ``decide``.

        Args:
            waits: A newcomer that is too late for a generation waits for the next one.

        Returns:
            The next generation. If a newcomer does not wait: the decision, which does not include this process.

        Raises:
            JoinError: The members cannot connect, although none of them is lost.
        """
        failed_attempts, last_error = 0, JoinError("")
        while failed_attempts < _MAX_CONNECT_ATTEMPTS:
            before = self.members
            decision = self.decide(detect, without=without, progress=progress, replaces=replaces, timeout_s=timeout_s)
            members = [(proposal.slot, proposal.start) for proposal in decision.proposals]
            # This process is a newcomer that is too late for this generation, or its replica is incomplete.
            if self._own not in members:
                self.begin(decision)
                if not waits:
                    return decision
                if progress >= 0:
                    progress = NEWCOMER  # the other ranks continue, so the state of this process is soon outdated
                    detect = _detects_nothing  # the others have left the engine of this process, which is not a loss
                    if self.on_waiting is not None:
                        self.on_waiting()
                continue
            rank = members.index(self._own)
            engine = None
            try:
                engine = self._connect(decision, rank, detect)
            except (JoinError, PeerLostError, TimeoutError) as error:
                last_error = error if isinstance(error, JoinError) else JoinError(str(error))
                # A changed membership is progress: each further loss during recovery deserves new attempts.
                failed_attempts = failed_attempts + 1 if members == list(before) else 0
                # Other ranks may detect the failed connection only after their own connection timeout. This rank waits
                # longer.
                timeout_s = max(self.timeout_s if timeout_s is None else timeout_s, 2 * _CONNECT_S)
            # Also after a failed connection: the next proposals of all members must have the same generation number.
            self.begin(decision)
            if engine is not None:
                next_members = tuple(proposal.member for proposal in decision.proposals)
                return NextGeneration(engine, rank, next_members, decision)
        raise JoinError(
            f"group '{self.name}': {rank_list([slot for slot, _ in self.members])} could not connect to each other,"
            f" although none of them is lost: {last_error}\n"
            "  To check the connections between these ranks, run allranks doctor in a job on the same hosts."
        ) from last_error

    def has_waiting_processes(self) -> bool:
        """Return whether processes wait to become members: a process that joined later, or a whole replica."""
        table = self.membership.table()
        # An excluded process never becomes a member again. Its old proposal must not trigger another membership change.
        known = {*self.members, *self.out}
        waiting = [
            proposal_key(self.prefix, self.generation, slot.number, slot.start)
            for slot in (() if table is None else table.slots)
            if (slot.state == OPTIONAL or (self.replica > 1 and slot.state != GONE))
            and (slot.number, slot.start) not in known
        ]
        # A new process counts only after it has written its proposal, so its start never delays the others.
        found = [proposal for proposal in self.membership.peek(waiting) if proposal is not None] if waiting else []
        if self.replica == 1:
            return bool(found)
        return forms_replica([msgspec.msgpack.decode(proposal, type=Proposal) for proposal in found], self.replica)

    def others_have_ended(self) -> bool:
        """Return whether all members of the previous generation have exited with code 0."""
        table = self.membership.table()
        slots = [None if table is None else table.find(number) for number, _ in self.before]
        return bool(slots) and all(slot is not None and slot.done for slot in slots)

    def begin(self, decision: Decision) -> None:
        """Make the decided generation the present one."""
        members = [(proposal.slot, proposal.start) for proposal in decision.proposals]
        # A process that joins later knows no earlier members. Comparing with itself adds nothing to the counts.
        self.counts = self.counts.after(self.members or members, members)
        self.before, self.members = self.members, members
        self.generation = decision.generation
        self.out, self.waiting = decision.out, decision.waiting
        # All members continue with the same number of agreements. `_settle_agreement` compares votes by this number.
        self.vote = Vote(decision.ended, decision.outcome)
        self.decided = None

    def _connect(self, decision: Decision, rank: int, detect: LossDetector) -> Engine:
        def exchange(record: bytes) -> list[bytes]:
            steps = membership_change.exchange(
                self.prefix, rank, decision, record, time.monotonic(), _CONNECT_S, self.membership.where
            )
            records = self.membership.drive(steps, detect)
            # `connect_next_generation` retries: the loss of a member in the exchange leads to another generation.
            if records is None:
                raise JoinError(f"group '{self.name}': a member was lost while the ranks were connecting")
            return records

        members = [proposal.member for proposal in decision.proposals]
        return _engines.make_engine(
            self.backend, rank, members, exchange, self.name, self.timeout_s, connect_s=_CONNECT_S
        )


def _detects_nothing(missing: Sequence[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    return frozenset()


def no_membership_store(name: str, call: str, reconfigured: bool = False) -> UsageError:
    """Return the error of a group whose ranks have no store on which they could decide on the next generation.

    Args:
        name: The name of the group.
        call: The call that failed.
        reconfigured: Its members are those of its last reconfiguration.
    """
    if reconfigured:
        return UsageError(
            f"{call} on group '{name}': reconfigure has created the group, and its members have no store in common on"
            " which they can agree on a new group.\n  Call reconfigure with the handles of the remaining processes."
        )
    return UsageError(
        f"{call} on group '{name}': the ranks have no store on which they can agree on a new group. Rank 0 served the"
        " store of the rendezvous and has closed it.\n  Start the program with allranks run, or pass init_process_group"
        " a store= that outlives every rank."
    )
