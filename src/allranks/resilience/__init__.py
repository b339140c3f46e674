"""Training that survives the loss of ranks: the loop of `State` repeats the step that a loss has interrupted.

`state` contains the loop: it defines a step, the commit of a step, and the undo of an uncommitted step. `handover`
sends the state to a process that replaces a lost rank. `disk` writes checkpoints of the state and loads the newest one.
docs/resilience.md explains them, and the launcher's part (``allranks run --elastic``).
"""

from __future__ import annotations

from allranks._elastic.training.disk import Checkpoints
from allranks._elastic.training.state import State, Step

__all__ = ["Checkpoints", "State", "Step"]

for _public in (Checkpoints, State, Step):
    _public.__module__ = __name__
