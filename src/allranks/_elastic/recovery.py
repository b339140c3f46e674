"""Recovery of a group after a loss: an agreement that a loss cannot interrupt, and the group of the remaining ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import UsageError
from allranks._base.integers import integer_of
from allranks._call.types import ReduceOp
from allranks._elastic.history import GroupHistory, NextGeneration, no_membership_store
from allranks._elastic.membership_change import LostMembers, Vote
from allranks._elastic.replay import LOSSES

if TYPE_CHECKING:
    from allranks._group.base import BaseGroup
    from allranks._group.communicator import Communicator
    from allranks._rendezvous.rendezvous import Member

__all__ = ["LATEST", "advance", "agree", "with_world_ranks", "shrink"]

# Seconds that this process waits for a rank before it queries the host of that rank: at first, and at most.
_QUERY_PAUSE_S = (0.2, 1.0)

LATEST = "latest"
"""Key in the membership table of the decision about the latest generation of an elastic world."""


def agree(group: Communicator, value: int) -> int:
    """See ``ProcessGroup.agree``."""
    if not 0 <= value < 1 << 63:
        raise UsageError(f"agree: expected a whole number from 0 to 2**63 - 1, not {value!r}")
    if group.size() == 1:
        return int(value)
    history = group.history
    try:
        outcome = _minimum(group, value)
    except LOSSES as error:
        if history is None:
            raise no_membership_store(group.name, "agree", group.reconfigured) from error
        # The value travels in the proposal, so the decision can complete the agreement that the loss has interrupted.
        history.vote = msgspec.structs.replace(history.vote, value=int(value))
        # `decided` stays set: the group is broken, and the next recovery follows the same decision.
        decision = history.decide(_Detector(group, history), replaces=history.replaces)
        history.vote = Vote(decision.ended, decision.outcome)
        return decision.outcome
    if history is not None:
        # Count successful agreements, too: the call may have failed on another rank, which then needs this outcome.
        history.vote = Vote(history.vote.ended + 1, outcome)
    return outcome


def shrink(
    group: BaseGroup, ranks_to_exclude: Sequence[int], timeout_s: float | None
) -> tuple[NextGeneration, list[Member]]:
    """Return the next generation of a group, and its members, by rank, with their ranks in the world.

    See ``ProcessGroup.shrink``.
    """
    history = history_of(group, "shrink")
    without = []
    for rank in ranks_to_exclude:
        number = integer_of(rank)
        if number is None or not 0 <= number < group.size():
            raise UsageError(
                f"shrink: {rank!r} is not a rank of group '{group.name}': expected 0 to {group.size() - 1}"
            )
        without.append(history.members[number][0])
    # Before the change: history.members and group.members must describe the same generation here.
    world_ranks = {slot: member for (slot, _), member in zip(history.members, group.members, strict=True)}
    next_generation = _connect_next_generation(group, history, without=without, timeout_s=timeout_s)
    return next_generation, [world_ranks[proposal.slot] for proposal in next_generation.decision.proposals]


def advance(group: BaseGroup, *, progress: int, replaces: bool, timeout_s: float | None = None) -> NextGeneration:
    """Move the world to its next generation, in place: the same object with other ranks.

    Args:
        group: The world.
        progress: The progress of this process's program. ``NEWCOMER``: it is new.
        replaces: Wait for processes that take lost rank slots, and accept newcomers.
        timeout_s: Seconds to wait for ranks that are not known to be lost.
    """
    history = history_of(group, "recovery after a loss")
    group.abort()  # whatever the cause of this call: other ranks may wait for this rank in a call
    next_generation = _connect_next_generation(
        group, history, progress=progress, replaces=replaces, timeout_s=timeout_s
    )
    group._become(next_generation.engine, next_generation.rank, with_world_ranks(next_generation.members))
    # After `_become`, so a replacement process that reads the key finds a generation that has connected.
    if next_generation.rank == 0 and history.membership.launched:
        history.membership.write(LATEST, msgspec.msgpack.encode(next_generation.decision))
    return next_generation


def with_world_ranks(members: Sequence[Member]) -> list[Member]:
    """Return these processes as the members of a world, by rank."""
    return [msgspec.structs.replace(m, rank=rank, world_size=len(members)) for rank, m in enumerate(members)]


def _connect_next_generation(
    group: BaseGroup,
    history: GroupHistory,
    *,
    without: Sequence[int] = (),
    progress: int = 0,
    replaces: bool = False,
    timeout_s: float | None = None,
) -> NextGeneration:
    if group.failed_ranks():
        group.abort()  # for ranks that are in a call and have not detected the loss
    next_generation = history.connect_next_generation(
        _Detector(group, history), without=without, progress=progress, replaces=replaces, timeout_s=timeout_s
    )
    assert isinstance(next_generation, NextGeneration)
    return next_generation


def history_of(group: BaseGroup, call: str) -> GroupHistory:
    """Return the history of a group.

    Raises:
        UsageError: It has none. The message names ``call``.
    """
    if group.history is None:
        raise no_membership_store(group.name, call, group.reconfigured)
    return group.history


class _Detector:
    """Detection of lost members by this process.

    The first rank of each host reports the deaths on its host. If that rank has died, no rank reports them, and a
    missing rank may have died with it. This process therefore queries the host of a missing rank. It does not if a
    launcher detects all exits.
    """

    def __init__(self, group: BaseGroup, history: GroupHistory) -> None:
        self._group = group
        # These are the members of the generation that has ended, also while the next generations are created.
        self._members = list(history.members)
        self._queries_hosts = not history.membership.launched
        self._gone: set[tuple[int, int]] = set()
        self._pause_s = _QUERY_PAUSE_S[0]
        self._next_query_at = time.monotonic() + self._pause_s

    def __call__(self, missing: Sequence[tuple[int, int]]) -> LostMembers:
        seen = {self._members[rank] for rank in self._group.failed_ranks()}
        if self._queries_hosts and time.monotonic() >= self._next_query_at:
            # Query only ranks without a proposal: a rank that has written one is alive.
            suspects = [rank for rank, each in enumerate(self._members) if each in missing and each not in seen]
            self._gone |= {self._members[rank] for rank in self._group.engine.find_gone(suspects)}
            # Back off: each query is a connection attempt to a host that may not answer.
            self._pause_s = min(2 * self._pause_s, _QUERY_PAUSE_S[1])
            self._next_query_at = time.monotonic() + self._pause_s
        return frozenset(seen | self._gone)


def _minimum(group: Communicator, value: int) -> int:
    import torch  # late: a process without torch can describe groups

    ballot = torch.tensor([value], dtype=torch.int64, device=group.device)
    group.all_reduce(ballot, ReduceOp.MIN)
    return int(ballot)
