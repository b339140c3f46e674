"""The world of an elastic job, until its training loop begins: of its first processes, and of one that takes a seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import AllranksError
from allranks._engines.prelude import Prelude
from allranks._group.process_group import ProcessGroup
from allranks._group.succession import Lineage, Successor
from allranks._group.survival import LATEST, numbered
from allranks._rendezvous.succession import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks._engines.base import Engine
    from allranks._rendezvous.board import Board
    from allranks._rendezvous.rendezvous import Member

__all__ = ["BEFORE_THE_LOOP", "join_elastic"]

BEFORE_THE_LOOP = -2
"""The progress of a process before the loop: this, less the number of the calls that it has made."""


ALL = 1 << 30  # calls before the loop


def join_elastic(board: Board, backend: str, name: str, timeout_s: float) -> ProcessGroup:
    """The world of an elastic job.

    The first processes meet. A process that takes a seat later is not connected before it comes to a call that the
    others have not made yet, or to the loop.
    """
    lineage = Lineage(board, f"{board.prefix}world/", backend, name, timeout_s, board.me.rank, [], replaces=True)
    latest = board.read(LATEST)
    found: Successor | Decision
    if latest is None:
        found = lineage.succeed(frozenset, progress=BEFORE_THE_LOOP, replaces=True, waits=False)
    else:
        found = msgspec.msgpack.decode(latest, type=Decision)
        lineage.begin(found)
    if isinstance(found, Successor):
        rank, members, engine = found.rank, list(found.members), found.engine
        if rank == 0:
            board.write(LATEST, msgspec.msgpack.encode(found.decision))
    else:
        others = [claim.member for claim in found.claims if claim.seat != board.me.rank]
        members = sorted([*others, board.me], key=lambda member: member.rank)
        rank, engine = members.index(board.me), None
    return _Beginning(board, lineage, members).make(backend, engine, rank)


class _Beginning:
    """A world before the loop: what its `Prelude` needs."""

    def __init__(self, board: Board, lineage: Lineage, members: Sequence[Member]) -> None:
        self._board = board
        self._lineage = lineage
        self._seats = [board.me.rank, *(member.rank for member in members if member.rank != board.me.rank)]
        self._members = numbered(members)
        self._group: ProcessGroup | None = None

    def make(self, backend: str, engine: Engine | None, rank: int) -> ProcessGroup:
        board, lineage = self._board, self._lineage
        prelude = Prelude(
            backend, engine, lambda entry: board.append(f"prelude/{board.me.rank}", entry), self._renew, self._read
        )
        self._group = ProcessGroup(prelude, lineage.name, rank, self._members, lineage.timeout_s)
        self._group.lineage = lineage
        return self._group

    def _read(self) -> list[bytes]:
        return [self._board.read(f"prelude/{seat}") or b"" for seat in self._seats]

    def _renew(self, prelude: Prelude) -> tuple[Engine, int]:
        group, lineage, old = self._group, self._lineage, prelude.engine
        assert group is not None
        before = list(lineage.members)
        if old is not None:
            old.abort()  # others may wait for this rank in a call
        found = lineage.succeed(
            lambda: frozenset(before[rank] for rank in (old.lost() if old is not None else ())),
            progress=BEFORE_THE_LOOP - prelude.calls,
            replaces=True,
        )
        assert isinstance(found, Successor)
        if old is not None:
            old.close()
        claims = found.decision.claims
        if len(claims) != group.size():
            found.engine.close()
            raise AllranksError(
                f"rank {group.rank()}: {len(claims)} of {group.size()} ranks are left before the training loop, where"
                " ranks cannot be numbered anew.\n  Start the job again (allranks run --restarts does so by itself)"
            )
        made = max(BEFORE_THE_LOOP - claim.progress for claim in claims)
        if any(claim.progress > BEFORE_THE_LOOP for claim in claims):  # those have made all calls, and have the state
            group.entered, made = found.decision, ALL
        if found.rank == 0:
            self._board.write(LATEST, msgspec.msgpack.encode(found.decision))
        group.meet_again(numbered(found.members), found.engine)
        return found.engine, made
