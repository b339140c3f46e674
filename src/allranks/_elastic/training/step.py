"""One step of a training loop, and the votes of the ranks about it."""

from __future__ import annotations

from types import FrameType, TracebackType
from typing import Any, Protocol

from allranks._elastic.replay import LOSSES
from allranks._elastic.training import variables
from allranks._elastic.training.learning import Learning

__all__ = [
    "ALL",
    "CHANGES",
    "LATE",
    "LEAVES",
    "NO_VARIABLES",
    "SENDS",
    "SOME",
    "STAYS",
    "UNDONE",
    "UNSAVED",
    "Step",
    "StepOwner",
    "Undone",
]

# A rank's vote at the commit of a step. The outcome is the lowest vote of all ranks. After SENDS, the ranks send values
# to their backup ranks and vote again.
UNDONE, SENDS, LEAVES, UNSAVED, CHANGES, LATE, STAYS = range(7)
SOME, ALL = 1, 2  # votes on other questions

# Programs test `index == n`, `index % n == 0` and `(index + 1) % n == 0`. The absolute value is prime, and index + 1 is
# twice a prime, so none of these tests is true for a realistic n other than 1 and 2.
_UNDONE_INDEX = -1_000_000_007
NO_VARIABLES = variables.LoopVariables(())


class Undone(Exception):
    """The step is undone, because a rank was lost. Internal: the step's ``with`` block catches it."""


class StepOwner(Protocol):
    """The part of a State that its steps use."""

    def _begin(self, step: Step) -> None: ...
    def _commit_explicitly(self, step: Step) -> None: ...
    def _finish(self, step: Step) -> None: ...
    def _on_step_completed(self, step: Step) -> None: ...
    def _mark_interrupted(self, step: Step) -> None: ...
    def _undo_step(self, step: Step) -> None: ...


class Step:
    """One step: a context in which a loss does not end the program.

    Attributes:
        batch: A batch of the source. If the source is a number: the index.
        index: Number of the step in its section. It is negative after the ``with`` block of a step that was undone, so
            that ``if step.index == 99: break`` and ``if (step.index + 1) % 100 == 0: save()`` have no effect.
        committed: Whether all ranks have agreed that the step is complete.
    """

    def __init__(self, state: StepOwner, batch: Any, index: int) -> None:
        self.batch = batch
        self.index = index
        self.committed = False
        self.entered = self.running = self.broken = self.leaves = False
        self.is_copied = False  # everything that it may change
        self.continued_after_loss = False  # after a call that a loss has interrupted
        self.location = ""
        self.frame: FrameType | None = None
        self.variables = NO_VARIABLES
        self.learning: Learning | None = None
        self.losses = self.calls = 0
        self.is_last = False  # the empty last step of a loop of epochs
        self.at_commit: dict[str, int] = {}
        self.sent: dict[str, int] = {}  # hashes of the variables that the backup rank has after the commit
        self.base: int | None = None
        self._state = state

    def forget(self) -> None:
        """Release the program's functions. Their variables reference the step, and the cycle would keep its tensors."""
        self.frame, self.variables = None, NO_VARIABLES

    def commit(self) -> None:
        """End the part of the step that a loss undoes.

        Call it after the last communication of the step, and before the program changes anything that is not restored.
        Optimizers of the state call it before their ``step()`` if possible. A step without a call is committed at its
        end.
        """
        if not self.committed:
            self._state._commit_explicitly(self)

    def __enter__(self) -> Step:
        self.entered = self.running = True
        self._state._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is None:
                self._state._finish(self)
        except (*LOSSES, Undone) as loss:
            error = loss
        finally:
            # In every case: `State.steps` refuses to start a section while a step runs.
            self.running = False
            if self.learning is not None:
                self.learning.close()
        if error is None:
            self._state._on_step_completed(self)
            return True
        if not self._is_loss(error):
            return False
        self.broken = True
        # The other ranks count the step as complete, so undoing it here would make the ranks differ.
        if self.committed:
            self._state._mark_interrupted(self)
        else:
            self.index = _UNDONE_INDEX
            self._state._undo_step(self)
        return True

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether a lost rank has caused the error, directly or through an exception of the program."""
        seen: BaseException | None = error if isinstance(error, Exception) else None
        while seen is not None:
            if isinstance(seen, (*LOSSES, Undone)):
                return True
            # Programs wrap exceptions, with or without `from`.
            seen = seen.__cause__ or seen.__context__
        return False
