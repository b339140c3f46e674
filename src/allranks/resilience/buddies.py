"""What only one rank has, kept by another: the buffers of modules, such as running means, and tensors that a program
names.

Parameters are the same on all ranks, buffers are not: each rank's follow from its own samples. So before a step is
committed each rank sends its own to its buddy, on another host where there is one, which keeps those of the last step
that was committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from allranks.resilience.changed import buffers_of, owners_of_buffers
from allranks.resilience.shards import local_of

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Buddies"]

_TAG = (1 << 31) - 2  # of messages; the highest that no other part of the package uses


class Buddies:
    """The buffers of this rank's modules, and those of the rank whose buddy it is.

    Attributes:
        ring: the seats of the ranks at the last commit, by rank; empty before the first.
        own: the tensors that the program has named.
        needed: there are buffers, or such tensors.
        step: how far the buddy of a rank is from it, in ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], own: Sequence[Tensor]) -> None:
        self._owners = owners_of_buffers(modules)
        self.own = own
        self.needed = bool(self._owners or own)
        self.ring: tuple[int, ...] = ()
        self.step = 1
        self._kept: Tensor | None = None
        self._pending: Tensor | None = None

    def exchange(self, world: ProcessGroup) -> None:
        """Sends this rank's buffers to its buddy. Called by all ranks, before they agree that the step is done."""
        buffers = self._buffers()
        size = world.size()
        if not buffers or size == 1:
            return
        step = _step(world)
        mine = torch.cat(buffers)
        theirs = torch.empty_like(mine)
        work = world.isend(mine, (world.rank() + step) % size, _TAG)
        world.recv(theirs, (world.rank() - step) % size, _TAG)
        work.wait()
        self._pending = theirs

    def commit(self, world: ProcessGroup, seats: Sequence[int]) -> None:
        """The step is done: what was exchanged counts."""
        self._kept, self._pending = self._pending, None
        self.ring, self.step = tuple(seats), _step(world)

    def keeper_of(self, seat: int) -> int | None:
        """The seat of the rank that keeps what a rank had; None if that is not known."""
        if seat not in self.ring or self._kept is None:
            return None
        return self.ring[(self.ring.index(seat) + self.step) % len(self.ring)]

    def send(self, world: ProcessGroup, to: int) -> None:
        """Sends what is kept to the process that takes the place of its rank."""
        assert self._kept is not None
        world.send(self._kept, to, _TAG)

    def kept_own(self) -> list[Tensor]:
        """The tensors that a program has named on the rank whose buddy this one is, as of the last commit."""
        assert self._kept is not None
        sizes = [tensor.nbytes for tensor in self.own]
        parts = torch.split(self._kept[self._kept.numel() - sum(sizes) :], sizes)
        return [part.clone().view(mine.dtype).view(mine.shape) for part, mine in zip(parts, self.own, strict=True)]

    def ward_of(self, seat: int) -> int | None:
        """The seat of the rank for which a rank keeps what it has; None if that is not known."""
        return next((ward for ward in self.ring if self.keeper_of(ward) == seat), None)

    def receive(self, world: ProcessGroup, source: int) -> None:
        """Receives what the lost rank had."""
        buffers = self._buffers()
        kept = torch.empty(sum(part.numel() for part in buffers), dtype=torch.uint8)
        world.recv(kept, source, _TAG)
        for mine, theirs in zip(buffers, torch.split(kept, [part.numel() for part in buffers]), strict=True):
            mine.copy_(theirs)

    def _buffers(self) -> list[Tensor]:
        """The memory of the buffers on the CPU, as bytes."""
        found = [local_of(buffer) for buffer in (*buffers_of(self._owners), *self.own)]
        return [b.view(-1).view(torch.uint8) for b in found if b.is_cpu and b.is_contiguous() and b.numel()]


def _step(world: ProcessGroup) -> int:
    """From a rank to its buddy: as far as the ranks of one host reach, where there are several hosts."""
    together = max(Counter(member.machine for member in world.members).values())
    return together if together < world.size() else 1
