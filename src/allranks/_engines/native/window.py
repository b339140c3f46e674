"""Memory that other ranks of the native engine read and write without a call of its owner.

Ranks of one host map each other's memory (``window_memory``). Ranks of other hosts are reached through connections
(``window_connections``). Signals are counters in shared memory, one per sender, in the memory of the rank that waits.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from allranks import _core
from allranks._base.errors import PeerLostError, TimeoutError
from allranks._engines.native.shared_memory import SharedMemory
from allranks._engines.native.window_connections import RequestKind, WindowConnection, WindowConnections
from allranks._engines.native.window_memory import allocate, allocation_of, bytes_of

__all__ = ["NativeWindow"]

_SLICE_S = 0.05  # seconds between two checks for lost ranks and signals of the system


class Region(NamedTuple):
    """The registered memory of a rank.

    Attributes:
        nbytes: Its size.
        view: Its bytes, if this process has mapped them: its rank is on the same host.
    """

    nbytes: int
    view: Tensor | None


class WindowGroup(Protocol):
    """The engine of the group of a window."""

    rank: int
    group_name: str
    timeout_s: float

    def check_open(self) -> None:
        """Raise if the group is closed."""
        ...

    def lost(self) -> Sequence[int]:
        """Return the ranks detected as lost."""
        ...


class NativeWindow:
    """A window of the native engine. See ``EngineWindow``.

    Attributes:
        number: The number of the window in its group.
    """

    def __init__(
        self,
        engine: WindowGroup,
        memory: SharedMemory,
        ranks: int,
        connections: WindowConnections | None,
        number: int,
    ) -> None:
        """Create a window. Collective."""
        self._engine, self._memory = engine, memory
        self._rank, self._ranks = engine.rank, ranks
        self._connections = connections
        self.number = number
        self._regions: list[Region] = []
        nbytes = self._ranks * _core.SIGNAL_BYTES
        counters = allocate(nbytes)
        made = memory.exchange("new_window", allocation_of(counters), b"", "")
        # Kept: the counters exist as long as these tensors.
        self._counters = [None if view is None else view for _, view in made]
        self._counters[self._rank] = counters
        self._consumed = [0] * self._ranks
        self._sent = [0] * self._ranks  # requests to each rank of another host, for the registered memory
        self._locks = [threading.Lock() for _ in range(self._ranks)]
        self._waits = [threading.Lock() for _ in range(self._ranks)]

    def register(self, tensor: Tensor | None, about: bytes, refused: str) -> list[bytes]:
        if tensor is None:  # raises on every rank, and leaves an existing registration unchanged
            self._memory.exchange("tensor_register", None, struct.pack("!QQ", 0, 0) + about, refused)
            raise AssertionError(refused)
        allocation = allocation_of(tensor)
        start, size = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        # For requests of other hosts.
        mine = bytes_of(tensor)
        if self._connections is not None:
            # Before the exchange: another rank may write as soon as it has returned there.
            self._connections.add(self.number, mine, self._ranks, self._count)
        self._sent = [0] * self._ranks
        try:
            made = self._memory.exchange(
                "tensor_register", allocation if size else None, struct.pack("!QQ", start, size) + about, refused
            )
        except BaseException:
            if self._connections is not None:
                self._connections.remove(self.number)
            raise
        self._regions, abouts = [], []
        for record, view in made:
            start, size = struct.unpack_from("!QQ", record)
            self._regions.append(Region(size, None if view is None else view[start : start + size]))
            abouts.append(record[16:])
        return abouts

    def deregister(self) -> None:
        sent = struct.pack(f"!{self._ranks}Q", *self._sent)
        made = self._memory.exchange("tensor_deregister", None, sent, "")
        if self._connections is not None:
            # Requests that another rank has sent before this call may still arrive.
            expected = [struct.unpack_from("!Q", record, 8 * self._rank)[0] for record, _ in made]
            self._connections.wait_for_requests(
                self.number, expected, lambda peer: self._check_lost(peer, "tensor_deregister")
            )
            self._connections.remove(self.number)
        self._regions = []

    def view(self, rank: int) -> Tensor | None:
        return self._regions[rank].view

    def shares_memory(self, rank: int) -> bool:
        return self._counters[rank] is not None

    def put(self, given: Tensor, rank: int, offset: int) -> None:
        self._check_lost(rank, "put")
        if self.shares_memory(rank):
            if (view := self._regions[rank].view) is not None:  # otherwise it is empty
                view[offset : offset + given.numel()].copy_(given)
            self._count(rank, self._rank)
            return
        self._connection(rank).send(RequestKind.PUT, self.number, offset, bytes_of(given))

    def get(self, into: Tensor, rank: int, offset: int) -> None:
        self._check_lost(rank, "get")
        if self.shares_memory(rank):
            if (view := self._regions[rank].view) is not None:
                into.copy_(view[offset : offset + into.numel()])
            return
        self._connection(rank).fetch(self.number, offset, into)

    def signal(self, rank: int) -> None:
        self._check_lost(rank, "signal")
        if self.shares_memory(rank):
            self._count(rank, self._rank)
            return
        self._connection(rank).send(RequestKind.SIGNAL, self.number, 0, memoryview(b""))

    def has_signal(self, rank: int) -> bool:
        return _core.count_of_signals(self._counter(self._rank, rank)) != self._consumed[rank]

    def wait_signal(self, rank: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        counter = self._counter(self._rank, rank)
        # Two threads that wait for one rank get different signals.
        while not self._waits[rank].acquire(timeout=_SLICE_S):
            self._check_waiting(rank, deadline, timeout_s)
        try:
            while not _core.wait_signal(counter, self._consumed[rank], _SLICE_S):
                self._check_waiting(rank, deadline, timeout_s)
            self._consumed[rank] = (self._consumed[rank] + 1) % (1 << 32)
        finally:
            self._waits[rank].release()

    def _connection(self, rank: int) -> WindowConnection:
        """Return the connection with a rank of another host, for one request."""
        assert self._connections is not None
        connection = self._connections.to(rank)
        with self._locks[rank]:
            self._sent[rank] += 1
        return connection

    def _check_waiting(self, rank: int, deadline: float, timeout_s: float) -> None:
        try:
            self._check_lost(rank, "wait_signal")
        except PeerLostError:
            # In this order: what a rank has sent before its end may arrive, and be counted, after its end.
            arrives = self._connections is not None and self._connections.is_read(rank)
            if not arrives and not self.has_signal(rank):
                raise
        if time.monotonic() >= deadline:
            error = TimeoutError(
                f"wait_signal on group '{self._engine.group_name}' (rank {self._rank} of {self._ranks}): no signal of"
                f" rank {rank} arrived in {timeout_s:g} s.\n  Check whether rank {rank} has called put or signal for"
                f" this window."
            )
            error.ranks = (rank,)
            raise error

    def _check_lost(self, rank: int, call: str) -> None:
        """Raise if a rank is lost, or if the group is closed."""
        self._engine.check_open()
        if rank in self._engine.lost():
            raise PeerLostError(
                f"{call} on group '{self._engine.group_name}' (rank {self._rank} of {self._ranks}): rank"
                f" {rank} is lost: its process has exited, or it has left the group.\n  Check the end of its output.",
                rank,
            )
        if self._connections is not None:
            self._connections.check(rank)

    def _counter(self, waiting: int, sender: int) -> int:
        counters = self._counters[waiting]
        assert counters is not None
        return counters.data_ptr() + sender * _core.SIGNAL_BYTES

    def _count(self, waiting: int, sender: int) -> None:
        _core.add_signal(self._counter(waiting, sender))
