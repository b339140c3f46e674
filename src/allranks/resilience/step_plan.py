"""What the first steps in one place of a program have shown (`learning`), and later steps rely on."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["StepPlan"]

_STEPS = 2  # in which a program is observed, at least
_BOUNDARIES = 2  # of them with an optimizer
_MOST = 16  # steps to wait for those: an evaluation has none


@dataclass
class StepPlan:
    """How the steps in one place of the program are done.

    Attributes:
        steps: the number of learning steps that are done.
        boundaries: the number of those in which an optimizer ran.
        late: commit at the end of the step, and copy all that it may change.
        why_late: what it does after the first optimizer's step that needs that.
        saved: the names of tensors that a step changes before the commit.
        modules: a step changes plain values of modules, or of optimizers' states, before the commit.
        unseen: the names of what a step changes after the commit, where no version counter would show it.
        grads: a step adds to gradients of the step before.
        own: the names of tensors whose values differ between ranks.
        grads_differ: gradients differ between ranks when a step ends.
        changing: the names of those of ``own`` that a step changes.
        around: the paths of objects that are no part, and were the same on all ranks.
        variables: the names of variables that the loop assigns and whose values differ between ranks.
        known: the names of all variables that the ranks have compared when a step ended. Others may be left over from a
            step that was undone: ``if warm: scale = f(x)`` assigns one that the next step assigns anew.
        met: the ranks have compared the variables that the loop does not assign.
        common: the names of those of them that are the same on all ranks.
        varying: the names of those that differ between ranks, such as the rank.
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
    met: bool = False
    common: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)

    @property
    def audits(self) -> bool:
        """The next step looks for state that is not covered."""
        return self.steps < _STEPS

    @property
    def own_grads(self) -> bool:
        """Each rank has gradients of its own that the next step needs; also while that is not known yet."""
        return self.grads_differ and (self.grads or self.learns)

    @property
    def exchanges(self) -> bool:
        """Ranks keep values for each other, as of each commit."""
        return bool(self.own or self.variables or self.own_grads)

    @property
    def sends_always(self) -> bool:
        """Each step changes some of these values."""
        return self.learns or bool(self.changing) or self.own_grads

    @property
    def learns(self) -> bool:
        """The next step is committed at its end, whatever it does, and compares all values between the ranks.

        A step with an optimizer may change more than one without: where gradients are accumulated over k steps, only
        every k-th has one.
        """
        return self.steps < _STEPS or (self.boundaries < _BOUNDARIES and self.steps < _MOST)
