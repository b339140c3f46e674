"""Training that survives the death of its ranks: `State`, whose loop repeats the step that a loss has cut off.

`state` has the loop: what a step is, when it is done, what is taken back. `handover` brings the state to a process that
takes a lost rank's place. docs/resilience.md explains both, and what the launcher does (``allranks run --elastic``).
"""

from __future__ import annotations

from allranks.resilience.state import State, Step

__all__ = ["State", "Step"]

for _public in (State, Step):
    _public.__module__ = __name__
