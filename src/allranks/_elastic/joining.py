"""The world of an elastic job until its training loop begins.

Before the loop, every process sees the world of the first processes, including processes that join later. The replay
log of the first processes answers the calls of a later process, so it contains the rank numbers and sizes of the
first processes. A process that takes over a rank slot makes the calls of that slot. A process with a new slot makes the
calls of the last rank. If several ranks share a replica of the model, it makes the calls of its position in the last
replica. In the loop, all processes use the current numbers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import AllranksError, ExcludedError
from allranks._elastic.early_groups import EarlyGroups, ElasticWorld
from allranks._elastic.history import GroupHistory, NextGeneration
from allranks._elastic.membership_change import Decision
from allranks._elastic.recovery import LATEST, with_world_ranks
from allranks._elastic.replay import ReplayEngine
from allranks._elastic.slot_table import GONE, OPTIONAL
from allranks._group.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks._elastic.membership_store import MembershipStore
    from allranks._engines.base import Engine
    from allranks._rendezvous.rendezvous import Member

__all__ = ["BEFORE_THE_LOOP", "LOOP", "OVER", "join_elastic"]

BEFORE_THE_LOOP = -2
"""Progress of a process before the loop: this value minus the number of calls that it has made."""


FIRST = "first"
"""Key in the membership table of the decision about the first processes."""

LOOP = "loop"
"""Key of a training loop that all ranks have entered, so the calls before it are recorded.

Its value is that of ``Proposal.replica``.
"""

OVER = "over"
"""Key of a training whose loop of epochs has finished. Its value is empty if another loop has begun."""

_ALL_CALLS = 1 << 30  # more calls than any program makes before the loop
_WAIT_S = 0.1  # seconds between two checks whether the loop has begun


def join_elastic(membership: MembershipStore, backend: str, name: str, timeout_s: float) -> ProcessGroup:
    """Join the world of an elastic job.

    The first processes connect immediately. A process that takes over a rank slot later connects when it reaches a call
    that the others have not made yet, or the loop. A process with a new slot waits until the loop begins.

    Raises:
        ExcludedError: This process joined later than the others, and they have finished.
    """
    history = GroupHistory(
        membership, f"{membership.prefix}world/", backend, name, timeout_s, membership.me.rank, [], replaces=True
    )
    # The replay log is complete only after all first ranks have entered the loop.
    if _joins_later(membership):
        _await_loop(membership)
    latest, first = membership.read(LATEST), membership.read(FIRST)
    found: NextGeneration | Decision
    # No decision exists: the first processes have not met yet, and this process takes part in generation 1.
    if latest is None:
        found = history.connect_next_generation(
            lambda missing: frozenset(), progress=BEFORE_THE_LOOP, replaces=True, waits=False
        )
    else:
        found = msgspec.msgpack.decode(latest, type=Decision)
        # Follow the latest generation, so that the next proposal of this process is written under the right number.
        history.begin(found)
    if isinstance(found, NextGeneration):
        # One writer is enough: the decision is the same on all ranks. FIRST stays unchanged in later generations.
        if found.rank == 0:
            decided = msgspec.msgpack.encode(found.decision)
            membership.write(FIRST, decided)
            membership.write(LATEST, decided)
        return _WorldBeforeLoop(membership, history, found.members, found.rank).make(backend, found.engine)
    # The recorded calls contain the ranks and sizes of the first generation, so use its members.
    if first is not None:
        found = msgspec.msgpack.decode(first, type=Decision)
    members = [proposal.member for proposal in found.proposals]
    slots = [member.rank for member in members]
    rank = slots.index(membership.me.rank) if membership.me.rank in slots else _rank_of_newcomer(membership, len(slots))
    return _WorldBeforeLoop(membership, history, members, rank).make(backend, None)


def _rank_of_newcomer(membership: MembershipStore, ranks: int) -> int:
    replica = int(membership.read(LOOP) or 1)
    return ranks - replica + membership.me.rank % replica


def _joins_later(membership: MembershipStore) -> bool:
    table = membership.table()
    slot = table.find(membership.me.rank) if table is not None else None
    return slot is not None and slot.state == OPTIONAL


def _await_loop(membership: MembershipStore) -> None:
    """Wait until the training loop of the other processes has begun."""
    while membership.read(LOOP) is None:
        table = membership.table()
        assert table is not None
        # Without this check, a process that joins after the end would wait for a loop that never begins.
        if membership.read(OVER) or all(slot.state in (GONE, OPTIONAL) for slot in table.slots):
            raise ExcludedError(
                f"rank {membership.me.rank} cannot join: all other ranks had exited before this process could join.\n"
                "  Ignore this error if the other ranks have exited with code 0. Otherwise restart the job."
            )
        time.sleep(_WAIT_S)


class _WorldBeforeLoop:
    """A world before the loop: supplies its `ReplayEngine` with the operations that it needs.

    Args:
        membership: The membership table of the job.
        history: The group history of the world.
        members: The processes that joined first, by rank. Their ``rank`` attribute is their rank slot.
        rank: The rank of this process before the loop.
    """

    def __init__(
        self, membership: MembershipStore, history: GroupHistory, members: Sequence[Member], rank: int
    ) -> None:
        self._membership = membership
        self._history = history
        self._rank = rank
        # Own slot first: the log of the predecessor has precedence over the logs of other ranks.
        self._slots = [members[rank].rank, *(member.rank for n, member in enumerate(members) if n != rank)]
        self._members = with_world_ranks([membership.me if n == rank else member for n, member in enumerate(members)])
        self._group: ElasticWorld | None = None

    def make(self, backend: str, engine: Engine | None) -> ProcessGroup:
        membership, history = self._membership, self._history
        replay = ReplayEngine(
            backend, engine, lambda entry: membership.append(f"replay/{self._slots[0]}", entry), self._renew, self._read
        )
        self._group = ElasticWorld(replay, history.name, self._rank, self._members, history.timeout_s)
        self._group.history = history
        # The program builds its shards for this number, which determines the position in a replica from now on.
        history.place = self._rank
        # Sorted, because EarlyGroups looks slots up by rank, and self._slots begins with the own slot.
        self._group.early = EarlyGroups(self._group, history, sorted(self._slots))
        return self._group

    def _read(self) -> list[bytes]:
        return [self._membership.read(f"replay/{slot}") or b"" for slot in self._slots]

    def _renew(self, replay: ReplayEngine) -> tuple[Engine, int]:
        group, history, old = self._group, self._history, replay.engine
        assert group is not None
        # The ranks that `old.lost()` returns refer to the ended generation. `connect_next_generation` replaces
        # history.members.
        before = list(history.members)
        if old is not None:
            old.abort()  # other ranks may wait for this rank in a call
        group.early.abort()
        next_generation = history.connect_next_generation(
            lambda missing: frozenset(before[rank] for rank in (old.lost() if old is not None else ())),
            # More calls give a lower value. All of them are below NEWCOMER (-1), which marks a process that has no
            # state in the loop.
            progress=BEFORE_THE_LOOP - replay.calls,
            replaces=True,
        )
        assert isinstance(next_generation, NextGeneration)
        # Close only after the decision. Until then, the detector reads the losses of the old engine.
        if old is not None:
            old.close()
        proposals = next_generation.decision.proposals
        if len(proposals) != group.size():
            next_generation.engine.close()
            raise AllranksError(
                f"rank {group.rank()}: {len(proposals)} of {group.size()} ranks remain before the training loop,"
                " where ranks cannot be renumbered.\n  Restart the job (automatic with allranks run --restarts)."
            )
        # A call that any rank has completed must be replayed on the others: its peers do not make it again.
        calls_to_replay = max(BEFORE_THE_LOOP - proposal.progress for proposal in proposals)
        # Processes with more progress have made all calls before the loop, and have the state.
        if any(proposal.progress > BEFORE_THE_LOOP for proposal in proposals):
            group.entered, calls_to_replay = next_generation.decision, _ALL_CALLS
        # A process that starts later begins with this generation instead of the first one.
        if next_generation.rank == 0:
            self._membership.write(LATEST, msgspec.msgpack.encode(next_generation.decision))
        group.meet_again(with_world_ranks(next_generation.members), next_generation.engine)
        return next_generation.engine, calls_to_replay
