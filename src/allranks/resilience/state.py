"""The loop of a training that survives losses.

A step is complete when all ranks agree that it is: its *commit*. A loss before the commit undoes the step on every
survivor, and the step is repeated. A loss after the commit does not affect the step. The survivors are therefore always
at the same step with the same values, and a process that replaces a lost rank receives them from the memory of a
survivor.

The first steps determine the position of the commit (`learning`). If nothing after the first optimizer call needs
another rank, the commit comes before that call, and few values have to be copied. Otherwise it comes at the end of the
step, with copies of everything that the step changes. `coverage` finds what a State covers, `buddies` stores values
that only one rank has, and `audit` rejects uncovered state.

Random numbers are not restored: they follow from the position of the step (`seeds`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from allranks._api import objects
from allranks._api.world import (
    abort_groups,
    calls_made,
    destroy_process_group,
    open_groups,
    renew_groups,
    resolve_group,
)
from allranks._base.errors import (
    AllranksError,
    ExcludedError,
    JoinError,
    StateLostError,
    UsageError,
    losses_seen,
)
from allranks._base.integers import integer_of
from allranks._call import callsite
from allranks._call.types import ReduceOp
from allranks._engines.prelude import LOSSES, Prelude
from allranks._group.elastic import LOOP, OVER
from allranks._group.succession import Tally
from allranks._group.survival import advance
from allranks._plugin.adapt import TORCHS_DDP
from allranks._rendezvous.succession import NEWCOMER, Decision
from allranks.checkpoint import RandomState
from allranks.resilience import fully_sharded, handover, torchs_ddp, variables
from allranks.resilience.audit import Audit, loop_frame, program_frames, surroundings
from allranks.resilience.batches import Batches
from allranks.resilience.buddies import Buddies, pack, unpack
from allranks.resilience.coverage import Coverage, Undo, digest
from allranks.resilience.disk import Checkpoints, Disk
from allranks.resilience.handover import assign
from allranks.resilience.learning import Learning, merge
from allranks.resilience.position import Position
from allranks.resilience.reachable import WRAPPERS
from allranks.resilience.rehearsal import EPOCHS, rehearsal_of
from allranks.resilience.replicas import Replicas
from allranks.resilience.seeds import Seeds
from allranks.resilience.shards import dtensors_in, layout_of
from allranks.resilience.step_plan import StepPlan

__all__ = ["State", "Step"]

# A rank's vote at the commit of a step. The outcome is the lowest vote of all ranks. After _SENDS, the ranks send
# values to their backup ranks and vote again.
_UNDONE, _SENDS, _LEAVES, _UNSAVED, _CHANGES, _LATE, _STAYS = range(7)
_SOME, _ALL = 1, 2  # votes on other questions
_LOOK_S = 0.25  # between two checks for processes that wait to join
_TOGETHER_S = 5.0  # after a signal: the other ranks may receive it within this time
_VERIFY_LEAST = 50  # minimum number of steps between two comparisons of the ranks
_ABANDONED = (
    "State: the program has left the loop after a step that a loss has undone, so that the step is missing.\n  Leave"
    " it only if the step is done: `if step.committed and ...: break`"
)
# Programs test `index == n`, `index % n == 0` and `(index + 1) % n == 0`. The absolute value is prime, and index + 1 is
# twice a prime, so none of these tests is true for a realistic n other than 1 and 2.
_UNDONE_INDEX = -1_000_000_007
_NOTHING = object()
_NO_VARIABLES = variables.LoopVariables(())
_loops_entered = itertools.count()
_EXTRAS = "(buffers and gradients)"  # an additional part that is transferred with those of the program
_VARIABLE = "variable "  # prefix of a variable's name in comparisons
_VAIN = 5  # attempts to connect all groups before the error is raised


class _Undone(Exception):
    """The step is undone, because a rank was lost. Internal: the step's ``with`` block catches it."""


class State:
    """State of a training, and its loop, which survives the loss of ranks.

    ::

        state = dist.resilience.State(model=model, optimizer=optimizer)
        for epoch in state.epochs(10):
            sampler.set_epoch(epoch)
            for step in state.steps(loader):
                with step:
                    images, labels = step.batch
                    optimizer.zero_grad()
                    F.cross_entropy(model(images), labels).backward()
                    optimizer.step()

    If a rank is lost in a step, the other ranks undo their part of it. Under ``allranks run --elastic`` the launcher
    starts a replacement process, which runs the program from the top. When it reaches the loop, it receives the state
    from another rank's memory, and the step is repeated. The final weights are bitwise equal to those of a run without
    a loss. If no process replaces the rank, the other ranks continue without it. They then have other numbers, which
    ``get_rank()`` and ``get_world_size()`` return, and an ``allranks.data.DistributedSampler`` distributes the rest of
    the epoch over the remaining ranks. Hosts that join later do so after a step, in the same way.

    All communication with other ranks must be in a step: a loss outside a step ends the program. A section of one step
    is ``for step in state.steps(1): with step: evaluate()``.

    Args:
        reseed: Seed torch's generators, and ``random``, at the beginning of each step. A repeated step then draws the
            same numbers, also on a replacement process.
        own: Tensors on the CPU whose values differ between ranks, such as a sum of losses. Another rank stores a copy
            of them as of the commit of each step.
        inherit: Called with the ``own`` tensors of a rank that is permanently lost, because it has left or is not
            replaced. It is called once, on the rank that stores them, before the next step. It can add them to its own
            tensors: ``lambda theirs: loss_sum.add_(theirs[0])``. Without it the tensors are lost, with a warning.
        leave_on: Signals that announce the end of this process, such as ``signal.SIGTERM`` of a cloud that reclaims a
            host. After such a signal the rank finishes its step, leaves, and exits with code 0. The other ranks
            continue without it and repeat nothing. Create the State in the main thread if signals are given.
        checkpoints: Directory and frequency of checkpoints on the disk. The loop begins with the newest checkpoint in
            the folder if one exists: the training continues with the step after it. The final weights are those of a
            run that was never stopped. None: the state is only in memory.
        local: Objects, and names of variables, that may differ between ranks, are not restored, and are lost with their
            rank: a progress bar, a list that is only printed. The training must not depend on them.
        parts: Modules, optimizers, schedulers, objects with ``state_dict`` and ``load_state_dict``, tensors, NumPy
            arrays, generators, dicts, lists, and objects with attributes. Their values must be equal on all ranks.

    Attributes:
        parts: The parts, by name. For a wrapper such as DistributedDataParallel, the wrapped module.
        replaced: Number of times that another process has replaced a lost rank.
        lost: Number of ranks that have been lost, including those that were lost before they received the state.
        joined: Number of ranks that have joined later. These three are the same on all ranks, in each step.
        observing_s: Seconds that this process has spent on observing the first steps.

    Raises:
        NotInitializedError: No process group is initialized.
        UsageError: An object cannot be a part, or a checkpoint cannot contain it. In the first steps, on every rank:
            the program changes something that is not covered. The error names it, and the line to add.
        CheckpointError: In the loop: a checkpoint cannot be loaded, or was not written. Raised on every rank.
        StateLostError: In the loop, on every rank: no remaining rank has the state, or a part of it, or the ranks'
            values have diverged.

    Cost:
        a step: an all_reduce of 8 bytes, the seeding of generators, and a copy of the values that a step changes before
        it is committed; if ranks have values of their own, messages with them. The first two steps at each place of a
        program: copies and hashes of everything. Every N steps: a hash of everything, below 0.5 % of the time. A loss:
        some round trips to the launcher's store, the creation of the group, hashes, and a transfer of the state through
        shared memory or TCP. A checkpoint: a copy of this rank's share of the state while the loop waits; the rest
        happens in the background.
    """

    def __init__(
        self,
        *,
        reseed: bool = True,
        own: Sequence[Tensor] = (),
        inherit: Callable[[list[Tensor]], None] | None = None,
        leave_on: Sequence[int] = (),
        checkpoints: Checkpoints | None = None,
        local: Sequence[Any] = (),
        **parts: Any,
    ) -> None:
        for name, part in parts.items():
            handover.check_part(name, part)
            if isinstance(part, nn.Module):
                fully_sharded.check_not_flat(name, part)
            if isinstance(part, WRAPPERS):
                torchs_ddp.check(name, part)
        handover.check_own(own)
        self._world = resolve_group(None)
        self.parts = {name: _unwrapped(part) for name, part in parts.items()}
        self._own = list(own)
        self._local = list(local)
        self._sharded = any(True for _ in dtensors_in(self.parts))
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        self._replicas = Replicas(self.parts, modules, self._world) if self._sharded else None
        if self._sharded:
            self._warn_of_shards()
        self._wrappers: list[Any] = [part for part in parts.values() if isinstance(part, WRAPPERS)]
        self._torchs: list[Any] = []
        self._coverage = Coverage(self.parts, self._wrappers, self._own, self._local)
        self._undo = Undo(self._coverage)
        self._rehearsal = rehearsal_of(self)
        if self._rehearsal is not None:
            checkpoints = self._rehearsal.checkpoints(checkpoints)
        self._position = Position(loaded=checkpoints is None)
        self._places = {self._place}
        self._disk = None if checkpoints is None else Disk(self._world, checkpoints, self.parts, own, not reseed)
        self._ends = self._recovered = self._lacks = False
        self._why_lacks = ""
        self._seeds = Seeds(reseed)
        self._generators: dict[str, Any] | None = None
        self._entered = False
        # Position of the program. In a replacement process it is behind the position of the training.
        self._loop, self._epoch, self._section = 0, -1, 0
        self._batches: Batches | None = None
        self._step: Step | None = None
        self._undone: Step | None = None  # must be repeated
        self._abandoned = False
        self._plans: dict[str, StepPlan] = {}
        self._audits: dict[str, Audit] = {}
        self._complaints: list[str] = []  # for the next learning step, which reports them to all ranks
        self._late = False  # on all ranks, because a step has made calls after its commit
        self._wants_late = False
        # The variables of a place at the start of its last step, each with a copy of its value.
        self._begin_values: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._differing: set[str] = set()  # names whose values have diverged between ranks, until the next commit
        self._kept_at = ""  # the place whose variables are copied; "" if the program may have changed them since
        self._loop_variables = _NO_VARIABLES  # variables of the current loop
        self._at_entry: dict[str, Any] = {}  # plain variables at the start of the first loop
        self._at_entry_by_name: dict[str, Any] = {}  # the same, without the names of functions
        self._covered_ids: set[int] = set()  # of tensors that variables may also reference
        self._pending_values: dict[str, dict[str, Any]] = {}  # received, for the first step at each place
        self._pending_kept: dict[str, Tensor] = {}
        self._reset: dict[str, set[str]] = {}  # variables that the program has reset since the last commit
        self._last_variables: dict[str, Tensor] = {}  # packed variables that the backup rank has, by place
        self._sent_variables: dict[str, int] = {}  # their hashes
        self._local_names = {each for each in local if isinstance(each, str)}
        self._verifies = self._received = False
        self._arrived: Callable[[], None] | None = None  # restores values as the other ranks have sent them
        self._verify_every = self._verified_at = 0
        self._began_at = 0.0
        self._buddies = Buddies()
        self._sent: dict[str, int] = {}  # version counters of the tensors that the backup rank has
        self._unsent = ""  # changed after it was sent, although the first steps did not show such a change
        self._inherit = inherit
        self._inherited: set[int] = set()  # rank slots, since the last commit
        self._first_own = [tensor.clone() for tensor in own]
        self._aside = self._was_aside = self._returned = False
        self.replaced = self.lost = self.joined = 0
        self.observing_s = 0.0
        self._not_counted = Tally()  # part of the group history's count that State does not report
        self._leaves = False
        self._noticed_at = 0.0
        self._outcome = _STAYS
        self._announced = self._warned = False
        self._look_at = 0.0
        for number in leave_on:
            signal.signal(number, self._take_notice)
        for part in self._coverage.optimizers:
            part.register_step_pre_hook(self._before_optimizer)
        if self._rehearsal is not None:
            self._rehearsal.watch(self._coverage.optimizers)

    @property
    def leaving(self) -> bool:
        """Whether this process has received a signal to leave, and will leave after the current step."""
        return self._leaves

    @property
    def steps_done(self) -> int:
        """Number of completed steps in all epochs."""
        return self._position.done

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """Iterate over the epochs, beginning with the current epoch of the training.

        Args:
            count: One more than the number of the last epoch.
            first: Number of the first epoch. No effect if the training is already in a later one, for example from a
                checkpoint.
        """
        self._enter()
        if self._rehearsal is not None:
            count = min(count, first + EPOCHS)
        loop = self._begin_loop()
        position = self._position
        if position.loop < loop:
            position.move(loop, max(position.epoch, first))
        try:
            while position.loop == loop and position.epoch < count:
                self._epoch, self._section = position.epoch, 0
                # Random numbers that the program draws before the first step of an epoch also follow from the epoch.
                self._seeds.sow(self._world.rank(), "epoch", loop, self._epoch)
                yield self._epoch
                self._end_step(self._step, self._batches)
                self._check_abandoned()
                if (position.loop, position.epoch) == (loop, self._epoch):  # else the others are ahead of this process
                    position.move(loop, self._epoch + 1)
            if position.loop == loop:
                self._end_loop(count)
                if self._rehearsal is not None:  # before the program saves a result
                    raise SystemExit(0)
        finally:  # also if the program leaves the loop by `break`
            self._end_step(self._step, self._batches)
            self._loop, self._section = loop + 1, 0
            if position.loop == loop:
                position.move(self._loop, position.epoch)

    def _end_loop(self, count: int) -> None:
        """Run the empty last step of a loop of epochs."""
        self._epoch, self._section, self._ends = count, 0, True
        self._write_checkpoint(at_once=True)
        for step in self.steps(1):  # no rank leaves the loop while another rank may still need its state
            with step:
                pass
        self._ends = False
        self._position.epoch = max(self._position.epoch, count)
        self._announce(OVER, b"1")

    def _begin_loop(self) -> int:
        """Return the number of the loop of epochs that begins. It is odd; numbers outside of loops are even."""
        if self._batches is not None or self._loop % 2:
            raise UsageError(
                "State.epochs: called within another loop of epochs, or within a section of steps.\n  Write one loop of"
                " epochs after the other, each with sections of steps in it"
            )
        self._loop += 1
        self._announce(OVER, b"")
        return self._loop

    def _announce(self, key: str, value: bytes) -> None:
        lineage = self._world.lineage
        if lineage is not None and lineage.board.launched and (value or lineage.board.read(key)):
            lineage.board.write(key, value)

    def steps(self, source: Any) -> Iterator[Step]:
        """Iterate over the steps of a section. Each step is repeated until it is committed.

        Args:
            source: A DataLoader or any other iterable, of which each step receives one batch, or a number of steps. A
                replacement process skips the batches of completed steps, at no cost with allranks's DistributedSampler.

        Raises:
            UsageError: Called in the middle of another section.
        """
        count = integer_of(source)
        source = source if count is None else count
        self._enter()
        self._check_abandoned()
        if self._step is not None and self._step.running:
            raise UsageError(
                "State.steps: called within a step, which would be repeated with a part of the inner loop only.\n"
                "  Write a plain loop within the step, or one section after the other"
            )
        self._end_step(self._step, self._batches)
        section, self._section = self._section, self._section + 1
        key, position = (self._loop, self._epoch if self._loop % 2 else 0, section), self._position
        if key < position.section_key:
            return
        if key > position.section_key:
            position.move(self._loop, self._epoch if self._loop % 2 else position.epoch, section)
        self._places.add(self._place)
        batches = Batches(source, self._world, position, self._seeds, self._restore, self._places)
        yield from self._run_section(batches, key)
        self._seeds.sow(self._world.rank(), "after", *key)
        if self._is_in(key):
            position.move(position.loop, position.epoch, section + 1)
        if self._rehearsal is not None and not self._loop % 2 and not self._ends and self._rehearsal.is_over:
            self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        """End the rehearsal of a program that trains without a loop of epochs, on all ranks."""
        self._ends = True
        self._write_checkpoint(at_once=True)
        for step in self.steps(1):
            with step:
                pass
        self._announce(OVER, b"1")
        raise SystemExit(0)

    def _is_in(self, key: tuple[int, int, int]) -> bool:
        """Return whether the training is in this section. False if the others have finished it during a recovery."""
        return self._position.section_key == key

    def _run_section(self, batches: Batches, key: tuple[int, int, int]) -> Iterator[Step]:
        place = self._place
        self._batches, self._kept_at = batches, ""
        try:
            while True:
                self._write_checkpoint()
                if self._returned:
                    self._returned = False
                    batches.begin_again()
                if not self._is_in(key):
                    return
                if self._rehearsal is not None and not self._ends and self._rehearsal.ends_section():
                    return
                if self._place != place:
                    place = self._place
                    self._places.add(place)
                    batches.deal_anew()
                if self._pending_values:  # also if no step remains: the program may read them after the loop
                    self._fill_variables(loop_frame())
                if not batches.prepare():
                    return
                if self._rehearsal is not None and not self._ends:
                    self._rehearsal.at("loading")
                step = Step(self, batches.batch, self._position.index)
                try:
                    self._meet_at(step)
                except (*LOSSES, _Undone):
                    self._recover()
                    continue
                self._step = step
                try:
                    yield step
                finally:  # also if the program leaves the loop by `break`
                    self._end_step(step, batches)
                self._check_used(step, batches)
                if step.committed:
                    if step.frame is not None:
                        # A replacement process may be started before the next step here: after a loss in this commit on
                        # another rank, in a checkpoint, or in another section. It needs the variables as they are after
                        # this step.
                        self._keep_variables(step)
                    self._find_unsent()
                    self._follow(step)
                if step.broken:
                    self._recover()
                step.forget()
        except GeneratorExit:
            if self._undone is not None:
                self._abandoned = True
                atexit.register(self._end_abandoned)
            raise
        finally:
            if self._batches is batches:
                self._batches = None
                self._loop_variables = _NO_VARIABLES  # releases the program's functions

    def _end_step(self, step: Step | None, batches: Batches | None) -> None:
        """Count a step that the program has left. It is counted only once.

        A program that leaves a loop by ``break`` may still hold the generator of its steps. The generator is then not
        closed, so the next section or epoch calls this method.
        """
        if step is None or batches is None or self._step is not step:
            return
        self._step = None
        if step.committed:
            batches.take()
            self._position.index += 1
            self._position.done += not self._ends

    def _check_used(self, step: Step, batches: Batches) -> None:
        """Raise if the program has not used a step correctly."""
        if not step.entered:
            raise UsageError("a step of State.steps() was not used: write `with step:` around its body")
        if self._batches is not batches:
            raise UsageError(
                "State.steps: two sections were run at the same time.\n  Finish one, or leave it by `break`,"
                " before the next one begins"
            )

    def _check_abandoned(self) -> None:
        """Raise if the program has left a loop although its last step must be repeated."""
        if self._abandoned:
            self._abandoned = False
            raise StateLostError(_ABANDONED)

    def _end_abandoned(self) -> None:
        # An exception in an exit handler does not change the exit code, so report the error and exit here.
        if self._abandoned:  # the program has exited without another call that could raise the error
            print(f"allranks.StateLostError: {_ABANDONED}", file=sys.stderr, flush=True)
            os._exit(1)

    def _follow(self, step: Step) -> None:
        """Perform the action on which the ranks have agreed at the commit of a step."""
        if self._outcome in (_STAYS, _LATE):
            return
        if self._outcome == _LEAVES:
            self._wait_for_others(step)
        if self._disk is not None:
            self._disk.settle()
            if self._outcome == _LEAVES:
                self._write_last(step)
        if step.leaves:
            destroy_process_group()
            raise SystemExit(0)
        step.broken = step.broken or self._outcome in (_LEAVES, _CHANGES)

    def _wait_for_others(self, step: Step) -> None:
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
        seats, buddies = self._seats(), self._buddies
        ward = buddies.ward_of(seats[self._world.rank()]) if seats and self._own else None
        is_new = time.monotonic() < self._noticed_at + _TOGETHER_S
        too_few = is_new and int((leave == 0).sum()) < self._least()
        if too_few or (ward in seats and leave[seats.index(ward)]):
            step.leaves = False

    def _least(self) -> int:
        """Return the minimum number of ranks with which the job continues."""
        lineage = self._world.lineage
        table = lineage.board.table() if lineage is not None and lineage.board.launched else None
        return 0 if table is None else table.least

    def _write_last(self, step: Step) -> None:
        """Write a checkpoint if all ranks leave, because no remaining rank has the state."""
        assert self._disk is not None
        try:
            outcome = _UNDONE if step.broken else self._world.agree(_ALL if step.leaves else _SOME)
        except LOSSES:
            outcome = _UNDONE
        if outcome == _UNDONE:
            step.leaves, step.broken = False, True  # it leaves after the next step
        elif outcome == _ALL:
            self._position.saved = -1
            self._write_checkpoint(at_once=True)

    def _write_checkpoint(self, at_once: bool = False) -> None:
        """Start a checkpoint if one is due. Like a step, it is complete when all ranks agree.

        Args:
            at_once: If steps are not on the disk yet, write a checkpoint even if none is due, and wait until it is
                complete.
        """
        disk, position = self._disk, self._position
        while disk is not None:
            try:
                if self._recovered:
                    # The loss may have interrupted the save on some ranks only. All ranks then write it again.
                    if self._agree(_SOME if disk.was_cut_off else _ALL) == _SOME:
                        position.saved = -1
                    self._recovered = False
                is_due = disk.is_due(position, at_once)
                if is_due:
                    disk.save(position, self._seeds.base)
                    if self._rehearsal is not None:
                        self._rehearsal.at("checkpoint")
                if is_due or at_once:
                    whole = not at_once or disk.settle()
                    self._agree(_ALL if whole else _UNDONE)
                    position.saved = position.done
                return
            except (*LOSSES, JoinError, _Undone):
                self._recover()

    def _agree(self, value: int) -> int:
        """Return the lowest value of all ranks.

        Raises:
            _Undone: The lowest value is 0, or a loss has interrupted another call of a rank.
        """
        if value == _UNDONE:
            abort_groups()  # a rank may wait in such a group for this rank, which makes no further call in this step
        outcome = self._world.agree(value)
        if outcome == _UNDONE:
            raise _Undone
        return outcome

    @property
    def _place(self) -> tuple[int, int]:
        return self._world.rank(), self._world.size()

    # --- methods for a step ---

    def _meet_at(self, step: Step) -> None:
        """Restore the variables and compare the ranks' states before the program receives a step.

        Raises:
            StateLostError: The states differ. Raised on every rank.
        """
        step.is_last = self._ends
        frame = step.frame = loop_frame()
        step.place = _place_of(frame)
        if self._loop_variables.is_of(frame):
            step.variables = self._loop_variables
        else:
            step.variables = variables.LoopVariables(program_frames(frame))
            # A generator of the program is closed when its last reference disappears. A reference to its frame would
            # prevent that.
            self._loop_variables = step.variables if variables.is_plain_function(frame) else _NO_VARIABLES
        if self._arrived is not None:
            self._arrived()
            self._arrived, self._kept_at = None, ""
        plan = self._plans.setdefault(step.place, StepPlan())
        if not plan.met:
            # If a rank is lost in the comparison below, the replacement process receives these values.
            own = {name for each in self._plans.values() for name in each.variables}
            self._begin_values[step.place] = {
                name: (value, _copied(value)) for name, value in self._variables_now(step).items() if name not in own
            }
            self._meet_variables(step, plan)
            self._kept_at = ""
        self._received = False
        if self._kept_at != step.place:
            self._keep_variables(step)
        self._find_unsent()
        self._verify(step)

    def _keep_variables(self, step: Step) -> None:
        """Copy the variables that the loop carries, in the state in which the next step finds them."""
        self._begin_values[step.place] = {
            name: (value, _copied(value)) for name, value in self._variables_now(step, after=True).items()
        }
        self._kept_at = step.place

    def _begin(self, step: Step) -> None:
        """Copy the values that the step may change, and seed the generators."""
        step.losses = losses_seen()
        if self._ends:
            return
        plan, frame = self._plans[step.place], step.frame
        assert frame is not None
        if plan.learns:
            began = time.perf_counter()
            self._note_covered()
            reached = self._coverage.reached()
            if plan.audits and self._audits_steps and step.place not in self._audits:
                self._audits[step.place] = Audit(step.variables.frames, self._covered(), self._local)
            self._undo.keep_all(reached)
            step.learning = Learning(self._coverage, reached)
            self.observing_s += time.perf_counter() - began
        elif plan.late or self._late:
            step.is_copied = True
            self._undo.keep_all(self._coverage.reached())
        else:
            self._undo.keep(plan)
        self._seeds.sow(self._world.rank(), "step", *self._position.section_key, self._position.index)
        self._began_at = time.perf_counter()
        if self._rehearsal is not None:
            self._rehearsal.begin(step)

    def _take_back(self, step: Step) -> None:
        """Restore the values that an undone step has changed.

        Called again immediately before the step is repeated, because code after the step has run in between.
        """
        if step.frame is None or step.is_last:
            return
        changed = self._undo.take_back()
        self._sent.clear()  # the version counters have changed
        if changed:
            self._lacks = True
            self._why_lacks = (
                f"{changed[0]} was changed before the commit of a step, for the first time after the first"
                " steps, so that there is no copy of it"
            )
        elif step.went_on and step.learning is None and not step.is_copied and (unseen := self._unseen(step)):
            self._lacks = True
            self._why_lacks = (
                "the program caught the error of a call that a loss had interrupted, and went on: the step may have"
                f" changed {unseen.removesuffix('{}')}, of which there is no copy"
            )
        step.variables.write({n: assign(old, copy) for n, (old, copy) in self._begin_values[step.place].items()})
        if self._batches is not None:
            self._batches.take_back()

    def _unseen(self, step: Step) -> str:
        """Return the name of a value that the program changes after the commit without a copy or a version counter."""
        plan = self._plans[step.place]
        unseen = {n for n in plan.unseen - plan.saved if not (plan.modules and n.endswith("{}"))}
        return min(unseen, default="")

    def _fill_variables(self, frame: FrameType) -> None:
        """Assign the received values to the variables of a loop."""
        place = _place_of(frame)
        values, kept = self._pending_values.get(place), _latest(self._pending_kept)
        self._kept_at = ""
        self._pending_values, self._pending_kept = {}, {}  # those of other places are older
        if values is None:
            return
        # The rank's own variables come from its backup rank, unless the program has reset them. Until the steps at a
        # place have shown which variables these are, the backup rank has all of them.
        mine = {name for plan in self._plans.values() for name in (kept if plan.learns else plan.variables)}
        mine -= self._reset.get(place, set())
        values |= {n: v for n, v in kept.items() if n in values and n in mine}
        there = variables.LoopVariables(program_frames(frame))
        old = there.read(values)
        there.write({name: assign(old.get(name), value) for name, value in values.items()})

    def _commit_by_hand(self, step: Step) -> None:
        if step.learning is not None:
            self._learn(step)
        self._commit_early()
        if step.learning is not None:
            step.at_commit = self._own_digests(step)

    def _find_unsent(self) -> None:
        """Detect a change of one of this rank's own tensors after the commit that the first steps did not show.

        The backup rank lacks that change until the next commit. Later steps are therefore committed at their end.
        """
        if not self._sent:
            return
        names = {name for plan in self._plans.values() for name in plan.own} & self._sent.keys()
        for name in names:
            tensor = self._coverage.buffer(name) if name in self._coverage.buffers else self._own_named(name)
            if tensor is not None and _version(tensor) != self._sent[name]:
                self._unsent, self._wants_late = name, True
                return

    def _own_named(self, name: str) -> Tensor:
        return self._own[int(name[len("own[") : -1])]

    def _keeps_version(self, name: str) -> bool:
        return name in self._coverage.buffers or name.startswith("own[")

    def _own_digests(self, step: Step) -> dict[str, int]:
        """Return hashes of the values that ranks store for each other."""
        found = {name: digest(value) for name, value in self._variables_now(step).items()}
        return found | {name: digest(tensor) for name, tensor in self._all_own().items()}

    def _check_what_follows(self, step: Step) -> None:
        """Report values that change after ``step.commit()``, which no other rank stores. Only in a learning step."""
        if not step.at_commit:
            return
        plan, now = self._plans[step.place], self._own_digests(step)
        for name in sorted(plan.variables | plan.own):
            if now.get(name) != step.at_commit.get(name):
                self._complaints.append(
                    f"{name} differs between ranks and is changed after step.commit(), so that no other rank has its"
                    " value if this one is lost.\n  Change it before step.commit()"
                )

    def _commit(self) -> None:
        """Return when all ranks agree that the step is complete.

        Raises:
            _Undone: The ranks have not agreed.
        """
        world, lineage, step = self._world, self._world.lineage, self._step
        assert step is not None
        if losses_seen() != step.losses:
            # The program may have caught the error. The interrupted call is still incomplete.
            self._agree(_UNDONE)
        plan = self._plans[step.place]
        differing = {name.removeprefix(_VARIABLE) for name in self._differing}
        exchanges = not step.is_last and (plan.learns or plan.exchanges or bool(differing))
        step.leaves, outcome = self._leaves, _SENDS
        if exchanges:
            own = self._own_values(step, differing)
            if not (plan.sends_always or self._own or differing):
                outcome = self._agree(_SENDS if own else self._wish())
                exchanges = outcome == _SENDS
        if exchanges:
            self._buddies.exchange(world, own)
        if outcome == _SENDS:
            step.leaves = self._leaves
            outcome = self._agree(self._wish())
        self._outcome = outcome
        step.committed = True
        if step.base is not None:
            self._seeds.base, self._seeds.agreed = step.base, True
        if exchanges:
            self._buddies.commit(world, self._seats())
            self._sent |= {n: _version(t) for n, t in own.items() if self._keeps_version(n)}
            self._unsent = ""
            self._last_variables |= {n: t for n, t in own.items() if n.startswith("variables(")}
            self._sent_variables |= step.sent
            self._inherited.clear()
            plan.own |= differing & self._coverage.buffers.keys()
            plan.variables |= differing - self._coverage.buffers.keys()
            self._differing.clear()
        if self._outcome == _LATE:
            self._late = True
        if lineage is not None and lineage.decided is not None:
            step.broken = True  # the group is broken, but the step is complete
        step.losses = losses_seen()

    def _commit_early(self) -> None:
        """Commit within the step. No call may follow in it: a loss in that call could no longer undo the step."""
        self._commit()
        assert self._step is not None
        self._step.calls = calls_made()

    def _finish(self, step: Step) -> None:
        """Finish a ``with`` block that has ended without an error.

        Raises:
            UsageError: The first steps have shown that State could not recover from a loss. Raised on every rank.
            _Undone: The step is undone.
        """
        if step.committed:
            if calls_made() != step.calls:
                self._wants_late = True  # a loss in those calls would have interrupted the rest of the step
            if losses_seen() != step.losses:
                self._cut_off(step)  # the program has caught the error
            self._check_what_follows(step)
            return
        step.went_on = losses_seen() != step.losses
        if step.learning is not None:
            self._learn(step)
        self._commit()

    def _learn(self, step: Step) -> None:
        assert step.learning is not None
        assert step.frame is not None
        plan = self._plans[step.place]
        began = time.perf_counter()
        body_s = began - self._began_at
        complaints, self._complaints = self._complaints, []
        audit = self._audits.get(step.place)
        if plan.audits and audit is not None:
            complaints += audit.complaints(step.variables.frames, step)
        report = step.learning.report(calls_made(), self._variables_now(step), complaints)
        # Choose an interval at which comparing the ranks takes less than 0.5 % of the time.
        report["base"] = self._seeds.base
        report["around"] = {} if not plan.audits or audit is None else audit.around(step.variables.frames)
        report["every"] = min(int(step.learning.seconds / (0.005 * max(body_s, 1e-6))) + _VERIFY_LEAST, 1 << 20)
        reports: list[Any] = [None] * self._world.size()
        if losses_seen() != step.losses:
            raise _Undone
        objects.all_gather_object(reports, report, self._world)
        self._verify_every = max(each["every"] for each in reports)
        step.base = reports[0]["base"]
        complaints = merge(plan, reports, self._coverage)
        self.observing_s += time.perf_counter() - began
        if complaints and self._audits_steps:
            raise UsageError(_refusal(complaints))
        if not plan.audits:
            self._audits.pop(step.place, None)  # it references the values of the variables in the first step
        if not plan.learns:
            self._settle(step)

    def _settle(self, step: Step) -> None:
        """Apply the complete plan of a place."""
        plan = self._plans[step.place]
        self._undo.forget_plan()
        if plan.late and self._world.rank() == 0 and self._audits_steps:
            callsite.warn(
                f"State: steps at {step.place} {plan.why_late}: they are committed at their end, and a copy of"
                f" {_size(self._undo.nbytes)} is made in each. To avoid that, do it before the first optimizer.step();"
                " see docs/resilience.md#what-a-step-is"
            )

    def _meet_variables(self, step: Step, plan: StepPlan) -> None:
        """Compare, before the first step of a loop, the variables that the loop does not assign.

        A process that has just replaced a lost rank may have computed them from results that it does not have:
        ``count = train(); evaluate(count)``. It then takes the values of the other ranks.

        Raises:
            StateLostError: The correct value cannot be determined. Raised on every rank.
        """
        known = {name for each in self._plans.values() for name in each.varying}
        common = {name for each in self._plans.values() for name in each.common} - known
        kept = step.variables.within - step.variables.assigned
        mine = self._computed(self._without_covered(step.variables.read(kept)))
        reports: list[Any] = [None] * self._world.size()
        objects.all_gather_object(reports, (self._received, mine), self._world)
        full = [found for received, found in reports if not received] or [found for _, found in reports]
        for name in sorted(set().union(*(found for _, found in reports))):
            theirs = {digest(found[name]) for found in full if name in found}
            # A replacement process that has not computed it has skipped the loop that computes it.
            lacked = bool(theirs) and any(received and name not in found for received, found in reports)
            if not lacked and len({digest(found[name]) for _, found in reports if name in found}) == 1:
                plan.common.add(name)
            elif len(full) == len(reports) or (not lacked and (len(theirs) > 1 or name in known)):
                plan.varying.add(name)
            elif len(theirs) == 1 and (len(full) > 1 or name in common):
                step.variables.write({name: next(found[name] for found in full if name in found)})
            else:
                raise StateLostError(
                    f"State: the replacement process has another value of the variable {name} than the other ranks,"
                    " and nothing tells which is right.\n  Keep it in a part of the State"
                )
        plan.met = True

    def _computed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values that the program has computed since its first loop began.

        Each process computes earlier values of a variable itself: options, and values that depend on the process, such
        as ``os.environ["ALLRANKS_START"]``. An argument of a function that was called later is recognized by its name.
        """
        return {key: value for key, value in values.items() if self._is_computed(key, value)}

    def _is_computed(self, key: str, value: object) -> bool:
        before = self._at_entry.get(key, _NOTHING)
        if before is _NOTHING:
            before = self._at_entry_by_name.get(_plain_name(key), _NOTHING)
        return value is not before and variables.is_plain(value) and not _same(value, before)

    def _without_covered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that are neither declared as local nor covered by a part."""
        local, covered = self._local_names, self._covered_ids
        return {
            name: value
            for name, value in values.items()
            if id(value) not in covered and not (local and _plain_name(name) in local)
        }

    def _variables_now(self, step: Step, after: bool = False) -> dict[str, Any]:
        """Return the variables that the loop assigns, and reads before it assigns them.

        Args:
            step: The current step.
            after: Also return variables that only the program after the loop reads, and variables that the loop does
                not assign and that are the same on all ranks. Copies of tensors are detached from their computation.
        """
        there, varying = step.variables, self._plans[step.place].varying
        found: dict[str, Any] = {}
        for name, value in self._without_covered(there.read_all()).items():
            if name in there.assigned:
                chosen = variables.can_be_carried(value)
            elif not after:
                chosen = False
            elif name in there.after:
                chosen = variables.can_be_carried(value) or type(value) is Tensor
            else:
                chosen = name not in varying and self._is_computed(name, value)
            if chosen:
                found[name] = value
        return found

    @property
    def _audits_steps(self) -> bool:
        """Whether recovery from a loss is possible. Only then must a program observe the limits of State's coverage."""
        return self._world.lineage is not None or self._disk is not None

    def _covered(self) -> list[Any]:
        """Return all objects of the parts, and those of the State itself."""
        reached = self._coverage.reached()
        found = [*reached.tensors.values(), *reached.arrays.values(), *reached.containers.values()]
        found += [*reached.owners.values(), *reached.generators.values(), *reached.wrappers.values()]
        return [*found, *self._wrappers, *self._local, *self.parts.values(), *self._own]

    def _own_values(self, step: Step, differing: Set[str]) -> dict[str, Tensor]:
        """Return the values that only this rank has, and that its backup rank does not have yet.

        Args:
            step: The current step.
            differing: Buffers and variables that belong to these values from this step on.
        """
        plan = self._plans[step.place]
        changing = {name for each in self._plans.values() for name in each.changing}
        found = {
            name: tensor
            for name, tensor in self._all_own(differing).items()
            if name not in self._last_variables
            and (name not in self._coverage.buffers or name in changing or self._sent.get(name) != _version(tensor))
        }
        names = plan.variables | (differing - self._coverage.buffers.keys())
        if plan.learns or names:
            values = self._variables_now(step)
            chosen = values if plan.learns else {n: v for n, v in values.items() if n in names}
            step.sent = {name: digest(value) for name, value in chosen.items()}
            if any(self._sent_variables.get(name) != now for name, now in step.sent.items()):
                found[f"variables({step.place})"] = pack(
                    (self._position.done, {name: _copied(value) for name, value in chosen.items()})
                )
        return found

    def _all_own(self, differing: Set[str] = frozenset()) -> dict[str, Tensor]:
        """Return all values that only this rank has, as of the last commit, for a backup rank without any of them."""
        plans = self._plans.values()
        names = {name for plan in plans for name in plan.own} | differing
        learnt = any(plan.steps for plan in plans)
        found: dict[str, Tensor] = {f"own[{number}]": tensor for number, tensor in enumerate(self._own)}
        for name in self._coverage.buffers:
            buffer = self._coverage.buffer(name)
            if buffer is not None and buffer.is_cpu and (name in names or not learnt):
                found[name] = buffer
        if any(plan.own_grads for plan in plans):
            grads = {n: p.grad for n, p in self._coverage.parameters().items() if p.grad is not None}
            found |= {f"grad({name})": grad.detach() for name, grad in grads.items()} | {"grads": pack(sorted(grads))}
        return found | self._last_variables

    def _cut_off(self, step: Step) -> None:
        """Record that a loss has interrupted a step after its commit, so this rank lacks results of the step."""
        step.broken = True
        self._lacks = True
        self._why_lacks = (
            f"a loss interrupted step {step.index} of this section after its commit, in a call after optimizer.step()"
            " or step.commit()"
        )

    def _verify(self, step: Step) -> None:
        """Compare the values that must be equal on all ranks: after a recovery, and periodically.

        Raises:
            StateLostError: They differ. Raised on every rank.
        """
        done, every = self._position.done, self._verify_every
        is_due = every and done and done % every == 0 and done != self._verified_at
        everything, begins = self._verifies or is_due, self._position.index == 0
        if not everything and not begins:
            return
        after_recovery, self._verifies, self._verified_at = self._verifies, False, done
        world = self._world
        own = {name for plan in self._plans.values() for name in plan.own}
        mine = {"position": digest(repr(self._position.section_key) + repr((self._position.index, done)))}
        mine |= self._variable_digests(step)
        if everything:
            mine |= {name: found for name, found in self._coverage.common().items() if name not in own}
        if after_recovery:
            mine |= self._around(step)
        # A fast comparison of one hash per rank. The names of shards differ between ranks, so it is not possible for
        # a sharded state. The shift makes an unsigned 64-bit hash fit into int64.
        if not self._sharded or not everything:
            total = torch.tensor([digest(sorted(mine.items())) >> 1], device="cpu")
            totals = torch.empty(world.size(), dtype=torch.int64, device="cpu")
            world.all_gather(totals, total)
            if bool((totals == totals[0]).all()):
                return
        gathered: list[Any] = [None] * world.size()
        objects.all_gather_object(gathered, mine, world)
        names = sorted(set().union(*gathered))
        differ = [name for name in names if len({each[name] for each in gathered if name in each}) > 1]
        if not after_recovery:  # diverged buffers and variables: backup ranks store them from now on
            self._differing = {n for n in differ if n in self._coverage.buffers or n.startswith(_VARIABLE)}
            differ = [name for name in differ if name not in self._differing]
        if differ:
            ranks = [rank for rank, each in enumerate(gathered) if each.get(differ[0]) != gathered[0].get(differ[0])]
            more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
            raise StateLostError(
                f"State: {differ[0].removesuffix('{}')}{more} differs between rank 0 and rank"
                f" {', '.join(map(str, ranks))} at step {done}{' after a loss' if after_recovery else ''}: the weights"
                " would not be those of an undisturbed run.\n  Make all that a step changes a part of the State, and"
                " start the job again from a checkpoint (allranks run --restarts does so by itself)"
            )

    def _around(self, step: Step) -> dict[str, int]:
        """Return hashes of the objects around the parts that were the same on all ranks in the first steps.

        If those of a replacement process differ, the program has changed them: between two steps, or later.
        """
        common = set().union(*(plan.around for plan in self._plans.values()))
        if not common or step.frame is None:
            return {}
        audit = Audit(step.variables.frames, self._covered(), self._local)
        return {f"{n} (no part of the State)": d for n, d in audit.around(step.variables.frames).items() if n in common}

    def _variable_digests(self, step: Step) -> dict[str, int]:
        """Return hashes of the variables that ranks have in common when a step begins."""
        plans, reset = self._plans.values(), self._reset_names(step.place)
        known = {name for plan in plans for name in plan.known}  # a variable has one name at all places of a function
        own = {name for plan in plans for name in plan.variables} - reset
        return {
            f"{_VARIABLE}{name}": digest(value)
            for name, (_, value) in self._begin_values[step.place].items()
            if name in known and name in step.variables.within and name not in own
        }

    def _wish(self) -> int:
        # The checks are in the order of the votes: the lowest vote of all ranks decides.
        if self._leaves:
            return _LEAVES
        if self._disk is not None and self._disk.has_failed:
            return _UNSAVED
        if self._somebody_comes():
            return _CHANGES
        return _LATE if self._wants_late and not self._late else _STAYS

    def _somebody_comes(self) -> bool:
        """Return whether processes wait to join, and can. Rank 0 polls periodically."""
        lineage, now = self._world.lineage, time.monotonic()
        if self._world.rank() or lineage is None or not lineage.board.launched or now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        if self._position.done and not self._announced:
            lineage.board.write(LOOP, b"%d" % lineage.replica)
            self._announced = True
        if not lineage.somebody_waits() or (self._disk is not None and self._disk.is_writing):
            return False
        obstacle = "" if self._replicas is None else self._replicas.obstacle
        what = (
            f"a sharded model, and {obstacle}" if obstacle else "groups other than the world" if open_groups() else ""
        )
        if what:
            if not self._warned:
                callsite.warn(f"State: ranks have come that cannot join, as the program has {what}")
            self._warned = True
            return False
        return True

    def _seats(self) -> list[int]:
        return list(self._members())

    def _members(self) -> dict[int, int]:
        """Return the start number of each rank slot's process, by rank."""
        lineage = self._world.lineage
        return {} if lineage is None else dict(lineage.members)

    def _take_notice(self, number: int, _: object) -> None:
        self._leaves = True
        self._noticed_at = time.monotonic()
        if self._aside:  # a waiting process executes no step after which it could leave
            raise SystemExit(0)

    def _before_optimizer(self, *_: object) -> None:
        step = self._step
        if step is None or not step.running or step.committed:
            return
        if step.learning is not None:
            began = time.perf_counter()
            step.learning.at_boundary(calls_made(), self._variables_now(step))
            self.observing_s += time.perf_counter() - began
        elif not (self._plans[step.place].late or self._late):
            self._commit_early()

    # --- losses ---

    def _enter(self) -> None:
        """Enter the loop for the first time: connect with the other ranks, and load a checkpoint if one exists."""
        if self._entered:
            return
        self._entered = True
        lineage = self._world.lineage
        if lineage is not None and lineage.replaces and next(_loops_entered):
            raise UsageError(
                "State: another State has begun its loop in this process. A replacement process could not tell in which"
                " of the two the others are.\n  Use one State with all parts; its loops may follow one another"
            )
        if lineage is not None:
            self._not_counted = lineage.tally
            if self._replicas is not None:
                lineage.replica, lineage.on_aside = self._replicas.size, self._wait_aside
        self._look_around()
        self._note_covered()
        there = variables.LoopVariables(program_frames(loop_frame()))
        self._at_entry = {n: v for n, v in there.read(there.within).items() if variables.is_plain(v)}
        self._at_entry_by_name = {key.rpartition(".")[2]: value for key, value in self._at_entry.items()}
        self._meet()
        while not self._position.loaded:
            self._load()

    def _look_around(self) -> None:
        """Find objects around the parts: wrappers of their modules, and random number generators."""
        covered = {id(module) for part in self._coverage.modules for module in part.modules()}
        found = surroundings(loop_frame(), self._local)
        for wrapper in found.wrappers.values():
            if id(wrapper.module) in covered and not any(wrapper is each for each in self._wrappers):
                self._wrappers.append(wrapper)
        self._coverage.set_wrappers(self._wrappers)
        self._torchs = [each for each in self._wrappers if isinstance(each, TORCHS_DDP)]
        for wrapper in self._wrappers:
            torchs_ddp.check("model", wrapper)
        self._seeds.adopt({**self._coverage.reached().generators, **found.generators})

    def _note_covered(self) -> None:
        self._covered_ids = set(map(id, self._coverage.reached().tensors.values()))

    def _load(self) -> None:
        """Continue from the newest checkpoint. Like a step, this is complete when all ranks agree."""
        assert self._disk is not None
        try:
            found = self._disk.load()
            self._agree(_ALL)
        except (*LOSSES, _Undone):
            self._recover()
            return
        if found is not None:
            position, self._seeds.base, self._generators = found
            self._position.take(position)
            self._seeds.agreed = True
        self._position.loaded = True

    def _meet(self) -> None:
        """Switch from the replay log to the group of the loop, and receive the state if this process lacks it."""
        prelude, decision = self._world.engine, self._world.entered
        if not isinstance(prelude, Prelude):
            return
        if prelude.engine is None:
            self._lacks = True
            self._recover()
            return
        self._world.use(prelude.engine)
        early, lineage = self._world.early, self._world.lineage
        assert early is not None
        assert lineage is not None
        lacks = prelude.lacks or early.lacks
        self._lacks = lacks or decision is not None
        try:
            if lineage.generation == 1:
                early.enter()
            else:
                self._recovered = True
                renew_groups()
            if decision is not None:
                self._hand_over(*_full_and_empty(decision))
            else:
                self._complete(lacks)
        except (*LOSSES, _Undone, JoinError):
            self._recover()

    def _complete(self, lacks: bool) -> None:
        """Send the state to ranks that have replayed only part of the calls before the loop."""
        flags = torch.zeros(self._world.size(), dtype=torch.uint8, device="cpu")
        self._world.all_gather(flags, torch.tensor([lacks], dtype=torch.uint8, device="cpu"))
        empty = flags.nonzero().flatten().tolist()
        if empty:
            self._hand_over([rank for rank in range(len(flags)) if rank not in empty], empty)

    def _recover(self) -> None:
        """Continue with the remaining ranks, and with the processes that have replaced lost ranks.

        Like a step, this is complete when all ranks agree: no rank begins a step while another still waits for its
        state.
        """
        vain = 0
        self._kept_at = ""
        self._differing.clear()
        if self._undone is not None:
            self._take_back(self._undone)  # once more: the program has run code after the step
            self._undone = None
        while True:
            before = self._world.size()
            progress = NEWCOMER if self._lacks else self._position.done
            abort_groups()  # a rank that waits there for the lost rank must also reach advance()
            successor = advance(self._world, progress=progress, replaces=True)
            self._aside = False
            full, empty = _full_and_empty(successor.decision)
            if not full or (self._lacks and successor.rank in full):
                # In the second case, the ranks decided on the loss before this rank detected that it cannot undo the
                # step.
                raise self._nobody_left()
            if self._replicas is not None and not self._replicas.obstacle:
                self._replicas.check(successor.decision.claims)
                self._replicas.renumber(self._world)
            if not self._lacks:
                self._check_ranks(before)
                self._undo.clear()
                for wrapper in self._wrappers:
                    if isinstance(wrapper, TORCHS_DDP):
                        torchs_ddp.renew(wrapper)
                    else:
                        wrapper.renew()
                self._count()
            self._lacks = self._lacks or successor.rank in empty  # it has waited for its replica
            if before == 1 < self._world.size():
                for plan in self._plans.values():
                    plan.steps = plan.boundaries = 0  # a single rank has not learned which values differ between ranks
            self._verifies = True
            try:
                renew_groups()
                if self._replicas is not None and not self._replicas.obstacle:
                    self._replicas.check_groups()
                self._hand_over(full, empty)
            except (*LOSSES, _Undone):
                continue
            except JoinError:  # from members of a group, one of which may be lost
                vain += 1
                if vain == _VAIN:
                    raise
                continue
            self._recovered = True
            return

    def _count(self) -> None:
        """Update the counts for the current generation. The result is the same on all ranks."""
        lineage = self._world.lineage
        assert lineage is not None
        counted = lineage.tally - self._not_counted
        self.replaced, self.lost, self.joined = counted.replaced, counted.lost, counted.joined

    def _follow_count(self, counted: Tally) -> None:
        """Continue from the counts of a rank in the same generation."""
        lineage = self._world.lineage
        assert lineage is not None
        self._not_counted = lineage.tally - counted
        self._count()

    def _hand_over(self, full: list[int], empty: list[int]) -> None:
        """Send the state to the ranks that have none. This is complete when all ranks agree."""
        if not full:
            raise self._nobody_left()
        world, seats = self._world, self._seats()
        me, machines = world.rank(), [member.machine for member in world.members]
        came: dict[str, Tensor] = {}
        self._share_plans(full[0])
        if empty and self._unsent_anywhere():
            raise StateLostError(
                f"{self._unsent or 'a tensor'} differs between ranks and was changed after the commit of a step: nobody"
                " has the value of the lost rank. The first steps had not shown such a change.\n  Start the job again"
                " from a checkpoint (allranks run --restarts does so by itself)"
            )
        # All ranks iterate in the same order, so that each send meets its receive.
        for rank in empty:
            donors = handover.Donors(rank, full, machines, self._sharded)
            if me == rank:
                came = self._receive(donors)
                continue
            kept_by = self._buddies.keeper_of(seats[rank])
            keeper = seats.index(kept_by) if kept_by in seats and seats.index(kept_by) in full else None
            if kept_by is not None and keeper is None:
                self._miss(seats[rank], kept_by, first=me == full[0])
            if me in full:
                self._send(donors, keeper)
            if me == keeper:
                objects.send_object_list([self._buddies.kept], rank, world)
        gone = self._take_over(seats, full)
        self._lacks, self._why_lacks = False, ""
        renewed = bool(empty or gone) and self._keeps_own
        if renewed:  # a new process stores no backup yet; all values are as of the last commit
            self._buddies.forget()
            self._sent.clear()
            self._unsent = ""
            mine = {**self._all_own(), **{n: t for n, t in came.items() if n.startswith(("variables(", "grad"))}}
            self._buddies.exchange(world, mine)
        self._agree(_ALL)
        if renewed:
            self._buddies.commit(world, seats)
            self._inherited.clear()

    def _unsent_anywhere(self) -> bool:
        """Return whether any rank's own values have changed since it sent them. If so, the lost rank's have, too."""
        found = torch.tensor(bool(self._unsent), dtype=torch.uint8, device="cpu")
        self._world.all_reduce(found, ReduceOp.MAX)
        return bool(found)

    def _share_plans(self, source: int) -> None:
        """Distribute one rank's plans to all ranks, because a loss may have interrupted them at different moments."""
        buddies, seeds = self._buddies, self._seeds
        mine = (self._plans, self._late, self._verify_every, seeds.base if seeds.agreed else None)
        message: list[Any] = [mine, (buddies.ring, buddies.step)]
        objects.broadcast_object_list(message, source, self._world)
        self._plans, self._late, self._verify_every, base = message[0]
        buddies.ring, buddies.step = message[1]  # all ranks must agree on the backup ranks
        if base is not None:
            self._seeds.base, self._seeds.agreed = base, True
        for plan in self._plans.values():
            plan.met = False  # a replacement process may have computed other values
        self._undo.forget_plan()

    def _send(self, donors: handover.Donors, keeper: int | None) -> None:
        """Send a rank the state that all ranks have in common."""
        shared = {
            "position": self._position,
            "counts": (self.replaced, self.lost, self.joined),
            "keeper": keeper,
            "variables": {
                place: {name: copy for name, (_, copy) in values.items()}
                for place, values in self._begin_values.items()
            },
            "reset": {place: self._reset_names(place) for place in self._begin_values},
            "flags": self._coverage.flags(),
            "attributes": self._coverage.attributes(),
        }
        handover.send({**self.parts, _EXTRAS: self._coverage.extras(self._has_grads)}, shared, self._world, donors)

    def _receive(self, donors: handover.Donors) -> dict[str, Tensor]:
        """Receive the state, and this rank's values from its backup rank. Return the latter."""
        world, extras = self._world, self._coverage.extras(False)
        shared = handover.receive({**self.parts, _EXTRAS: extras}, world, donors)
        self._position.take(shared["position"])
        self._follow_count(Tally(*shared["counts"]))
        self._coverage.set_extras(extras)
        self._coverage.set_attributes(shared["attributes"])
        self._coverage.set_flags(shared["flags"])
        self._pending_values, self._reset = shared["variables"], shared["reset"]
        self._received = True
        # Before its first step, a replacement process runs the code at the start of an epoch, such as
        # `scheduler.step()`. The other ranks have already run it, so its effect must be undone.
        self._arrived = self._coverage.keep_light()
        self._last_variables, self._sent_variables = {}, {}
        if shared["keeper"] is None:
            return {}
        message: list[Any] = [None]
        objects.recv_object_list(message, shared["keeper"], world)
        kept: dict[str, Tensor] = {n: tensor for n, tensor in message[0].items() if self._belongs_to_rank(n)}
        self._coverage.set_own(kept)
        self._pending_kept = {name: value for name, value in kept.items() if name.startswith("variables(")}
        # This process has its predecessor's backup rank. Without this copy, a variable that the backup rank has but
        # this process lacks would not be reported as reset.
        self._last_variables = dict(self._pending_kept)
        self._sent_variables = {name: digest(value) for name, value in _latest(self._pending_kept).items()}
        return kept

    def _belongs_to_rank(self, name: str) -> bool:
        """Return whether a rank receives the value with this name from its backup rank instead of its donor.

        The backup rank may have more values, from a time before the first steps had shown which values differ between
        ranks.
        """
        plans = self._plans.values()
        if name in self._coverage.buffers:
            return not any(plan.steps for plan in plans) or any(name in plan.own for plan in plans)
        return not name.startswith("grad") or any(plan.own_grads for plan in plans)

    def _reset_names(self, place: str) -> set[str]:
        """Return this rank's variables that differ from its backup rank's, because the program has reset them."""
        begin = self._begin_values.get(place, {})
        return {name for name, sent in self._sent_variables.items() if name in begin and digest(begin[name][1]) != sent}

    @property
    def _has_grads(self) -> bool:
        return any(plan.grads or plan.learns for plan in self._plans.values())

    @property
    def _keeps_own(self) -> bool:
        """Whether ranks store values for each other. The same on all ranks."""
        return bool(self._own or self._coverage.buffers or any(plan.exchanges for plan in self._plans.values()))

    def _take_over(self, seats: list[int], full: list[int]) -> bool:
        """Pass the ``own`` tensors of permanently lost ranks to the program. Return whether such ranks exist.

        Raises:
            StateLostError: No remaining rank has them, and the program has passed ``inherit``.
        """
        buddies = self._buddies
        gone = [seat for seat in buddies.ring if seat not in seats] if self._own else []
        for seat in gone:
            keeper = buddies.keeper_of(seat)
            if keeper not in [seats[rank] for rank in full]:
                if self._inherit is not None:
                    raise self._unkept(seat, keeper)
            elif keeper == seats[self._world.rank()] and seat not in self._inherited:
                self._inherited.add(seat)
                if self._inherit is not None:
                    self._inherit(buddies.kept_own(self._own))
                else:
                    callsite.warn(
                        f"rank {seat} is gone, and its tensors (own=) with it: State(inherit=...) is given them"
                    )
        return bool(gone)

    def _unkept(self, seat: int, keeper: int | None, what: str = "tensors (own=)") -> StateLostError:
        return StateLostError(
            f"rank {seat} is lost, and rank {keeper}, which kept its {what}: nobody has them.\n  Start the"
            " job again from a checkpoint (allranks run --restarts does so by itself)"
        )

    def _miss(self, seat: int, keeper: int, first: bool) -> None:
        """Handle the loss of a rank together with its backup rank.

        Raises:
            StateLostError: The lost values include ``own`` tensors, variables, or gradients.
        """
        plans = self._plans.values()
        if self._own:
            raise self._unkept(seat, keeper)
        if any(plan.variables or plan.own_grads for plan in plans):
            raise self._unkept(seat, keeper, "variables and gradients")
        if first and any(plan.own for plan in plans):
            callsite.warn(
                f"rank {seat} is lost, and rank {keeper}, which kept its buffers: its process gets those of another"
                " rank, and the result is not that of an undisturbed run to the last bit"
            )

    def _warn_of_shards(self) -> None:
        """Warn at the start if a lost rank could not be replaced, because no other rank has its shards."""
        lineage, me = self._world.lineage, self._world.rank()
        if me or lineage is None or not lineage.replaces:
            return
        for name, tensor in dtensors_in(self.parts):
            layout = layout_of(tensor)
            if layout is not None and not layout.is_replicated:
                callsite.warn(
                    f"State: each rank has shards of {name} that no other rank has. A lost rank cannot be replaced: the"
                    " job ends. Use a mesh with a replicated dimension; see docs/resilience.md"
                )
                return

    def _check_ranks(self, size: int) -> None:
        """Raise if the number of ranks has changed and a part requires a fixed number."""
        if self._world.size() == size:
            return
        for wrapper in self._torchs:
            torchs_ddp.check_renumbered(wrapper, self._world)
        if self._replicas is not None and self._replicas.obstacle:
            raise UsageError(
                f"State: a model that is sharded over {size} ranks cannot go on with {self._world.size()}, as"
                f" {self._replicas.obstacle}. Let lost ranks be replaced (allranks run --elastic, --respawns)"
            )

    def _wait_aside(self) -> None:
        """Wait until other ranks complete this rank's replica again. Until then this process has no state."""
        self._aside = self._was_aside = self._returned = True
        if self._disk is not None:
            self._disk.settle()  # a save that the loss has interrupted is not a failure of this process
        if self._leaves:
            raise SystemExit(0)
        with torch.no_grad():
            for tensor, first in zip(self._own, self._first_own, strict=True):
                tensor.copy_(first)  # another rank has passed their content to the program
        callsite.warn(
            f"State: rank {self._world.rank()} waits. A rank of its replica of the model is lost, and nobody takes its"
            " place; it goes on when one comes"
        )

    def _nobody_left(self) -> AllranksError:
        lineage = self._world.lineage
        assert lineage is not None
        if lineage.board.read(OVER) or lineage.others_have_ended():
            if self._was_aside:
                destroy_process_group()
                raise SystemExit(0)
            return ExcludedError(
                f"rank {lineage.seat}: the training was over when this process came to take a lost rank's place"
            )
        why = self._why_lacks or "all ranks that had the state of the training are lost"
        return StateLostError(
            f"rank {lineage.seat}: {why}.\n  Start the job again from a checkpoint (allranks run --restarts does so by"
            " itself)"
        )

    def _restore(self) -> None:
        """Set the generators to their state in the checkpoint from which this job started."""
        if self._generators is not None:
            RandomState().load_state_dict(self._generators)
            self._generators = None


class Step:
    """One step: a context in which a loss does not end the program.

    Attributes:
        batch: A batch of the source. If the source is a number: the index.
        index: Number of the step in its section. It is negative after the ``with`` block of a step that was undone, so
            that ``if step.index == 99: break`` and ``if (step.index + 1) % 100 == 0: save()`` have no effect.
        committed: Whether all ranks have agreed that the step is complete.
    """

    def __init__(self, state: State, batch: Any, index: int) -> None:
        self.batch = batch
        self.index = index
        self.committed = False
        self.entered = self.running = self.broken = self.leaves = False
        self.is_copied = False  # everything that it may change
        self.went_on = False  # after a call that a loss has interrupted
        self.place = ""
        self.frame: FrameType | None = None
        self.variables = _NO_VARIABLES
        self.learning: Learning | None = None
        self.losses = self.calls = 0
        self.is_last = False  # the empty last step of a loop of epochs
        self.at_commit: dict[str, int] = {}
        self.sent: dict[str, int] = {}  # hashes of the variables that the backup rank has after the commit
        self.base: int | None = None
        self._state = state

    def forget(self) -> None:
        """Release the program's functions. Their variables reference the step, and the cycle would keep its tensors."""
        self.frame, self.variables = None, _NO_VARIABLES

    def commit(self) -> None:
        """End the part of the step that a loss undoes.

        Call it after the last communication of the step, and before the program changes anything that is not restored.
        Optimizers of the state call it before their ``step()`` if possible. A step without a call is committed at its
        end.
        """
        if not self.committed:
            self._state._commit_by_hand(self)

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
        except (*LOSSES, _Undone) as loss:
            error = loss
        finally:
            self.running = False
            if self.learning is not None:
                self.learning.close()
        if error is None:
            if self._state._rehearsal is not None:
                self._state._rehearsal.finish(self)
            return True
        if not self._is_loss(error):
            return False
        self.broken = True
        if self.committed:
            self._state._cut_off(self)
        else:
            self.index = _UNDONE_INDEX
            self._state._undone = self
            self._state._take_back(self)
        return True

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether a lost rank has caused the error, directly or through an exception of the program."""
        seen: BaseException | None = error if isinstance(error, Exception) else None
        while seen is not None:
            if isinstance(seen, (*LOSSES, _Undone)):
                return True
            seen = seen.__cause__ or seen.__context__
        return False


def _full_and_empty(decision: Decision) -> tuple[list[int], list[int]]:
    """Return the ranks that have the state of the training, and those that have none."""
    full = [rank for rank, claim in enumerate(decision.claims) if claim.progress >= 0]
    return full, [rank for rank in range(len(decision.claims)) if rank not in full]


def _unwrapped(part: Any) -> Any:
    """Return the module in a DistributedDataParallel. A replacement process may have another wrapper."""
    return part.module if isinstance(part, WRAPPERS) else part


def _latest(packed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the variables in a backup for all places, each as of the last commit that sent it."""
    found: dict[str, Any] = {}
    for _, values in sorted((unpack(each) for each in packed.values()), key=lambda each: int(each[0])):
        found |= values
    return found


def _place_of(frame: FrameType) -> str:
    """Return the name of a place in the program. It is the same in all processes."""
    return _place(frame.f_code.co_filename, frame.f_lineno)


@functools.cache  # of a program's loops
def _place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


@functools.cache  # of a program's variables
def _plain_name(key: str) -> str:
    """Return the name of a variable without the name of its function."""
    return key.rpartition(".")[2]


def _same(value: object, other: object) -> bool:
    # Compare texts, because a NaN is not equal to itself.
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def _copied(value: Any) -> Any:
    """Return the value of a variable, with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(map(_copied, value)) if type(value) is tuple else value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def _refusal(complaints: Sequence[str]) -> str:
    more = f"\n({len(complaints) - 3} more of this kind)" if len(complaints) > 3 else ""
    return (
        "State: a lost rank could not be replaced without a change of the result.\n"
        + "\n".join(complaints[:3])
        + more
        + "\n  See docs/resilience.md#what-a-step-is"
    )
