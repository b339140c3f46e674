"""Requested stacks of ranks: which have arrived, and when to stop waiting. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from allranks.launch.spec.events import Stacks

__all__ = ["Purpose", "StackRequest"]

_QUIET_S = 0.2  # seconds after the last piece of a rank's stacks, which have no end mark


class Purpose(Enum):
    """The action that follows when the stacks have arrived."""

    NOTHING = 0
    STOP_BY_SIGNAL = 1
    STOP_IDLE = 2
    STOP_AFTER_FAILURE = 3


@dataclass
class StackRequest:
    """Stacks that were requested.

    Attributes:
        awaited: ranks that have sent nothing yet.
        until: time when to stop waiting.
        purpose: the action that follows.
        last: time when the last piece arrived.
        texts: the stacks, by rank.
        reasons: by rank, why it cannot send any.
    """

    awaited: set[int]
    until: float
    purpose: Purpose
    last: float
    texts: dict[int, bytes] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, event: Stacks, now: float) -> None:
        """Add a piece of the stacks of a rank, or the reason why there are none."""
        self.awaited.discard(event.rank)
        self.last = now
        if event.why:
            self.reasons[event.rank] = event.why
        else:
            self.texts[event.rank] = self.texts.get(event.rank, b"") + event.text

    def ends_at(self) -> float:
        """Return the time when to stop waiting, as far as is known."""
        return self.until if self.awaited else min(self.until, self.last + (_QUIET_S if self.texts else 0.0))
