"""Recovery of a group after a loss: an agreement that a loss cannot interrupt, and the group of the remaining ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import UsageError
from allranks._base.integers import integer_of
from allranks._call.types import ReduceOp
from allranks._engines.prelude import LOSSES
from allranks._group.succession import Lineage, Successor, no_board
from allranks._rendezvous.succession import Sighting, Vote

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup
    from allranks._rendezvous.rendezvous import Member

__all__ = ["LATEST", "advance", "agree", "numbered", "shrink"]

# Seconds that this process waits for a rank before it queries the host of that rank: at first, and at most.
_ASK_S = (0.2, 1.0)

LATEST = "latest"
"""Key in the membership table of the decision about the latest generation of an elastic world."""


def agree(group: ProcessGroup, value: int) -> int:
    """See ``ProcessGroup.agree``."""
    if not 0 <= value < 1 << 63:
        raise UsageError(f"agree: expected a whole number from 0 to 2**63 - 1, not {value!r}")
    if group.size() == 1:
        return int(value)
    lineage = group.lineage
    try:
        outcome = _least(group, value)
    except LOSSES as error:
        if lineage is None:
            raise no_board(group.name, "agree", group._reconfigured) from error
        lineage.vote = msgspec.structs.replace(lineage.vote, value=int(value))
        decision = lineage.decide(_Look(group, lineage), replaces=lineage.replaces)
        lineage.vote = Vote(decision.ended, decision.outcome)
        return decision.outcome
    if lineage is not None:
        lineage.vote = Vote(lineage.vote.ended + 1, outcome)
    return outcome


def shrink(group: ProcessGroup, ranks_to_exclude: Sequence[int], timeout_s: float | None) -> ProcessGroup:
    """See ``ProcessGroup.shrink``."""
    lineage = _lineage(group, "shrink")
    without = []
    for rank in ranks_to_exclude:
        number = integer_of(rank)
        if number is None or not 0 <= number < group.size():
            raise UsageError(
                f"shrink: {rank!r} is not a rank of group '{group.name}': expected 0 to {group.size() - 1}"
            )
        without.append(lineage.members[number][0])
    world_ranks = {seat: member for (seat, _), member in zip(lineage.members, group.members, strict=True)}
    successor = _succeed(group, lineage, without=without, timeout_s=timeout_s)
    members = [world_ranks[claim.seat] for claim in successor.decision.claims]
    made = group.successor(successor.engine, successor.rank, members)
    if group.register is not None:
        group.register(made)
    return made


def advance(group: ProcessGroup, *, progress: int, replaces: bool, timeout_s: float | None = None) -> Successor:
    """Move the world to its next generation, in place: the same object with other ranks.

    Args:
        group: The world.
        progress: The progress of this process's program. ``NEWCOMER``: it is new.
        replaces: Wait for processes that take lost rank slots, and accept newcomers.
        timeout_s: Seconds to wait for ranks that are not known to be lost.
    """
    lineage = _lineage(group, "go on after a loss")
    group.abort()  # whatever the cause of this call: other ranks may wait for this rank in a call
    successor = _succeed(group, lineage, progress=progress, replaces=replaces, timeout_s=timeout_s)
    group._become(successor.engine, successor.rank, numbered(successor.members))
    if successor.rank == 0 and lineage.board.launched:
        lineage.board.write(LATEST, msgspec.msgpack.encode(successor.decision))
    return successor


def numbered(members: Sequence[Member]) -> list[Member]:
    """Return these processes as the members of a world, by rank."""
    return [msgspec.structs.replace(m, rank=rank, world_size=len(members)) for rank, m in enumerate(members)]


def _succeed(
    group: ProcessGroup,
    lineage: Lineage,
    *,
    without: Sequence[int] = (),
    progress: int = 0,
    replaces: bool = False,
    timeout_s: float | None = None,
) -> Successor:
    if group.failed_ranks():
        group.abort()  # for ranks that are in a call and have not detected the loss
    successor = lineage.succeed(
        _Look(group, lineage), without=without, progress=progress, replaces=replaces, timeout_s=timeout_s
    )
    assert isinstance(successor, Successor)
    return successor


def _lineage(group: ProcessGroup, call: str) -> Lineage:
    if group.lineage is None:
        raise no_board(group.name, call, group._reconfigured)
    return group.lineage


class _Look:
    """Detection of lost members by this process.

    The first rank of each host reports the deaths on its host. If that rank has died, no rank reports them, and a
    missing rank may have died with it. This process therefore queries the host of a missing rank. It does not if a
    launcher detects all exits.
    """

    def __init__(self, group: ProcessGroup, lineage: Lineage) -> None:
        self._group = group
        # These are the members of the generation that has ended, also while the next generations are created.
        self._members = list(lineage.members)
        self._asks = not lineage.board.launched
        self._gone: set[tuple[int, int]] = set()
        self._pause_s = _ASK_S[0]
        self._ask_at = time.monotonic() + self._pause_s

    def __call__(self, missing: Sequence[tuple[int, int]]) -> Sighting:
        seen = {self._members[rank] for rank in self._group.failed_ranks()}
        if self._asks and time.monotonic() >= self._ask_at:
            suspects = [rank for rank, each in enumerate(self._members) if each in missing and each not in seen]
            self._gone |= {self._members[rank] for rank in self._group.engine.find_gone(suspects)}
            self._pause_s = min(2 * self._pause_s, _ASK_S[1])
            self._ask_at = time.monotonic() + self._pause_s
        return frozenset(seen | self._gone)


def _least(group: ProcessGroup, value: int) -> int:
    ballot = group.ballot()
    ballot.fill_(value)
    group.all_reduce(ballot, ReduceOp.MIN)
    return int(ballot)
