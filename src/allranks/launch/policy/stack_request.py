"""Stacks that ranks were asked for: which have come, and when not to wait any longer. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from allranks.launch.spec.events import Stacks

__all__ = ["Purpose", "StackRequest"]

_QUIET_S = 0.2  # after the last piece of a rank's stacks, which have no end mark


class Purpose(Enum):
    """What follows when the stacks have come."""

    NOTHING = 0
    STOP_BY_SIGNAL = 1
    STOP_IDLE = 2
    STOP_AFTER_FAILURE = 3


@dataclass
class StackRequest:
    """Stacks that were asked for.

    Attributes:
        awaited: ranks that have sent nothing yet.
        until: when not to wait any longer.
        purpose: what to do next.
        last: when something last came.
        texts: the stacks, by rank.
        reasons: why ranks cannot send any.
    """

    awaited: set[int]
    until: float
    purpose: Purpose
    last: float
    texts: dict[int, bytes] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, event: Stacks, now: float) -> None:
        """Adds a piece of the stacks of a rank, or why there are none."""
        self.awaited.discard(event.rank)
        self.last = now
        if event.why:
            self.reasons[event.rank] = event.why
        else:
            self.texts[event.rank] = self.texts.get(event.rank, b"") + event.text

    def ends_at(self) -> float:
        """When not to wait any longer, as far as is known."""
        return self.until if self.awaited else min(self.until, self.last + (_QUIET_S if self.texts else 0.0))
