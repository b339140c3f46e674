"""ProcessGroup: ranks that call collectives together. The object behind the functions.

It checks what does not depend on the engine, once, and hands the call on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from allranks._errors import NotInitializedError, UsageError
from allranks._types import ReduceOp, Stats, as_reduce_op

if TYPE_CHECKING:
    import torch

    from allranks._engines.base import Engine
    from allranks._work import Work

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A group of ranks and this process' place in it.

    Attributes:
        name: the group's name, as it stands in errors.
        rank: this process, 0 to size - 1.
        size: the number of ranks.
    """

    def __init__(self, engine: Engine, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._engine: Engine | None = engine
        self._pid = os.getpid()

    def __repr__(self) -> str:
        engine = self._engine.name if self._engine else "destroyed"
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {engine}>"

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._live().name

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_reduce`."""
        engine = self._engine or self._live()
        return engine.all_reduce(tensor, op if type(op) is ReduceOp else as_reduce_op(op), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.broadcast`."""
        return self._live().broadcast(tensor, self._rank_in_group(src, "src"), async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`allranks.barrier`."""
        return self._live().barrier(async_op)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """See :func:`allranks.send`."""
        self._live().send(tensor, self._other_rank(dst, "dst"), tag)

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """See :func:`allranks.recv`."""
        return self._live().recv(tensor, -1 if src is None else self._other_rank(src, "src"), tag)

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

    def _rank_in_group(self, rank: int, what: str) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"{what}={rank!r} is not a rank of group '{self.name}': expected 0 to {self.size - 1}")
        return rank

    def _other_rank(self, rank: int, what: str) -> int:
        if self._rank_in_group(rank, what) == self.rank:
            raise UsageError(f"{what}={rank} is this rank itself (group '{self.name}')")
        return rank
