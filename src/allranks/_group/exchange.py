"""Exchange of records among the members of a new group, through an existing group. It needs no store."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from allranks._call.bytes import bytes_of

if TYPE_CHECKING:
    from allranks._group.communicator import Communicator

__all__ = ["exchange_locally", "gather_rows"]


def gather_rows(parent: Communicator, row: bytes) -> list[bytes]:
    """Give every rank of a group the rows of all ranks, by rank. All rows have the same length."""
    import torch

    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(parent.device)
    rows = mine.new_empty(parent.size() * len(row))
    parent.all_gather(rows, mine)
    data = bytes_of(rows)
    return [data[i : i + len(row)] for i in range(0, len(data), len(row))]


def exchange_locally(world: Communicator, members: list[int], record: bytes) -> list[bytes]:
    """Exchange records among the members only: the first member collects them and sends all of them back."""
    import torch

    # One of the highest 65536 tags, derived from the members, so that different groups rarely share a tag.
    tag = world.highest_tag - int.from_bytes(hashlib.sha256(repr(members).encode()).digest()[:2], "big")
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(world.device)
    rows = mine.new_empty(len(members), len(record))
    first, *others = members
    # The first member receives everything before it sends, and the others send first. No two ranks can therefore wait
    # for each other.
    if world.rank() == first:
        rows[0] = mine
        for i, other in enumerate(others, 1):
            world.recv(rows[i], other, tag)
        for other in others:
            world.send(rows, other, tag)
    else:
        world.send(mine, first, tag)
        world.recv(rows, first, tag)
    return [bytes_of(row) for row in rows]
