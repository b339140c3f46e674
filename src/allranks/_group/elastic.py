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
from allranks._engines.prelude import Prelude
from allranks._group.early import EarlyGroups
from allranks._group.process_group import ProcessGroup
from allranks._group.succession import Lineage, Successor
from allranks._group.survival import LATEST, numbered
from allranks._rendezvous.seats import GONE, OPTIONAL
from allranks._rendezvous.succession import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks._engines.base import Engine
    from allranks._rendezvous.board import Board
    from allranks._rendezvous.rendezvous import Member

__all__ = ["BEFORE_THE_LOOP", "LOOP", "OVER", "join_elastic"]

BEFORE_THE_LOOP = -2
"""Progress of a process before the loop: this value minus the number of calls that it has made."""


FIRST = "first"
"""Key in the membership table of the decision about the first processes."""

LOOP = "loop"
"""Key of a training loop that all ranks have entered, so the calls before it are recorded.

Its value is that of ``Claim.replica``.
"""

OVER = "over"
"""Key of a training whose loop of epochs has finished. Its value is empty if another loop has begun."""

ALL = 1 << 30  # more calls than any program makes before the loop
_WAIT_S = 0.1  # seconds between two checks whether the loop has begun


def join_elastic(board: Board, backend: str, name: str, timeout_s: float) -> ProcessGroup:
    """Join the world of an elastic job.

    The first processes connect immediately. A process that takes over a rank slot later connects when it reaches a call
    that the others have not made yet, or the loop. A process with a new slot waits until the loop begins.

    Raises:
        ExcludedError: This process joined later than the others, and they have finished.
    """
    lineage = Lineage(board, f"{board.prefix}world/", backend, name, timeout_s, board.me.rank, [], replaces=True)
    if _comes_later(board):
        _await_loop(board)
    latest, first = board.read(LATEST), board.read(FIRST)
    found: Successor | Decision
    if latest is None:
        found = lineage.succeed(lambda missing: frozenset(), progress=BEFORE_THE_LOOP, replaces=True, waits=False)
    else:
        found = msgspec.msgpack.decode(latest, type=Decision)
        lineage.begin(found)
    if isinstance(found, Successor):
        if found.rank == 0:
            decided = msgspec.msgpack.encode(found.decision)
            board.write(FIRST, decided)
            board.write(LATEST, decided)
        return _Beginning(board, lineage, found.members, found.rank).make(backend, found.engine)
    if first is not None:
        found = msgspec.msgpack.decode(first, type=Decision)
    members = [claim.member for claim in found.claims]
    seats = [member.rank for member in members]
    rank = seats.index(board.me.rank) if board.me.rank in seats else _place_of_a_newcomer(board, len(seats))
    return _Beginning(board, lineage, members, rank).make(backend, None)


def _place_of_a_newcomer(board: Board, ranks: int) -> int:
    replica = int(board.read(LOOP) or 1)
    return ranks - replica + board.me.rank % replica


def _comes_later(board: Board) -> bool:
    table = board.table()
    seat = table.find(board.me.rank) if table is not None else None
    return seat is not None and seat.state == OPTIONAL


def _await_loop(board: Board) -> None:
    """Wait until the training loop of the other processes has begun."""
    while board.read(LOOP) is None:
        table = board.table()
        assert table is not None
        if board.read(OVER) or all(seat.state in (GONE, OPTIONAL) for seat in table.seats):
            raise ExcludedError(f"rank {board.me.rank}: the others had ended when this process came to join them")
        time.sleep(_WAIT_S)


class _Beginning:
    """A world before the loop: supplies its `Prelude` with the operations that it needs.

    Args:
        board: The membership table of the job.
        lineage: The group history of the world.
        members: The processes that joined first, by rank. Their ``rank`` attribute is their rank slot.
        rank: The rank of this process before the loop.
    """

    def __init__(self, board: Board, lineage: Lineage, members: Sequence[Member], rank: int) -> None:
        self._board = board
        self._lineage = lineage
        self._rank = rank
        self._seats = [members[rank].rank, *(member.rank for n, member in enumerate(members) if n != rank)]
        self._members = numbered([board.me if n == rank else member for n, member in enumerate(members)])
        self._group: ProcessGroup | None = None

    def make(self, backend: str, engine: Engine | None) -> ProcessGroup:
        board, lineage = self._board, self._lineage
        prelude = Prelude(
            backend, engine, lambda entry: board.append(f"prelude/{self._seats[0]}", entry), self._renew, self._read
        )
        self._group = ProcessGroup(prelude, lineage.name, self._rank, self._members, lineage.timeout_s)
        self._group.lineage = lineage
        lineage.place = self._rank
        self._group.early = EarlyGroups(self._group, lineage, sorted(self._seats))
        return self._group

    def _read(self) -> list[bytes]:
        return [self._board.read(f"prelude/{seat}") or b"" for seat in self._seats]

    def _renew(self, prelude: Prelude) -> tuple[Engine, int]:
        group, lineage, old = self._group, self._lineage, prelude.engine
        assert group is not None
        before = list(lineage.members)
        if old is not None:
            old.abort()  # other ranks may wait for this rank in a call
        assert group.early is not None
        group.early.abort()
        found = lineage.succeed(
            lambda missing: frozenset(before[rank] for rank in (old.lost() if old is not None else ())),
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
        # Processes with more progress have made all calls before the loop, and have the state.
        if any(claim.progress > BEFORE_THE_LOOP for claim in claims):
            group.entered, made = found.decision, ALL
        if found.rank == 0:
            self._board.write(LATEST, msgspec.msgpack.encode(found.decision))
        group.meet_again(numbered(found.members), found.engine)
        return found.engine, made
