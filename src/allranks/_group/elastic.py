"""The world of an elastic job: of its first processes, and of one that takes a lost rank's seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from allranks._engines.prelude import Recorder, Replayer, decode
from allranks._group.process_group import ProcessGroup
from allranks._group.succession import Lineage, Successor
from allranks._group.survival import LATEST, numbered
from allranks._rendezvous.succession import Decision

if TYPE_CHECKING:
    from allranks._rendezvous.board import Board

__all__ = ["join_elastic"]


def join_elastic(board: Board, backend: str, name: str, timeout_s: float) -> ProcessGroup:
    """The world of an elastic job.

    The first processes meet, and record what their calls give until the training loop begins. A process that takes a
    seat later is given that record, and connects when it reaches the loop (``_engines/prelude``).
    """
    lineage = Lineage(board, f"{board.prefix}world/", backend, name, timeout_s, board.me.rank, [])
    latest = board.read(LATEST)
    if latest is None:
        found = lineage.succeed(frozenset, progress=-1, replaces=True, waits=False)
        if isinstance(found, Successor):
            group = ProcessGroup(Recorder(found.engine), name, found.rank, numbered(found.members), timeout_s)
            group.lineage = lineage
            if found.rank == 0:
                board.write(LATEST, msgspec.msgpack.encode(found.decision))
            return group
    else:
        found = msgspec.msgpack.decode(latest, type=Decision)
        lineage.begin(found)
    others = [claim.member for claim in found.claims if claim.seat != board.me.rank]
    members = sorted([*others, board.me], key=lambda member: member.rank)
    record = board.read(f"prelude/{board.me.rank}")
    entries = [] if record is None else decode(record)
    group = ProcessGroup(Replayer(backend, entries), name, members.index(board.me), numbered(members), timeout_s)
    group.lineage = lineage
    return group
