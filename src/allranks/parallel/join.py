"""Uneven inputs: ranks that have run out of inputs go along with those that have not.

Before everything that they do together within `DistributedDataParallel.join` the ranks *announce* to each other what
they are about to do. A rank without inputs listens, and does its part of it with nothing of its own, until nobody
has inputs any more.

torch's join guesses at each forward what will follow (one backward); here each forward and each backward that is
reduced is announced, so that several forwards before a backward, or a forward without one, may be.
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
    """One join at a time.

    A rank that left the inner one of two would answer what the others announce in the outer one.

    Raises:
        UsageError: This thread is in a join.
    """
    if _joins.is_in_one:
        raise UsageError(
            "DistributedDataParallel.join: this rank is in the join of a model already, and joining several models is "
            "not supported. Wrap one module that holds them all, or use one join after the other"
        )
    _joins.is_in_one = True
    try:
        yield
    finally:
        _joins.is_in_one = False


class Act(enum.IntEnum):
    """What a rank is about to do."""

    LISTEN = 0
    """Nothing of its own: it has no inputs any more."""
    FORWARD = 1
    FORWARD_WITH_BUFFERS = 2
    """A forward that begins by taking one rank's buffers."""
    BACKWARD = 3
    """Reducing the gradients."""


class UnevenInputs:
    """What the ranks announce to each other in one ``join``.

    Args:
        group: Who takes part.
        divide_by_initial_world_size: Gradients are divided by the number of ranks, else by the number of
            those that have inputs.
        throw: Running out of inputs on one rank before others is an error on all.
    """

    def __init__(self, group: ProcessGroup, divide_by_initial_world_size: bool, throw: bool) -> None:
        self._group = group
        self._divide_by_all = divide_by_initial_world_size
        self._throw = throw

    def announce(self, act: Act) -> tuple[Act, list[int]]:
        """Hears what is done next.

        Returns:
            What the ranks that have inputs do (LISTEN if there are none), and which they are (in the group's
            numbering).

        Raises:
            MismatchError: They do different things; or inputs ran out somewhere and ``throw`` was asked for.

        Cost: an all-reduce of 8 bytes per rank.
        """
        size, rank = self._group.size(), self._group.rank()
        news = torch.zeros(size, dtype=torch.int64, device=self._group.device)
        news[rank] = act
        self._group.all_reduce(news, ReduceOp.SUM)
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
            raise MismatchError(f"join: the ranks that have inputs must do the same, but do different things ({who})")
        return next(iter(acts.values()), Act.LISTEN), list(acts)

    def announce_backward(self) -> int:
        """Tells that gradients are reduced next; returns by how much their sum is divided."""
        _, active = self.announce(Act.BACKWARD)
        return self._group.size() if self._divide_by_all else len(active)

    def last(self, mine: bool) -> int:
        """The highest rank that never had to listen (in the group's numbering): its model is the newest."""
        ranks = torch.tensor([self._group.rank() if mine else -1], device="cpu").to(self._group.device)
        self._group.all_reduce(ranks, ReduceOp.MAX)
        return int(ranks)
