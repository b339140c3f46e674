"""Runs the state machines of this package against real stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from allranks._rendezvous.join_protocol import Act, Answer, Steps

__all__ = ["drive"]

_T = TypeVar("_T")


def drive(steps: Steps[_T], perform: Callable[[Act], Answer]) -> _T:
    """Run a state machine until it returns, and return its result."""
    try:
        act = next(steps)
        while True:
            answer = perform(act)
            act = steps.send((time.monotonic(), answer))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
