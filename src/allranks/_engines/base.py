"""The seam between a group and what moves its tensors."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from allranks._types import ReduceOp, Stats
    from allranks._work import Work

__all__ = ["Engine"]


class Engine(abc.ABC):
    """Moves the tensors of one group.

    Ranks are the group's, already checked; tensors are not. Methods block and return None unless
    ``async_op``.
    """

    name: str

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def barrier(self, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None: ...

    @abc.abstractmethod
    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> int:
        """``source`` < 0: any rank. Returns the sender."""

    @abc.abstractmethod
    def stats(self) -> Stats: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group. Never hangs; may be called twice."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
