"""Training that survives the death of its ranks: `State`, whose loop repeats the step that a loss has cut off.

`state` has the loop: what a step is, when it is done, what is taken back. `handover` brings the state to a process that
takes a lost rank's place, `disk` writes checkpoints of it and begins with the newest. docs/resilience.md explains them,
and what the launcher does (``allranks run --elastic``).
"""

from __future__ import annotations

from allranks.resilience.disk import Checkpoints
from allranks.resilience.state import State, Step

__all__ = ["Checkpoints", "State", "Step"]

for _public in (Checkpoints, State, Step):
    _public.__module__ = __name__
