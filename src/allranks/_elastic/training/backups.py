"""Backups of values that exist on only one rank. Another rank, its backup rank, stores them.

Parameters are equal on all ranks, so any rank can send them. Other values depend on each rank's own samples: buffers
such as running means, tensors that a program names (``own=``), and variables such as a running loss. Before a step is
committed, each rank sends the values that have changed to its backup rank. On several hosts
it is on another host if each host has the same number of ranks. It keeps the values of the last committed step.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from allranks._call.bytes import view_of
from allranks._call.digests import local_of

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Backups", "Own", "pack", "unpack"]

_TAG = (1 << 31) - 2  # tag of the messages; the highest one that no other part of the package uses

Own = Mapping[str, Tensor]
"""Tensors by name. Other values are pickled into a tensor."""


class Backups:
    """The values that this rank stores for its protected rank.

    Attributes:
        ring: Rank slots of the ranks at the last commit, by rank. Empty before the first commit.
        distance: Distance from a rank to its backup rank, in ranks.
        protected_values: Values of the protected rank at the last commit, by name.
    """

    def __init__(self) -> None:
        self.ring: tuple[int, ...] = ()
        self.distance = 1
        self.protected_values: dict[str, Tensor] = {}
        # Received values become valid at the commit. A step that is undone discards them.
        self._pending: dict[str, Tensor] | None = None
        self._layout = self._new_layout = b""  # of the backup rank, and of the current message
        self._protected_layout = self._new_protected_layout = b""

    def exchange(self, world: ProcessGroup, own: Own) -> None:
        """Send this rank's values to its backup rank, and receive those of the protected rank.

        All ranks call this before a commit. The names, types and shapes are sent only if they differ from those of the
        last commit.

        Args:
            world: The process group of all ranks.
            own: Values that have changed since the last commit.

        Cost:
            two messages in each direction.
        """
        size = world.size()
        if size == 1:
            return
        distance = _backup_distance(world)
        parts = [_bytes(tensor) for tensor in own.values()]
        layout = pickle.dumps([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()])
        described = b"" if _hash(layout) == self._layout else layout
        data = [torch.frombuffer(bytearray(described), dtype=torch.uint8)] if described else []
        outgoing = torch.cat([*data, *parts]) if data or parts else torch.empty(0, dtype=torch.uint8, device="cpu")
        to, source = (world.rank() + distance) % size, (world.rank() - distance) % size
        incoming = self._exchange_messages(world, outgoing, len(described), to, source)
        # The layout becomes the known one only at the commit: an undone exchange may not have reached the backup rank.
        self._new_layout = _hash(layout)
        self._pending = incoming

    def _exchange_messages(
        self, world: ProcessGroup, outgoing: Tensor, described: int, to: int, source: int
    ) -> dict[str, Tensor]:
        head, their_head = (
            torch.tensor([described, outgoing.numel()], device="cpu"),
            torch.zeros(2, dtype=torch.int64, device="cpu"),
        )
        # Every rank sends before it receives, so blocking sends could deadlock.
        sent = [world.isend(head, to, _TAG)]
        if outgoing.numel():
            sent.append(world.isend(outgoing, to, _TAG))
        world.recv(their_head, source, _TAG)
        length, total = their_head.tolist()
        received = torch.empty(total, dtype=torch.uint8, device="cpu")
        if total:
            world.recv(received, source, _TAG)
        # Wait after the receives: a send may complete only when its receiver has posted the receive.
        for work in sent:
            work.wait()
        if length:
            self._new_protected_layout = bytes(view_of(received)[:length])
        else:
            self._new_protected_layout = self._protected_layout
        return _unpack(self._new_protected_layout, received[length:])

    def commit(self, world: ProcessGroup, slots: Sequence[int]) -> None:
        """Commit the exchanged values: the step is complete."""
        # Ranks have changed: values that this rank holds may belong to another protected rank.
        if tuple(slots) != self.ring:
            self.protected_values = {}
        if self._pending is not None:
            # Update, because an exchange contains only the values that have changed.
            self.protected_values.update(self._pending)
            self._layout, self._protected_layout = self._new_layout, self._new_protected_layout
        self._pending = None
        self.ring, self.distance = tuple(slots), _backup_distance(world)

    def discard_pending(self) -> None:
        """Discard the pending exchange and the known layouts, because the ranks have changed.

        The next message then contains its layout, which a new backup rank does not have.
        """
        self._pending = None
        self._layout = self._protected_layout = b""

    def backup_slot_of(self, slot: int) -> int | None:
        """Return the rank slot of the backup rank of a rank slot, or None if it is unknown."""
        # The ring of the last commit counts, not the current ranks: the backup was sent within that ring.
        if slot not in self.ring or len(self.ring) == 1:
            return None
        return self.ring[(self.ring.index(slot) + self.distance) % len(self.ring)]

    def protected_slot_of(self, slot: int) -> int | None:
        """Return the rank slot of the protected rank of a rank slot, or None if it is unknown."""
        return next((protected for protected in self.ring if self.backup_slot_of(protected) == slot), None)

    def protected_own_tensors(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the protected rank's ``own`` tensors as of the last commit."""
        # Clones, because the program may change them while the backup must remain as of the last commit.
        return [self.protected_values[f"own[{number}]"].clone() for number in range(len(own))]


def pack(value: Any) -> Tensor:
    """Pickle a value into a tensor of bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """Return the value that was passed to ``pack``."""
    return pickle.loads(bytes(view_of(packed.contiguous())))


def _hash(layout: bytes) -> bytes:
    return xxhash.xxh3_64_digest(layout)


def _bytes(tensor: Tensor) -> Tensor:
    local = local_of(tensor).contiguous()
    return local.reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _unpack(layout: bytes, data: Tensor) -> dict[str, Tensor]:
    if not layout:
        return {}
    described = pickle.loads(layout)
    empty = [torch.empty(shape, dtype=dtype, device="cpu") for _, dtype, shape in described]
    pieces = torch.split(data, [each.nbytes for each in empty])
    return {
        name: piece.clone().view(dtype).view(shape) if piece.numel() else made
        for (name, dtype, shape), piece, made in zip(described, pieces, empty, strict=True)
    }


def _backup_distance(world: ProcessGroup) -> int:
    """Return the distance from a rank to its backup rank: the largest number of ranks on a host, or 1 on a single host.

    The backup rank is then on another host if each host has the same number of ranks, with consecutive numbers.
    """
    ranks_per_host = max(Counter(member.machine for member in world.members).values())
    return ranks_per_host if ranks_per_host < world.size() else 1
