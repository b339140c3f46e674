"""Selection of the processes that form whole replicas of a model that spans several ranks. Pure functions.

A process keeps the position in a replica for which its program built the model, because its shards do not change. A
replica therefore consists of one process for each position. If a rank of a replica is lost, the rest of this replica
may be left over. These processes are not members. They wait, like newcomers, until a process with the missing position
joins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["ReplicaCandidate", "choose_members", "forms_replica"]


class ReplicaCandidate(Protocol):
    """A process that proposes itself for the next generation: a `membership_change.Proposal`."""

    @property
    def slot(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def replica(self) -> int: ...


_Candidate = TypeVar("_Candidate", bound=ReplicaCandidate)


def choose_members(proposals: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the members of the next generation, by rank.

    Consecutive ranks form a replica. The rank slots of one replica stay together if all of them are present, because
    they are on one host. Each position is given to at least one process that has the state, if such a process exists.

    Args:
        proposals: The proposals of the processes that have joined, by rank slot.

    Returns:
        All processes if each has the whole model, or if no process has the state. Also all of them if no whole replica
        can be formed; the program then reports the error.
    """
    # A newcomer may not know the size yet and reports 1, so the largest one counts.
    size = max((proposal.replica for proposal in proposals), default=1)
    full = [proposal for proposal in proposals if proposal.progress >= 0]
    # If no process has the state, the caller reports it as lost. Dropping processes here would hide that.
    if size == 1 or not full:
        return list(proposals)
    # Prefer replicas that keep their rank slots. If a position then has no process with the state, first form replicas
    # of processes with the state only.
    rows = _replicas([proposals], size)
    if {_place(proposal, size) for row in rows for proposal in row if proposal.progress >= 0} != set(range(size)):
        rows = _replicas([full, proposals], size)
    # Sort by rank slot, so that replicas that have not changed keep their order.
    return [proposal for row in sorted(rows, key=_slots) for proposal in row] or list(proposals)


def forms_replica(proposals: Sequence[ReplicaCandidate], size: int) -> bool:
    """Return whether these waiting processes include a whole replica."""
    return {_place(proposal, size) for proposal in proposals} == set(range(size))


def _replicas(pools: Sequence[Sequence[_Candidate]], size: int) -> list[list[_Candidate]]:
    """Form as many replicas as possible from the first pool, then from the rest together with the next pool."""
    rows: list[list[_Candidate]] = []
    for pool in pools:
        rest = [proposal for proposal in pool if not any(proposal in row for row in rows)]
        homes: dict[int, list[_Candidate]] = defaultdict(list)
        for proposal in rest:
            homes[proposal.slot // size].append(proposal)
        found = [home for home in homes.values() if len(home) == size and forms_replica(home, size)]
        rows += [sorted(home, key=lambda proposal: _place(proposal, size)) for home in found]
        left: list[list[_Candidate]] = [[] for _ in range(size)]
        # Processes with the state come first, so that newcomers are left over rather than processes with the state.
        for proposal in sorted(rest, key=lambda proposal: proposal.progress < 0):
            if not any(proposal in home for home in found):
                left[_place(proposal, size)].append(proposal)
        # zip stops at the position with the fewest processes. The others are left over.
        rows += [list(row) for row in zip(*left, strict=False)]
    return rows


def _place(proposal: ReplicaCandidate, size: int) -> int:
    return proposal.place % size


def _slots(row: Sequence[ReplicaCandidate]) -> list[int]:
    return [proposal.slot for proposal in row]
