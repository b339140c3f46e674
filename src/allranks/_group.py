"""ProcessGroup: ranks that call collectives together. The object behind the functions.

It checks what does not depend on the engine, once, and hands the call on. Ranks are the group's own here; the
functions (`_collectives`) translate the world's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from allranks._errors import NotInitializedError, UsageError
from allranks._types import PremulSum, ReduceOp, Stats, as_reduce_op

if TYPE_CHECKING:
    from torch import Tensor

    from allranks._engines.base import Engine
    from allranks._rendezvous import Member
    from allranks._work import Work

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A group of ranks and this process' place in it.

    Attributes:
        name: the group's name, as it stands in errors.
        members: who they are, by rank in this group; ``members[i].rank`` is the rank in the world.
        ranks: the members' ranks in the world, by rank in this group.
        timeout_s: how long its calls wait for other ranks.
    """

    def __init__(self, engine: Engine, name: str, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        self.name = name
        self.members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.timeout_s = timeout_s
        self._rank = rank
        self._size = len(self.ranks)
        self._engine: Engine | None = engine
        self._pid = os.getpid()

    def __repr__(self) -> str:
        engine = self._engine.name if self._engine else "destroyed"
        return f"<ProcessGroup {self.name!r}: rank {self._rank} of {self._size}, {engine}>"

    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._live().name

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.all_reduce`."""
        engine = self._engine or self._live()
        return engine.all_reduce(tensor, op if type(op) is ReduceOp else as_reduce_op(op), async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.reduce`."""
        return self._live().reduce(tensor, self._member(dst, "dst"), as_reduce_op(op), async_op)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.broadcast`."""
        return self._live().broadcast(tensor, self._member(src, "src"), async_op)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_gather` (a list) and :func:`allranks.all_gather_single` (one tensor)."""
        return self._live().all_gather(outputs, tensor, async_op)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.gather`."""
        self._only_on(outputs, self._member(dst, "dst"), "gather_list", "dst")
        return self._live().gather(tensor, outputs or None, dst, async_op)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.scatter`."""
        self._only_on(inputs, self._member(src, "src"), "scatter_list", "src")
        return self._live().scatter(tensor, inputs or None, src, async_op)

    def reduce_scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | Tensor,
        op: ReduceOp | PremulSum = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.reduce_scatter` (a list) and :func:`allranks.reduce_scatter_single` (one tensor)."""
        return self._live().reduce_scatter(tensor, inputs, as_reduce_op(op), async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_to_all`."""
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise UsageError(f"all_to_all: expected {self._size} {what} tensors, one per rank, not {len(tensors)}")
        return self._live().all_to_all(outputs, inputs, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.all_to_all_single`."""
        engine = self._live()
        if not output_split_sizes and not input_split_sizes and self._even(output) and self._even(input):
            return engine.all_to_all(output, input, async_op)
        outputs = self._split(output, output_split_sizes, "output")
        inputs = self._split(input, input_split_sizes, "input")
        return engine.all_to_all(outputs, inputs, async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`allranks.barrier`."""
        return self._live().barrier(async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """See :func:`allranks.send`."""
        self._live().send(tensor, self._other(dst, "dst"), _tag(tag), False)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """See :func:`allranks.recv`."""
        return self._live().recv(tensor, self._source(src), _tag(tag))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """See :func:`allranks.isend`."""
        work = self._live().send(tensor, self._other(dst, "dst"), _tag(tag), True)
        assert work is not None
        return work

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """See :func:`allranks.irecv`."""
        return self._live().irecv(tensor, self._source(src), _tag(tag))

    def empty_shared(self, nbytes: int) -> Tensor:
        """See :func:`allranks.empty_shared`; as bytes."""
        return self._live().empty_shared(nbytes)

    def stats(self) -> Stats:
        """See :class:`allranks.Stats`."""
        return self._live().stats()

    def close(self) -> None:
        """Leaves the group; later calls raise. May be called twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def abandon(self) -> None:
        """In a forked child: the group stays the parent's."""
        if self._engine is not None:
            self._engine.abandon()
            self._engine = None

    def _live(self) -> Engine:
        if self._engine is None:
            if os.getpid() != self._pid:
                raise NotInitializedError(
                    f"process group '{self.name}' belongs to the parent process (pid {self._pid}); "
                    "a forked child must call init_process_group itself"
                )
            raise NotInitializedError(f"process group '{self.name}' was destroyed by destroy_process_group")
        return self._engine

    def _member(self, rank: int, what: str) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self._size:
            raise UsageError(f"{what}={rank!r} is not a rank of group '{self.name}': expected 0 to {self._size - 1}")
        return rank

    def _other(self, rank: int, what: str) -> int:
        if self._member(rank, what) == self._rank:
            raise UsageError(f"{what}={rank} is this rank itself (group '{self.name}')")
        return rank

    def _source(self, src: int | None) -> int:
        if self._size == 1:
            raise UsageError(f"recv: this rank is alone in group '{self.name}'")
        return -1 if src is None else self._other(src, "src")

    def _only_on(self, tensors: Sequence[Tensor] | None, root: int, name: str, role: str) -> None:
        if root == self._rank and not tensors:
            raise UsageError(f"{name} must be given on the {role} rank ({root})")
        if root != self._rank and tensors:
            raise UsageError(f"{name} must not be given on rank {self._rank}: {role} is rank {root}")

    def _even(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] % self._size == 0

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None, what: str) -> list[Tensor]:
        """One piece of ``tensor`` per rank, along its first dimension."""
        if tensor.dim() == 0:
            raise UsageError(f"all_to_all_single: the {what} has no dimension to split")
        rows = tensor.shape[0]
        if not sizes:
            if rows % self._size:
                raise UsageError(
                    f"all_to_all_single: the {rows} rows of the {what} cannot be cut in {self._size} equal parts"
                )
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes {list(sizes)} must be {self._size} sizes that sum up to {rows}"
            )
        return [tensor[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _tag(tag: int) -> int:
    if not isinstance(tag, int) or not 0 <= tag < 1 << 31:
        raise UsageError(f"tag must be an integer from 0 to 2**31 - 1, not {tag!r}")
    return tag
