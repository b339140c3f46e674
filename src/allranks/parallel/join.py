"""Uneven inputs: ranks without further inputs take part in the collectives of the other ranks.

Inside `DistributedDataParallel.join`, each rank *announces* its next action before every common operation. A rank
without inputs listens, and takes part in the announced operation with zeros, until no rank has inputs.

torch's join assumes at each forward that one backward follows. This module announces each forward and each backward
that is reduced. Several forwards before a backward, or a forward without a backward, are therefore allowed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from allranks._base.errors import MismatchError, UsageError, rank_list
from allranks._call.types import ReduceOp
from allranks._group.process_group import ProcessGroup

__all__ = ["Act", "UnevenInputs", "alone"]


class _Joins(threading.local):
    is_in_one = False


_joins = _Joins()


@contextmanager
def alone() -> Iterator[None]:
    """Allow one join at a time in this thread.

    With two nested joins, a rank that has left the inner join would answer the announcements of the outer join.

    Raises:
        UsageError: This thread is already in a join.
    """
    if _joins.is_in_one:
        raise UsageError(
            "DistributedDataParallel.join: this rank is already in the join of a model, and joining several models is "
            "not supported.\n  Wrap one module that contains them all, or use one join after the other."
        )
    _joins.is_in_one = True
    try:
        yield
    finally:
        _joins.is_in_one = False


class Act(enum.IntEnum):
    """The next action of a rank."""

    LISTEN = 0
    """No action: the rank has no further inputs."""
    FORWARD = 1
    FORWARD_WITH_BUFFERS = 2
    """A forward that first takes the buffers of one rank."""
    BACKWARD = 3
    """A reduction of the gradients."""


class UnevenInputs:
    """Announcements between the ranks in one ``join``.

    Args:
        group: The ranks that take part.
        divide_by_initial_world_size: True: gradients are divided by the number of ranks. False: by the number of ranks
            that have inputs.
        throw: Raise an error on all ranks if one rank runs out of inputs before others.
    """

    def __init__(self, group: ProcessGroup, divide_by_initial_world_size: bool, throw: bool) -> None:
        self._group = group
        self._divide_by_all = divide_by_initial_world_size
        self._throw = throw

    def announce(self, act: Act) -> tuple[Act, list[int]]:
        """Announce this rank's next action, and receive the actions of all ranks.

        Returns:
            The action of the ranks that have inputs (LISTEN if no rank has inputs), and those ranks in the numbering of
            the group.

        Raises:
            MismatchError: The ranks with inputs announced different actions. Or one rank ran out of inputs before
                others, and ``throw`` is set.

        Cost: an all-reduce of 8 bytes per rank.
        """
        size, rank = self._group.size(), self._group.rank()
        # Each rank sets only its own element, so the sum contains the acts of all ranks.
        news = torch.zeros(size, dtype=torch.int64, device=self._group.device)
        news[rank] = act
        self._group.all_reduce(news, ReduceOp.SUM)
        # LISTEN is 0, so the ranks without inputs are left out.
        acts = {r: Act(number) for r, number in enumerate(news.tolist()) if number}
        if self._throw and 0 < len(acts) < size:
            listening = rank_list([self._group.ranks[r] for r in range(size) if r not in acts])
            raise MismatchError(
                f"Rank {self._group.ranks[rank]} exhausted all inputs."
                if act is Act.LISTEN
                else f"Detected at least one rank that exhausted inputs ({listening}). Throwing across all ranks."
            )
        if len(set(acts.values())) > 1:
            who = ", ".join(f"rank {self._group.ranks[r]}: {a.name.lower()}" for r, a in acts.items())
            raise MismatchError(
                f"DistributedDataParallel.join: the ranks that have inputs must perform the same action, but differ"
                f" ({who}).\n  Call forward and backward in the same order on all ranks that have inputs."
            )
        return next(iter(acts.values()), Act.LISTEN), list(acts)

    def announce_backward(self) -> int:
        """Announce a reduction of gradients. Return the divisor of their sum."""
        _, active = self.announce(Act.BACKWARD)
        return self._group.size() if self._divide_by_all else len(active)

    def last(self, mine: bool) -> int:
        """Return the highest rank that never listened, in the numbering of the group. Its model is the newest.

        Args:
            mine: This rank never listened.
        """
        ranks = torch.tensor([self._group.rank() if mine else -1], device="cpu").to(self._group.device)
        self._group.all_reduce(ranks, ReduceOp.MAX)
        return int(ranks)
