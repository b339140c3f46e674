"""The plan that the first steps at one place of a program produce (`learning`), and that later steps follow."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["StepPlan"]

_STEPS = 2  # minimum number of observed steps
_BOUNDARIES = 2  # minimum number of observed steps with an optimizer
_MOST = 16  # maximum number of steps to wait for those: an evaluation has none


@dataclass
class StepPlan:
    """How State executes the steps at one place of the program.

    Attributes:
        steps: Number of completed learning steps.
        boundaries: Number of learning steps in which an optimizer ran.
        late: Commit at the end of the step, and copy everything that it may change.
        why_late: The action after the first optimizer's step that requires ``late``.
        saved: Names of tensors that a step changes before the commit.
        modules: A step changes plain values of modules, or of optimizers' states, before the commit.
        unseen: Names of values that a step changes after the commit without a change of a version counter.
        grads: A step adds to gradients of the previous step.
        own: Names of tensors whose values differ between ranks.
        grads_differ: Gradients differ between ranks when a step ends.
        changing: Names of tensors of ``own``, and of buffers, that a step changes.
        around: Paths of objects that are not parts, and that were the same on all ranks.
        variables: Names of variables that the loop assigns and whose values differ between ranks.
        known: Names of all variables that the ranks have compared when a step ended. Other variables may remain from a
            step that was undone: ``if warm: scale = f(x)`` assigns one that the next step assigns again.
        variables_compared: The ranks have compared the variables that the loop does not assign.
        common: Names of those variables that are the same on all ranks.
        varying: Names of those variables that differ between ranks, such as the rank.
    """

    steps: int = 0
    boundaries: int = 0
    late: bool = False
    why_late: str = ""
    saved: set[str] = field(default_factory=set)
    modules: bool = False
    unseen: set[str] = field(default_factory=set)
    grads: bool = False
    grads_differ: bool = False
    own: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)
    around: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    variables_compared: bool = False
    common: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)

    @property
    def audits(self) -> bool:
        """Whether the next step searches for state that is not covered."""
        return self.steps < _STEPS

    @property
    def own_grads(self) -> bool:
        """Whether the next step needs gradients that differ between ranks. Assumed while the plan is incomplete."""
        return self.grads_differ and (self.grads or self.learns)

    @property
    def exchanges(self) -> bool:
        """Whether ranks store values for each other, as of each commit."""
        return bool(self.own or self.variables or self.own_grads)

    @property
    def sends_always(self) -> bool:
        """Whether each step changes some of these values."""
        return self.learns or bool(self.changing) or self.own_grads

    @property
    def learns(self) -> bool:
        """Whether the next step is a learning step: it is committed at its end, and the ranks compare all values.

        A step with an optimizer may change more than a step without one. If gradients are accumulated over k steps,
        only every k-th step has one.
        """
        return self.steps < _STEPS or (self.boundaries < _BOUNDARIES and self.steps < _MOST)
