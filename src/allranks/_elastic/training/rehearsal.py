"""Rehearsal of losses on this rank, for ``allranks run --rehearse``: kills the process, and records the state.

The launcher runs the first steps of a program once undisturbed. It then runs them once for each phase of a step, and
ranks are killed in that phase. The variable ALLRANKS_REHEARSAL, which only the launcher sets, contains the folder for
the results and the phase. After each committed step, every rank appends the digests of everything that State covers to
a file in that folder. The launcher compares the files of the runs.

Two ranks are killed in a disturbed run. The last rank is killed in the second step. State then still learns what a step
does, commits at its end, and has copies of everything. Rank 0 is killed later, when steps are committed early and only
some values are copied. This happens after the first recovery, so two ranks are never lost simultaneously. One job thus
rehearses both paths of State, which halves the time.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from allranks._call.digests import digest, is_dtensor

if TYPE_CHECKING:
    from allranks._elastic.training.disk import Checkpoints
    from allranks._elastic.training.state_recovery import StateRecovery
    from allranks._elastic.training.step import Step

__all__ = ["EPOCHS", "Rehearsal", "rehearsal_of"]

EPOCHS = 2
"""The number of epochs in a rehearsal. The second one shows whether an epoch begins with the right values."""

_STEPS = 12  # minimum in a section: some steps before and some after both losses
_MOST_STEPS = 16  # if no optimizer runs: State learns for at most this number of steps
_EARLY, _LATE = 1, 5  # minimum number of committed steps before the first and the second loss
_EVERY = 2  # steps between two checkpoints


class Rehearsal:
    """Kills this rank in one phase, and records digests of the state.

    Args:
        state: The State that is rehearsed.
        wanted: Value of ALLRANKS_REHEARSAL: JSON with ``folder`` and ``phase``. The phase is "" in an undisturbed run.
    """

    def __init__(self, state: StateRecovery, wanted: str) -> None:
        request = json.loads(wanted)
        self._state = state
        self._folder = Path(request["folder"])
        self._phase: str = request["phase"]
        # The rank at the start. World ranks change after a loss, and the process to kill must stay the same.
        self._rank = int(os.environ["RANK"])
        # A replacement process has another start number, and is never killed.
        self._start = int(os.environ.get("ALLRANKS_START") or 0)
        self._ranks = int(os.environ["WORLD_SIZE"])
        self._seen: set[str] = set()
        self._stepped: set[int] = set()
        self._forward: Any = None
        self._hooked = self._fired = 0

    def checkpoints(self, wanted: Checkpoints | None) -> Checkpoints | None:
        """Return checkpoint settings with an empty folder, so that the user's files are not read or changed."""
        if wanted is None:
            return None
        return replace(wanted, folder=self._folder / "checkpoints", every=_EVERY, keep_every=None)

    def watch(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Hook the phases at optimizers. Call this after State has registered its own hooks."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)
            optimizer.register_step_post_hook(self._after_optimizer)

    def ends_section(self) -> bool:
        """Return whether the section ends before the next step. It is the same on all ranks, and in all runs."""
        state = self._state
        trained = [plan for plan in state._plans.values() if plan.boundaries]
        if state._coverage.optimizers and not any(not plan.learns for plan in trained):
            limit = _MOST_STEPS
        else:
            # An optimizer that runs in every Nth step runs for the third time after twice the number of learning steps.
            limit = max([_STEPS, *(2 * plan.steps for plan in trained)])
        return state._position.index >= limit

    @property
    def is_over(self) -> bool:
        """Whether a program without a loop of epochs has run enough steps. The same on all ranks, and in all runs."""
        return self._has_trained and self._state._position.done >= _STEPS

    @property
    def _has_trained(self) -> bool:
        """Whether an optimizer has run in any step."""
        return any(plan.boundaries for plan in self._state._plans.values())

    def at(self, phase: str) -> None:
        """Record that the program has reached a phase, and kill the process if the rehearsal requires it here."""
        if phase not in self._seen:
            self._seen.add(phase)
            self._append("phases", phase)
        if phase == self._phase and self._is_due():
            self._append("killed", json.dumps([self._rank, self._state._position.done]))
            # SIGKILL, because no handler or exit function may run: a real loss runs none either.
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, step: Step) -> None:
        """Prepare for a step that begins."""
        self._stepped.clear()
        self._hooked = self._fired = 0
        self._unhook()
        if self._is_evaluation(step):
            self.at("evaluation")
        elif self._phase in ("forward", "backward") and self._is_due():
            # Only in the process that is killed in this step: hooks may change what torch.compile does.
            self._forward = torch.nn.modules.module.register_module_forward_hook(self._after_forward)

    def finish(self, step: Step) -> None:
        """Record a step that is committed, after its ``with`` block."""
        self._unhook()
        if step.is_last:  # the empty step at the end of a loop
            return
        # A process that lacks results of this step receives the state again, so its values mean nothing now.
        if not self._state._lacks_state:
            self._record(step)
        self.at("after the step")

    def _is_due(self) -> bool:
        """Return whether this process must be killed when it next reaches the phase."""
        state = self._state
        done, replaced = state._position.done, state.replaced
        if self._start or not self._phase:
            return False
        if self._rank == self._ranks - 1:
            return done >= _EARLY and replaced == 0
        if self._rank == 0:
            has_learned = not state._coverage.optimizers or any(not plan.learns for plan in state._plans.values())
            return done >= _LATE and replaced == 1 and has_learned
        return False

    def _is_evaluation(self, step: Step) -> bool:
        """Return whether optimizers run in steps at other places of the program, but not in steps at this place."""
        state = self._state
        if not state._coverage.optimizers:
            return state._position.section > 0
        return self._has_trained and not state._plans[step.location].boundaries

    def _after_forward(self, _module: object, _inputs: object, output: Any) -> None:
        if self._phase == "forward":
            # The first module that returns is an inner one, so the forward of the whole model is not complete.
            self.at("forward")
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._hooked += 1
                tensor.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, _gradient: Any) -> None:
        self._fired += 1
        if 2 * self._fired >= self._hooked:  # in the middle: some gradients are being sent to other ranks
            self.at("backward")

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._stepped and id(optimizer) not in self._stepped:
            self.at("between optimizers")

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        if not self._stepped:
            self.at("optimizer")
        self._stepped.add(id(optimizer))

    def _unhook(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def _record(self, step: Step) -> None:
        """Append the digests of everything that State covers, by name, to this rank's file."""
        state, frame = self._state, step.frame
        assert frame is not None
        position, coverage = state._position, state._coverage
        now = state._variables_now(step, after=True)
        found = {f"variable {name.rpartition('.')[2]}": digest(value) for name, value in now.items()}
        values = coverage.common()
        values |= {name: digest(t) for name, t in coverage.reached().tensors.items() if is_dtensor(t)}
        # Optimizers change trained values as a consequence of the other values. The other values are more likely the
        # cause of a difference, so they come first.
        order = sorted(values, key=coverage.is_trained)
        found |= {name.removesuffix("{}"): values[name] for name in order}
        record = {
            "at": [*position.section_key, position.index],
            "step": position.done,
            "ranks": state._world.size(),
            "digests": found,
            "trained": [name for name in order if coverage.is_trained(name)],
            "local": self._local_values(frame),
        }
        self._append(f"rank{state._world.rank()}.{self._start}.jsonl", json.dumps(record))

    def _local_values(self, frame: Any) -> dict[str, int]:
        """Return digests of the values that the program has declared as local."""
        found: dict[str, int] = {}
        for number, each in enumerate(self._state._local):
            if not isinstance(each, str):
                found[f"local[{number}]"] = _digest_of(each)
                continue
            for values in (frame.f_locals, frame.f_globals):
                if each in values:
                    found[each] = _digest_of(values[each])
                    break
        return found

    def _append(self, name: str, line: str) -> None:
        # Open and close for each line, so that a killed process leaves only whole lines.
        with (self._folder / name).open("a") as file:
            file.write(line + "\n")


def _digest_of(value: Any) -> int:
    return digest(vars(value) if hasattr(value, "__dict__") and not isinstance(value, Tensor) else value)


def rehearsal_of(state: StateRecovery) -> Rehearsal | None:
    """Return the rehearsal that the launcher has requested, or None in every other job."""
    wanted = os.environ.get("ALLRANKS_REHEARSAL")
    return None if wanted is None else Rehearsal(state, wanted)
