"""From the beginning of a step to its commit.

A step is complete when all ranks agree that it is: its *commit*. A loss before the commit undoes the step on every
survivor, and the step is repeated. A loss after the commit does not affect the step. The survivors are therefore always
at the same step with the same values, and a process that replaces a lost rank receives them from the memory of a
survivor.

The first steps determine the position of the commit (`learning`). If nothing after the first optimizer call needs
another rank, the commit comes before that call, and few values have to be copied. Otherwise it comes at the end of the
step, with copies of everything that the step changes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allranks._api import objects
from allranks._api.world import (
    calls_made,
    destroy_process_group,
    open_groups,
)
from allranks._base.errors import (
    JoinError,
    StateLostError,
    UsageError,
    losses_seen,
)
from allranks._call import callsite
from allranks._call.digests import digest
from allranks._elastic.joining import LOOP
from allranks._elastic.replay import LOSSES
from allranks._elastic.training import variables
from allranks._elastic.training.audit import Audit, loop_frame, program_frames
from allranks._elastic.training.disk import Checkpoints, Disk
from allranks._elastic.training.learning import Learning, merge
from allranks._elastic.training.rehearsal import rehearsal_of
from allranks._elastic.training.replica_check import ReplicaCheck
from allranks._elastic.training.seeds import Seeds
from allranks._elastic.training.step import (
    ALL,
    CHANGES,
    LATE,
    LEAVES,
    NO_VARIABLES,
    SENDS,
    SOME,
    STAYS,
    UNDONE,
    UNSAVED,
    Step,
    Undone,
)
from allranks._elastic.training.step_plan import StepPlan
from allranks._elastic.training.step_values import VARIABLE, copied, location_of, version
from allranks.checkpoint import RandomState

__all__ = ["StepCommit"]

_JOIN_POLL_S = 0.25  # seconds between two checks for processes that wait to join; one check is a request of 0.1 ms
_SIGNAL_WINDOW_S = 5.0  # seconds after a signal in which the other ranks may receive it, too
_MIN_VERIFY_STEPS = 50  # minimum number of steps between two comparisons of the ranks


class StepCommit(ReplicaCheck):
    """The part of a State that begins, checks, learns and commits steps.

    Attributes:
        observing_s: Seconds that this process has spent on observing the first steps.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        own: Sequence[Tensor],
        local: Sequence[Any],
        wrappers: Sequence[Any],
        seeds: Seeds,
        inherit: Callable[[list[Tensor]], None] | None,
        checkpoints: Checkpoints | None,
        leave_on: Sequence[int],
        check_every: int | None,
    ) -> None:
        super().__init__(parts, own, local, wrappers, seeds, inherit)
        if check_every is not None and check_every < 1:
            raise UsageError(f"State: check_every={check_every} is out of range. Expected 1 or more, or None.")
        self._check_every = check_every
        self._rehearsal = rehearsal_of(self)
        if self._rehearsal is not None:
            checkpoints = self._rehearsal.checkpoints(checkpoints)
            self._check_every = None  # the few steps of a rehearsal are compared by its launcher
        self._position.loaded = checkpoints is None
        if checkpoints is not None:
            self._disk = Disk(self._world, checkpoints, self.parts, own, not seeds.enabled)
        self._in_last_step = False  # the empty last step of a loop runs
        self._step: Step | None = None
        self._audits: dict[str, Audit] = {}
        self._complaints: list[str] = []  # for the next learning step, which reports them to all ranks
        self._loop_variables = NO_VARIABLES  # variables of the current loop
        self._began_at = 0.0
        self.observing_s = 0.0
        self._signaled_at = 0.0
        self._outcome = STAYS
        self._announced = self._warned = False
        self._next_join_poll_at = 0.0
        for number in leave_on:
            signal.signal(number, self._on_leave_signal)
        for part in self._coverage.optimizers:
            # A pre-hook: the commit must precede the update of the parameters, which is not undone.
            part.register_step_pre_hook(self._before_optimizer)
        if self._rehearsal is not None:
            self._rehearsal.watch(self._coverage.optimizers)

    def _on_step_completed(self, step: Step) -> None:
        if self._rehearsal is not None:
            self._rehearsal.finish(step)

    def _undo_step(self, step: Step) -> None:
        self._undone_step = step
        self._restore_undone_step(step)

    def _prepare_step(self, step: Step) -> None:
        """Restore the variables and compare the ranks' states before the program receives a step.

        Raises:
            StateLostError: The states differ. Raised on every rank.
        """
        step.is_last = self._in_last_step
        frame = step.frame = loop_frame()
        step.location = location_of(frame)
        if self._loop_variables.is_of(frame):
            step.variables = self._loop_variables
        else:
            step.variables = variables.LoopVariables(program_frames(frame))
            # A generator of the program is closed when its last reference disappears. A reference to its frame would
            # prevent that.
            self._loop_variables = step.variables if variables.is_plain_function(frame) else NO_VARIABLES
        if self._restore_received is not None:
            self._restore_received()
            self._restore_received, self._copied_at = None, ""
        plan = self._plans.setdefault(step.location, StepPlan())
        if not plan.variables_compared:
            # If a rank is lost in the comparison below, the replacement process receives these values.
            own = {name for each in self._plans.values() for name in each.variables}
            self._begin_values[step.location] = {
                name: (value, copied(value)) for name, value in self._variables_now(step).items() if name not in own
            }
            self._compare_variables(step, plan)
            self._copied_at = ""
        self._received = False
        if self._copied_at != step.location:
            self._keep_variables(step)
        self._find_unsent()
        self._verify(step)
        self._copy_checked(step)

    def _compare_variables(self, step: Step, plan: StepPlan) -> None:
        """Compare, before the first step of a loop, the variables that the loop does not assign.

        A process that has just replaced a lost rank may have computed them from results that it does not have:
        ``count = train(); evaluate(count)``. It then takes the values of the other ranks.

        Raises:
            StateLostError: The correct value cannot be determined. Raised on every rank.
        """
        known = {name for each in self._plans.values() for name in each.varying}
        common = {name for each in self._plans.values() for name in each.common} - known
        unassigned = step.variables.within - step.variables.assigned
        own_values = self._computed(self._without_covered(step.variables.read(unassigned)))
        reports: list[Any] = [None] * self._world.size()
        objects.all_gather_object(reports, (self._received, own_values), self._world)
        full = [found for received, found in reports if not received] or [found for _, found in reports]
        for name in sorted(set().union(*(found for _, found in reports))):
            digests = {digest(found[name]) for found in full if name in found}
            # A replacement process that has not computed it has skipped the loop that computes it.
            is_lacking = bool(digests) and any(received and name not in found for received, found in reports)
            if not is_lacking and len({digest(found[name]) for _, found in reports if name in found}) == 1:
                plan.common.add(name)
            elif len(full) == len(reports) or (not is_lacking and (len(digests) > 1 or name in known)):
                plan.varying.add(name)
            elif len(digests) == 1 and (len(full) > 1 or name in common):
                step.variables.write({name: next(found[name] for found in full if name in found)})
            else:
                raise StateLostError(
                    f"State: the variable {name} has a different value in the replacement process than on the other"
                    " ranks, and the correct value cannot be determined.\n  Keep it in a part of the State."
                )
        plan.variables_compared = True

    def _begin(self, step: Step) -> None:
        """Copy the values that the step may change, and seed the generators."""
        step.losses = losses_seen()
        # The empty last step changes nothing.
        if self._in_last_step:
            return
        plan, frame = self._plans[step.location], step.frame
        assert frame is not None
        if plan.learns:
            began = time.perf_counter()
            self._note_covered()
            reached = self._coverage.reached()
            if plan.audits and self._audits_steps and step.location not in self._audits:
                self._audits[step.location] = Audit(step.variables.frames, self._covered(), self._local)
            self._undo.save_all(reached)
            step.learning = Learning(self._coverage, reached)
            self.observing_s += time.perf_counter() - began
        elif plan.late or self._commits_late:
            step.is_copied = True
            self._undo.save_all(self._coverage.reached())
        else:
            self._undo.save(plan)
        self._seeds.seed_generators(self._world.rank(), "step", *self._position.section_key, self._position.index)
        self._began_at = time.perf_counter()
        if self._rehearsal is not None:
            self._rehearsal.begin(step)

    def _before_optimizer(self, *_: object) -> None:
        step = self._step
        # An optimizer outside a step, or after an explicit commit, does not commit again.
        if step is None or not step.running or step.committed:
            return
        # A learning step observes what follows the optimizer, so it commits at its end.
        if step.learning is not None:
            began = time.perf_counter()
            step.learning.at_boundary(calls_made(), self._variables_now(step))
            self.observing_s += time.perf_counter() - began
        elif not (self._plans[step.location].late or self._commits_late):
            self._commit_early()

    def _commit_explicitly(self, step: Step) -> None:
        if step.learning is not None:
            self._learn(step)
        self._commit_early()
        if step.learning is not None:
            step.at_commit = self._own_digests(step)

    def _commit_early(self) -> None:
        """Commit within the step. No call may follow in it: a loss in that call could no longer undo the step."""
        self._commit()
        assert self._step is not None
        self._step.calls = calls_made()

    def _commit(self) -> None:
        """Return when all ranks agree that the step is complete.

        Raises:
            Undone: The ranks have not agreed.
        """
        world, history, step = self._world, self._world.history, self._step
        assert step is not None
        if losses_seen() != step.losses:
            # The program may have caught the error. The interrupted call is still incomplete.
            self._agree(UNDONE)
        plan = self._plans[step.location]
        differing = {name.removeprefix(VARIABLE) for name in self._differing}
        exchanges = not step.is_last and (plan.learns or plan.exchanges or bool(differing))
        step.leaves, outcome = self._leaves, SENDS
        if exchanges:
            own = self._own_values(step, differing)
            # SENDS is below the votes of `_choose_vote`, so one rank with new values makes all ranks exchange.
            if not (plan.sends_always or self._own or differing):
                outcome = self._agree(SENDS if own else self._choose_vote())
                exchanges = outcome == SENDS
        if exchanges:
            self._backups.exchange(world, own)
        # Query the signal again: it may have arrived during the exchange.
        if outcome == SENDS:
            step.leaves = self._leaves
            outcome = self._agree(self._choose_vote())
        self._outcome = outcome
        step.committed = True
        if step.base is not None:
            self._seeds.base, self._seeds.agreed = step.base, True
        if exchanges:
            self._backups.commit(world, self._slots())
            # The versions as of the commit, so that `_find_unsent` detects later changes.
            self._sent |= {n: version(t) for n, t in own.items() if self._keeps_version(n)}
            self._unsent = ""
            self._last_variables |= {n: t for n, t in own.items() if n.startswith("variables(")}
            self._sent_variables |= step.sent
            self._inherited.clear()
            # Only after the commit, so that the plans change on all ranks in the same step.
            plan.own |= differing & self._coverage.buffers.keys()
            plan.variables |= differing - self._coverage.buffers.keys()
            self._differing.clear()
        if self._outcome == LATE:
            self._commits_late = True
        # A loss has interrupted the agreement, but its outcome was that the step is complete.
        if history is not None and history.decided is not None:
            step.broken = True  # the group is broken, but the step is complete
        step.losses = losses_seen()

    def _choose_vote(self) -> int:
        # The checks are in the order of the votes: the lowest vote of all ranks decides.
        if self._leaves:
            return LEAVES
        if self._disk is not None and self._disk.has_failed:
            return UNSAVED
        if self._processes_can_join():
            return CHANGES
        return LATE if self._needs_late_commit and not self._commits_late else STAYS

    def _processes_can_join(self) -> bool:
        """Return whether processes wait to join, and can. Rank 0 polls periodically."""
        history, now = self._world.history, time.monotonic()
        # Only rank 0 polls, so the load on the store does not grow with the number of ranks.
        if self._world.rank() or history is None or not history.membership.launched or now < self._next_join_poll_at:
            return False
        self._next_join_poll_at = now + _JOIN_POLL_S
        if self._position.done and not self._announced:
            # Only after the first commit: all ranks have then entered the loop, so their replay logs are complete.
            history.membership.write(LOOP, b"%d" % history.replica)
            self._announced = True
        # During a save, a change of ranks would stop the training until the save is complete (`_apply_outcome`).
        if not history.has_waiting_processes() or (self._disk is not None and self._disk.is_writing):
            return False
        obstacle = "" if self._replicas is None else self._replicas.obstacle
        what = f"a sharded model ({obstacle})" if obstacle else "groups other than the world" if open_groups() else ""
        if what:
            if not self._warned:
                callsite.warn(
                    f"State: new ranks cannot join, because the program has {what}.\n"
                    "  To use them, restart the job with more ranks."
                )
            self._warned = True
            return False
        return True

    def _finish(self, step: Step) -> None:
        """Finish a ``with`` block that has ended without an error.

        Raises:
            UsageError: The first steps have shown that State could not recover from a loss. Raised on every rank.
            Undone: The step is undone.
        """
        if step.committed:
            if calls_made() != step.calls:
                self._needs_late_commit = True  # a loss in those calls would have interrupted the rest of the step
            if losses_seen() != step.losses:
                self._mark_interrupted(step)  # the program has caught the error
            self._check_what_follows(step)
            return
        step.continued_after_loss = losses_seen() != step.losses
        if step.learning is not None:
            self._learn(step)
        self._commit()

    def _check_what_follows(self, step: Step) -> None:
        """Report values that change after ``step.commit()``, which no other rank stores. Only in a learning step."""
        if not step.at_commit:
            return
        plan, now = self._plans[step.location], self._own_digests(step)
        for name in sorted(plan.variables | plan.own):
            if now.get(name) != step.at_commit.get(name):
                self._complaints.append(
                    f"{name} differs between ranks and is changed after step.commit(), so no other rank has its value"
                    " if this rank is lost.\n  Change it before step.commit()."
                )

    def _learn(self, step: Step) -> None:
        assert step.learning is not None
        assert step.frame is not None
        plan = self._plans[step.location]
        began = time.perf_counter()
        body_s = began - self._began_at
        complaints, self._complaints = self._complaints, []
        audit = self._audits.get(step.location)
        if plan.audits and audit is not None:
            complaints += audit.complaints(step.variables.frames, step)
        report = step.learning.report(calls_made(), self._variables_now(step), complaints)
        # Choose an interval at which comparing the ranks takes less than 0.5 % of the time.
        report["base"] = self._seeds.base
        report["around"] = {} if not plan.audits or audit is None else audit.around(step.variables.frames)
        report["every"] = min(int(step.learning.seconds / (0.005 * max(body_s, 1e-6))) + _MIN_VERIFY_STEPS, 1 << 20)
        reports: list[Any] = [None] * self._world.size()
        if losses_seen() != step.losses:
            raise Undone
        objects.all_gather_object(reports, report, self._world)
        # All ranks must compare at the same steps, so the largest interval counts.
        self._verify_every = max(each["every"] for each in reports)
        step.base = reports[0]["base"]
        complaints = merge(plan, reports, self._coverage)
        self.observing_s += time.perf_counter() - began
        if complaints and self._audits_steps:
            raise UsageError(_refusal(complaints))
        if not plan.audits:
            self._audits.pop(step.location, None)  # it references the values of the variables in the first step
        if not plan.learns:
            self._apply_plan(step)

    def _apply_plan(self, step: Step) -> None:
        """Apply the complete plan of a place."""
        plan = self._plans[step.location]
        self._undo.discard_plan()
        if plan.late and self._world.rank() == 0 and self._audits_steps:
            callsite.warn(
                f"State: steps at {step.location} {plan.why_late}. Each is therefore committed at its end, and State"
                f" copies {_size(self._undo.nbytes)} in each.\n  To avoid this, do that before the first"
                " optimizer.step(); see docs/resilience.md#what-a-step-is."
            )

    @property
    def _audits_steps(self) -> bool:
        """Whether recovery from a loss is possible. Only then must a program observe the limits of State's coverage."""
        return self._world.history is not None or self._disk is not None

    def _mark_interrupted(self, step: Step) -> None:
        """Record that a loss has interrupted a step after its commit, so this rank lacks results of the step."""
        step.broken = True
        self._lacks_state = True
        self._why_state_is_lacking = (
            f"a loss interrupted step {step.index} of this section after its commit, in a call after optimizer.step()"
            " or step.commit()"
        )

    def _apply_outcome(self, step: Step) -> None:
        """Perform the action on which the ranks have agreed at the commit of a step."""
        if self._outcome in (STAYS, LATE):
            return
        if self._outcome == LEAVES:
            self._delay_leaving(step)
        if self._disk is not None:
            # The group changes next, which would interrupt a save in progress.
            self._disk.settle()
            if self._outcome == LEAVES:
                self._write_final_checkpoint(step)
        if step.leaves:
            destroy_process_group()
            raise SystemExit(0)
        # The next generation is connected like after a loss, but no step is undone.
        step.broken = step.broken or self._outcome in (LEAVES, CHANGES)

    def _delay_leaving(self, step: Step) -> None:
        """Delay the leaving of a rank by one step if necessary, unless all ranks leave now.

        The rank stays if its protected rank leaves in the same step, because it stores that rank's tensors. It also
        stays if too few ranks would remain shortly after the signal. A signal reaches the ranks of a job one after the
        other, so the remaining ranks may be about to receive it.
        """
        leave = torch.zeros(self._world.size(), dtype=torch.uint8, device="cpu")
        try:
            self._world.all_gather(leave, torch.tensor([step.leaves], dtype=torch.uint8, device="cpu"))
        except LOSSES:
            step.leaves, step.broken = False, True  # it leaves after the next step
            return
        if not step.leaves or leave.all():
            return
        slots, backups = self._slots(), self._backups
        protected = backups.protected_slot_of(slots[self._world.rank()]) if slots and self._own else None
        is_new = time.monotonic() < self._signaled_at + _SIGNAL_WINDOW_S
        too_few = is_new and int((leave == 0).sum()) < self._min_ranks()
        if too_few or (protected in slots and leave[slots.index(protected)]):
            step.leaves = False

    def _min_ranks(self) -> int:
        """Return the minimum number of ranks with which the job continues."""
        history = self._world.history
        table = history.membership.table() if history is not None and history.membership.launched else None
        return 0 if table is None else table.least

    def _write_final_checkpoint(self, step: Step) -> None:
        """Write a checkpoint if all ranks leave, because no remaining rank has the state."""
        assert self._disk is not None
        try:
            # A broken group cannot agree. The rank then leaves after the next step.
            outcome = UNDONE if step.broken else self._world.agree(ALL if step.leaves else SOME)
        except LOSSES:
            outcome = UNDONE
        if outcome == UNDONE:
            step.leaves, step.broken = False, True  # it leaves after the next step
        elif outcome == ALL:
            self._position.saved = -1
            self._write_checkpoint(write_now=True)

    def _write_checkpoint(self, write_now: bool = False) -> None:
        """Start a checkpoint if one is due. Like a step, it is complete when all ranks agree.

        Args:
            write_now: If steps are not on the disk yet, write a checkpoint even if none is due, and wait until it is
                complete.
        """
        disk, position = self._disk, self._position
        # Repeat until all ranks have agreed: a loss during the save leads to a recovery and another attempt.
        while disk is not None:
            try:
                if self._recovered:
                    # The loss may have interrupted the save on some ranks only. All ranks then write it again.
                    if self._agree(SOME if disk.was_interrupted else ALL) == SOME:
                        position.saved = -1
                    self._recovered = False
                is_due = disk.is_due(position, write_now)
                if is_due:
                    disk.save(position, self._seeds.base)
                    if self._rehearsal is not None:
                        self._rehearsal.at("checkpoint")
                if is_due or write_now:
                    is_complete = not write_now or disk.settle()
                    self._agree(ALL if is_complete else UNDONE)
                    position.saved = position.done
                return
            except (*LOSSES, JoinError, Undone):
                self._recover()

    def _on_leave_signal(self, number: int, _: object) -> None:
        # Only record the signal: the current step must be completed first.
        self._leaves = True
        self._signaled_at = time.monotonic()
        if self._waits_for_replica:  # a waiting process executes no step after which it could leave
            raise SystemExit(0)

    def _restore_generators(self) -> None:
        """Set the generators to their state in the checkpoint from which this job started."""
        if self._generators is not None:
            RandomState().load_state_dict(self._generators)
            self._generators = None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def _refusal(complaints: Sequence[str]) -> str:
    more = f"\n({len(complaints) - 3} more of this kind)" if len(complaints) > 3 else ""
    return (
        "State: a lost rank could not be replaced without a change of the result.\n"
        + "\n".join(complaints[:3])
        + more
        + "\n  See docs/resilience.md#what-a-step-is."
    )
