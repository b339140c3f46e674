"""Snapshots of kept tensors on a worker: its own, and those of the worker that it is the backup of.

`master.snapshots` decides when snapshots are made. A snapshot has the whole memory of each kept tensor once, however
many tensors share it, in one block of the host's memory. Restored tensors share memory as before. A snapshot includes
the state of the worker's random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from allranks._call.bytes import bytes_of, in_huge_pages
from allranks.remote.protocol import wire
from allranks.remote.protocol.faults import Poisoned
from allranks.remote.protocol.wire import Fault, Meta
from allranks.remote.worker.state import WorkerState, describe

__all__ = ["SNAPSHOTS", "Snapshot", "Snapshots"]

_ALIGNED = 64  # bytes; the start of each memory in a snapshot
_CHUNK = 1 << 30  # bytes of an answer, whose length has 32 bits
_LOSS_ERRORS = {"PeerLostError", "AbortedError"}

Layout = tuple[list[tuple[int, Meta]], list[tuple[int, int]], int]
"""The layout of a snapshot.

For each tensor the number of its memory, and its meta. For each memory its offset and its length. The total length.
Memory 0 is the random generator's state."""


class Snapshot(NamedTuple):
    """One worker's kept tensors at one point in time."""

    layout: Layout
    memory: torch.Tensor

    def part(self, which: int) -> torch.Tensor:
        """Return the bytes of one memory."""
        begin, nbytes = self.layout[1][which]
        return self.memory[begin : begin + nbytes]


class Snapshots:
    """The snapshots that a worker stores.

    Attributes:
        held: The snapshots by their owner's rank and their number; a fault if one could not be made.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], Snapshot | Fault] = {}
        self._spare: dict[int, torch.Tensor] = {}  # memory of dropped snapshots, by the owner's rank

    def drop(self, complete: int) -> None:
        """Drop snapshots before the newest complete one. Their memory is reused."""
        for key in [each for each in self.held if each[1] < complete]:
            dropped = self.held.pop(key)
            if isinstance(dropped, Snapshot):
                self._spare[key[0]] = dropped.memory

    def allocate(self, owner: int, nbytes: int) -> torch.Tensor:
        """Return memory for a new snapshot. Reused pages cost a third of new ones."""
        spare = self._spare.pop(owner, None)
        if spare is not None and spare.numel() == nbytes:
            return spare
        return in_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def find(self, owner: int, number: int) -> Snapshot:
        """Return a snapshot.

        Raises:
            Poisoned: It could not be made.
        """
        found = self.held[owner, number]
        if isinstance(found, Fault):
            raise Poisoned(found)
        return found


def snapshot(worker: WorkerState, data: memoryview, number: int, ids: list[int], complete: int) -> None:
    """Copy the kept tensors as they are at this point of the queue."""
    snapshots = _snapshots_of(worker)
    # Before the copy, which reuses the memory of the dropped snapshot.
    snapshots.drop(complete)
    try:
        snapshots.held[worker.rank, number] = _copy_tensors(worker, snapshots, ids)
    except Poisoned as poisoned:
        snapshots.held[worker.rank, number] = poisoned.fault
    except Exception as error:  # noqa: BLE001 - usually out of memory; reported to the backup worker or the master
        snapshots.held[worker.rank, number] = worker.fault("keep", error)


def hand(worker: WorkerState, data: memoryview, owner: int, number: int, link: int, peer: int) -> None:
    """Send a snapshot over a link."""
    group, found = worker.link(link), _snapshots_of(worker).held[owner, number]
    head = msgspec.msgpack.encode((found, None) if isinstance(found, Fault) else (None, found.layout))
    group.send(torch.tensor([len(head)], device="cpu"), peer)
    group.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), peer)
    if isinstance(found, Snapshot):
        group.send(found.memory, peer)


def shelter(
    worker: WorkerState, data: memoryview, owner: int, number: int, link: int, peer: int, complete: int
) -> None:
    """Receive a snapshot over a link."""
    snapshots, group = _snapshots_of(worker), worker.link(link)
    if owner != worker.rank:
        snapshots.drop(complete)
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    group.recv(length, peer)
    head = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.recv(head, peer)
    fault, layout = msgspec.msgpack.decode(bytes_of(head), type=tuple[Fault | None, Layout | None])
    if layout is None:
        assert fault is not None
        raise Poisoned(fault)
    memory = snapshots.allocate(owner, layout[2])
    group.recv(memory, peer)
    # Only after all bytes have arrived, because `holdings` must not list an incomplete snapshot.
    snapshots.held[owner, number] = Snapshot(layout, memory)


def give(worker: WorkerState, data: memoryview, number: int, begin: int) -> tuple[Layout, bytes]:
    """Return a part of a snapshot, for a master that stores it itself."""
    found = _snapshots_of(worker).find(worker.rank, number)
    return found.layout, bytes_of(found.memory[begin : begin + _CHUNK])


def accept(worker: WorkerState, data: memoryview, number: int, layout: Any, begin: int) -> None:
    """Receive a part of a snapshot that the master has stored."""
    snapshots, layout = _snapshots_of(worker), msgspec.convert(layout, Layout)
    if begin == 0:
        snapshots.held[worker.rank, number] = Snapshot(layout, snapshots.allocate(worker.rank, layout[2]))
    memory = snapshots.find(worker.rank, number).memory
    memory[begin : begin + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))


def holdings(worker: WorkerState, data: memoryview) -> list[tuple[int, int]]:
    """Return the snapshots that are stored here. Faults caused by a lost worker are no longer reported."""
    worker.unreported = [each for each in worker.unreported if each.kind not in _LOSS_ERRORS]
    return [key for key, each in _snapshots_of(worker).held.items() if isinstance(each, Snapshot)]


def restore(worker: WorkerState, data: memoryview, number: int, ids: list[int], outputs: list[int]) -> None:
    """Restore tensors. All other snapshots are dropped.

    Args:
        worker: This worker.
        data: Not used.
        number: The number of the snapshot.
        ids: The ids of the tensors at the time of the snapshot. If they still exist in the same memory, it is
            overwritten.
        outputs: The new ids of the tensors.
    """
    snapshots = _snapshots_of(worker)
    found = snapshots.find(worker.rank, number)
    tensors, spans, _ = found.layout
    made: dict[int, Any] = {}
    for which in range(1, len(spans)):
        positions = [each for each, (memory, _) in enumerate(tensors) if memory == which]
        metas = [tensors[each][1] for each in positions]
        old = [worker.slots.get(ids[each]) for each in positions]
        memory = _memory_of(old, metas, spans[which][1])
        if memory is None:
            memory = torch.empty(spans[which][1], dtype=torch.uint8, device=worker.device).untyped_storage()
            old = [_tensor_view(memory, meta, worker.device) for meta in metas]
        _bytes(memory, worker.device).copy_(found.part(which))
        made.update(zip(positions, old, strict=True))
    worker.slots.update((outputs[each], tensor) for each, tensor in made.items())
    worker.generator(0).set_state(found.part(0).clone())
    for key in [each for each in snapshots.held if each[1] != number]:
        del snapshots.held[key]


def discard(worker: WorkerState, data: memoryview) -> None:
    """Drop all snapshots."""
    worker.snapshots = None


def _snapshots_of(worker: WorkerState) -> Snapshots:
    if worker.snapshots is None:
        worker.snapshots = Snapshots()
    assert isinstance(worker.snapshots, Snapshots)
    return worker.snapshots


def _copy_tensors(worker: WorkerState, snapshots: Snapshots, ids: list[int]) -> Snapshot:
    held = [worker.take(each) for each in ids]
    random = worker.generator(0).get_state()
    memories: dict[int, torch.UntypedStorage] = {}
    tensors: list[tuple[int, Meta]] = []
    numbers: dict[int, int] = {}
    for tensor in held:
        memory = tensor.untyped_storage()
        memories.setdefault(memory._cdata, memory)
        tensors.append((numbers.setdefault(memory._cdata, len(numbers) + 1), describe(tensor)))
    spans, end = [], 0
    for nbytes in (random.numel(), *(each.nbytes() for each in memories.values())):
        spans.append((end, nbytes))
        end += -(-nbytes // _ALIGNED) * _ALIGNED
    made = Snapshot((tensors, spans, end), snapshots.allocate(worker.rank, end))
    made.part(0).copy_(random)
    for which, memory in enumerate(memories.values(), 1):
        made.part(which).copy_(_bytes(memory, worker.device))
    return made


def _memory_of(held: Sequence[Any], metas: Sequence[Meta], nbytes: int) -> torch.UntypedStorage | None:
    """Return the memory that the tensors share; None if a tensor is missing or changed, or if the memory differs."""
    found: torch.UntypedStorage | None = None
    for tensor, meta in zip(held, metas, strict=True):
        if not isinstance(tensor, torch.Tensor) or describe(tensor) != meta:
            return None
        memory = tensor.untyped_storage()
        if found is not None and memory._cdata != found._cdata:
            return None
        found = memory
    return found if found is not None and found.nbytes() == nbytes else None


def _tensor_view(memory: torch.UntypedStorage, meta: Meta, device: torch.device) -> torch.Tensor:
    dtype, shape, strides, offset, _ = meta
    return torch.empty(0, dtype=wire.dtype_of(dtype), device=device).set_(memory, offset, shape, strides)


def _bytes(memory: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)


SNAPSHOTS = (snapshot, hand, shelter, give, accept, holdings, restore, discard)
