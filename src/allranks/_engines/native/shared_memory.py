"""Memory of each rank that the other ranks of its host map, for ``empty_shared`` and for windows.

Each exchange is a collective with a vote: if one rank fails, all ranks raise.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import AllranksError, MismatchError, rank_list
from allranks._base.forks import Descriptor, guard
from allranks._call.bytes import bytes_of
from allranks._call.purpose import part_of
from allranks._call.work import Work
from allranks._engines.native.connect import OFFER_BYTES, SegmentExchange
from allranks._engines.native.window_memory import Allocation, map_memory

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["SharedMemory"]

_SIZE = struct.Struct("!Q")
# Seconds, for ranks that are all present; ranks that give up earlier wait for the others in the next vote.
_MEETING_S = 20.0


class SharingEngine(Protocol):
    """The part of an engine with which its ranks exchange memory."""

    rank: int
    members: Sequence[Member]
    group_name: str
    timeout_s: float
    comm: _core.Comm

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        """See ``Engine``."""
        ...

    def explain(self, failure: _core.Failure, verb: str) -> AllranksError:
        """Return the error of a failure of the core."""
        ...


class SharedMemory:
    """The exchange of memory between the ranks of a group.

    Args:
        engine: The engine of the group.
        host_of: The number of the host of each rank.
    """

    def __init__(self, engine: SharingEngine, host_of: Sequence[int]) -> None:
        self._engine = engine
        self._host_of = host_of

    def empty_shared(self, nbytes: int) -> Tensor | None:
        """Return bytes that all ranks map at the same time. None: each rank uses private memory. Collective."""
        failure = f"{nbytes} bytes could not be allocated on every rank: "
        if len(set(self._host_of)) > 1:
            # One vote only: hosts share no memory, so the block is ordinary memory of this rank.
            self._compare_sizes(self._vote("empty_shared", _SIZE.pack(nbytes), "", failure))
            return None
        # If one rank fails, all ranks still take part in both votes, so that all of them get the failure.
        offer, refused = None, ""
        try:
            # At most half the timeout: ranks that failed earlier already wait in the next vote, with the whole timeout.
            offer = SegmentExchange(Descriptor.of(lambda: _core.create_memory(nbytes))) if nbytes else None
        except (OSError, _core.Failure) as error:
            refused = self._in_words(error)
        record = offer.record if offer else bytes(OFFER_BYTES)
        rows = self._vote("empty_shared", _SIZE.pack(nbytes) + record, refused, failure)
        self._compare_sizes(rows)
        # Block 0 denotes private memory (docs/decisions/014), so the number must not be 0.
        if offer is None:
            return None
        records = [row[_SIZE.size :] for row in rows]
        block = None
        try:
            with offer:
                parts, sockets = offer.meet(self._engine.rank, records, min(self._engine.timeout_s / 2, _MEETING_S))
            for socket in sockets:
                if socket is not None:
                    socket.close()
            # Rank 0's name is random, and the same on all connected ranks, so it can identify the block.
            # No fork while the descriptors have no owner: the child would inherit them.
            with guard:
                taken = [part.detach() for part in parts]
                block = self._engine.comm.share(int.from_bytes(records[0][:8], "big") | 1, nbytes, taken)
        # This all_gather compares the calls of all ranks, so a rank that makes another call gets a mismatch error.
        except (OSError, AllranksError, _core.Failure) as error:
            refused = self._in_words(error)
        self._vote("empty_shared", b"", refused, failure)
        assert block is not None
        memory = (ctypes.c_ubyte * nbytes).from_address(block.address)
        memory.block = block  # type: ignore[attr-defined]  # the block lives as long as a tensor on it does
        return torch.frombuffer(memory, dtype=torch.uint8)

    def exchange(
        self, call: str, memory: Allocation | None, record: bytes, refused: str
    ) -> list[tuple[bytes, Tensor | None]]:
        """Map the memory of every rank of this host. Collective.

        Args:
            call: The user's call, in errors.
            memory: The memory of this rank. None: it has none to share.
            record: Further data for the other ranks, the same number of bytes on all ranks.
            refused: Why this rank cannot take part. The call then fails on all ranks.

        Returns:
            By rank: its record and its memory. None: the rank is on another host, or has no memory to share.
        """
        # As in empty_shared: if one rank fails, all ranks take part in both votes.
        offer, failure = None, refused
        nbytes = memory.nbytes if memory is not None else 0
        try:
            # One byte stands for no memory, because the exchange is a collective of all ranks of the host.
            offer = SegmentExchange(
                Descriptor.of(lambda: os.dup(memory.memory.fileno()) if memory else _core.create_memory(1))
            )
        except (OSError, _core.Failure) as error:
            failure = failure or f"the memory cannot be shared: {self._in_words(error)}"
        mine = _SIZE.pack(nbytes) + (offer.record if offer else bytes(OFFER_BYTES)) + record
        try:
            rows = self._vote(call, mine, failure)
        except BaseException:
            if offer is not None:
                with offer:  # closes the descriptors
                    pass
            raise
        assert offer is not None
        made: dict[int, Tensor | None] = {}
        try:
            with offer:
                near = [r for r, host in enumerate(self._host_of) if host == self._host_of[self._engine.rank]]
                offers = [rows[r][_SIZE.size : _SIZE.size + OFFER_BYTES] for r in near]
                parts, sockets = offer.meet(
                    near.index(self._engine.rank), offers, min(self._engine.timeout_s / 2, _MEETING_S), near
                )
            for socket in sockets:
                if socket is not None:
                    socket.close()
            for r, part in zip(near, parts, strict=True):
                size = _SIZE.unpack_from(rows[r])[0]
                made[r] = map_memory(part, size)
        except (OSError, AllranksError, _core.Failure) as error:
            failure = f"the memory of another rank cannot be mapped: {self._in_words(error)}"
        self._vote(call, b"", failure)
        return [(row[_SIZE.size + OFFER_BYTES :], made.get(r)) for r, row in enumerate(rows)]

    def _vote(self, call: str, record: bytes, refused: str, failure: str = "") -> list[bytes]:
        """Return the records of all ranks, which also compare the call. Raise on every rank if any rank has failed.

        ``failure``: the beginning of the error. ``refused``: why this rank has failed.
        """
        engine, mine = self._engine, bytes([not refused]) + record
        rows = torch.empty(len(engine.members), len(mine), dtype=torch.uint8, device="cpu")
        with part_of(call):
            engine.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8), False)
        votes = [bytes_of(row) for row in rows]
        if failed := [r for r, vote in enumerate(votes) if not vote[0]]:
            reason = refused or f"see the error of {rank_list(failed)}"
            raise AllranksError(
                f"{call} on group '{engine.group_name}' (rank {engine.rank} of {len(engine.members)}):"
                f" {failure}{reason}"
            )
        return [vote[1:] for vote in votes]

    def _compare_sizes(self, rows: Sequence[bytes]) -> None:
        asked = [_SIZE.unpack_from(row)[0] for row in rows]
        if len(set(asked)) > 1:
            sizes = ", ".join(f"rank {r}: {n}" for r, n in enumerate(asked))
            raise MismatchError(
                f"empty_shared on group '{self._engine.group_name}': the ranks requested different sizes (bytes):"
                f" {sizes}"
            )

    def _in_words(self, error: Exception) -> str:
        return str(self._engine.explain(error, "empty_shared") if isinstance(error, _core.Failure) else error)
