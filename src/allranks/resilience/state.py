"""The loop of a training that survives losses.

A step is done when all ranks agree that it is: its *commit*. A loss before the commit undoes the step on every
survivor, and it is repeated; a loss after it does not touch the step. So the survivors are always at the same step,
with the same values, and a process that replaces a lost rank gets them from the memory of one of them.

Where the commit is follows from the first steps (`learning`): before the first optimizer runs, if nothing after that
needs another rank, so that only little has to be copied; else at the end of the step, with copies of all that it
changes. What a State covers is in `coverage`, what only one rank has in `buddies`, what it refuses in `audit`.

Random numbers need not be restored: they follow from the position of the step (`seeds`).
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

# A rank's vote at the commit of a step; the outcome is the least of all. After _SENDS values are sent to the backups,
# and the ranks vote again.
_UNDONE, _SENDS, _LEAVES, _UNSAVED, _CHANGES, _LATE, _STAYS = range(7)
_SOME, _ALL = 1, 2  # what ranks say to other questions
_LOOK_S = 0.25  # between two looks at whether others wait to join
_TOGETHER_S = 5.0  # after a signal, for others to get it
_VERIFY_LEAST = 50  # steps between two comparisons of the ranks, at least
_ABANDONED = (
    "State: the program has left the loop after a step that a loss has undone, so that the step is missing.\n  Leave"
    " it only if the step is done: `if step.committed and ...: break`"
)
# Programs ask for `index == n`, `index % n == 0` and `(index + 1) % n == 0`. The number is prime, and half of the one
# after it, too: no n but 1 and 2 that anybody uses divides either.
_UNDONE_INDEX = -1_000_000_007
_NOTHING = object()
_NO_VARIABLES = variables.LoopVariables(())
_loops_entered = itertools.count()
_EXTRAS = "(buffers and gradients)"  # a part of what is handed over, besides those of the program
_VARIABLE = "variable "  # before the name of one, where it is compared
_VAIN = 5  # so many attempts to connect all groups are enough


class _Undone(Exception):
    """The step is not done, because a rank was lost. Internal: a step's ``with`` takes it."""


class State:
    """What a training consists of, and its loop, which survives the loss of ranks.

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

    When a rank is lost in a step, the others take back what they did of it. Under ``allranks run --elastic`` the
    launcher starts another process in its place, which runs the program from the top, gets the state from another
    rank's memory when it reaches the loop, and the step is repeated: the weights at the end are, to the last bit, those
    of a run without a loss. Where nobody takes the place the others go on without it: ranks have other numbers then,
    ``get_rank()`` and ``get_world_size()`` say which, and an ``allranks.data.DistributedSampler`` deals what is left of
    the epoch to those that are left. Hosts that come later join after a step, in the same way.

    Whatever is called on other ranks must be in a step: a loss outside of it ends the program. A section of one step is
    ``for step in state.steps(1): with step: evaluate()``.

    Args:
        reseed: seed torch's generators, and ``random``, at the beginning of each step, so that a repeated step draws
            the same numbers, on the process that takes a place, too.
        own: tensors on the CPU that have other values on each rank, such as a sum of losses. Another rank keeps them,
            as of the commit of each step.
        inherit: called with the tensors of ``own`` of a rank that is gone for good, because it has left or because
            nobody takes its place. It is called once, on the rank that has kept them, before the next step, to add them
            to its own ones: ``lambda theirs: loss_sum.add_(theirs[0])``. Without it they are gone; a warning says so.
        leave_on: signals that announce the end of this process, such as ``signal.SIGTERM`` of a cloud that takes a host
            back. After one the rank finishes its step, leaves, and ends with exit code 0; the others go on without it
            and repeat nothing. Given in the main thread.
        checkpoints: where the state is written to the disk, and how often. The loop begins with the newest checkpoint
            in the folder, if there is one: the step after it is the next, and the weights at the end are those of a run
            that was never stopped. None: the state is in memory alone.
        local: objects, and names of variables, that may differ between ranks, are not restored, and are lost with their
            rank: a progress bar, a list that is only printed. The training must not depend on them.
        parts: modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``, tensors, NumPy
            arrays, generators, dicts, lists, and objects with attributes. The same values on all ranks.

    Attributes:
        parts: the parts, by name; of a wrapper such as DistributedDataParallel the module in it.
        replaced: how often another process has taken the place of a lost rank.
        lost: how many ranks have been lost, with those that were lost before they got the state.
        joined: how many ranks have come later. These three are the same on all ranks, in each step.
        observing_s: seconds that this process has spent on observing the first steps.

    Raises:
        NotInitializedError: there is no process group yet.
        UsageError: a part cannot be one, or a checkpoint cannot hold it. In the first steps, on every rank: the program
            changes something that is not covered; names it, and the line to add.
        CheckpointError: in the loop: a checkpoint cannot be loaded, or was not written; on every rank.
        StateLostError: in the loop, on every rank: no rank has the state, or a part of it, any more; or the ranks have
            come to differ.

    Cost:
        a step: an all_reduce of 8 bytes, the seeding of generators, and a copy of what a step changes before it is
        committed; if ranks have values of their own, messages with them. The first two steps at each place of a
        program: copies and hashes of everything. Every N steps: a hash of everything, below 0.5 % of the time. A loss:
        some round trips to the launcher's store, making the group, hashes, and the size of the state through shared
        memory or TCP. A checkpoint: a copy of this rank's share of the state, while the loop waits; the rest happens in
        the background.
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
        # Where the program is; that of a process that replaces another lags behind the training.
        self._loop, self._epoch, self._section = 0, -1, 0
        self._batches: Batches | None = None
        self._step: Step | None = None
        self._undone: Step | None = None  # to be repeated
        self._abandoned = False
        self._plans: dict[str, StepPlan] = {}
        self._audits: dict[str, Audit] = {}
        self._complaints: list[str] = []  # for the next learning step, in which all ranks hear them
        self._late = False  # everywhere, as a step has called other ranks after its commit
        self._wants_late = False
        # The variables of a place when its last step began, each with a copy of its value.
        self._begin_values: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._differing: set[str] = set()  # what ranks have come to differ in, until the next commit
        self._kept_at = ""  # the place whose variables have been copied since the program could change them
        self._loop_variables = _NO_VARIABLES  # of the loop that runs
        self._at_entry: dict[str, Any] = {}  # plain variables when the first loop began
        self._at_entry_by_name: dict[str, Any] = {}  # the same, without the names of functions
        self._covered_ids: set[int] = set()  # of tensors that variables may hold, too
        self._pending_values: dict[str, dict[str, Any]] = {}  # received, for the first step there
        self._pending_kept: dict[str, Tensor] = {}
        self._reset: dict[str, set[str]] = {}  # variables that the program has begun anew with since the last commit
        self._last_variables: dict[str, Tensor] = {}  # what the backup has, by place
        self._sent_variables: dict[str, int] = {}  # their hashes
        self._local_names = {each for each in local if isinstance(each, str)}
        self._verifies = self._received = False
        self._arrived: Callable[[], None] | None = None  # restores values as they came from the other ranks
        self._verify_every = self._verified_at = 0
        self._began_at = 0.0
        self._buddies = Buddies()
        self._sent: dict[str, int] = {}  # versions of what the backup has
        self._unsent = ""  # what has changed since the backup got it, for the first time at such a moment
        self._inherit = inherit
        self._inherited: set[int] = set()  # seats, since the last commit
        self._first_own = [tensor.clone() for tensor in own]
        self._aside = self._was_aside = self._returned = False
        self.replaced = self.lost = self.joined = 0
        self.observing_s = 0.0
        self._not_counted = Tally()  # of that of the world
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
        """Whether this process was told to leave, and does so after the present step."""
        return self._leaves

    @property
    def steps_done(self) -> int:
        """How many steps are done, in all epochs."""
        return self._position.done

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """The epochs, beginning with the one in which the training is.

        Args:
            count: the number after the last one's.
            first: the one with which a training begins that goes on from a checkpoint.
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
                # What the program draws before the first step of an epoch follows from the epoch, too.
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
        finally:  # also where the program leaves the loop by `break`
            self._end_step(self._step, self._batches)
            self._loop, self._section = loop + 1, 0
            if position.loop == loop:
                position.move(self._loop, position.epoch)

    def _end_loop(self, count: int) -> None:
        """The last step of a loop of epochs, in which nothing is done."""
        self._epoch, self._section, self._ends = count, 0, True
        self._write_checkpoint(at_once=True)
        for step in self.steps(1):  # so that no rank is past the loop while another may still need it
            with step:
                pass
        self._ends = False
        self._position.epoch = max(self._position.epoch, count)
        self._announce(OVER, b"1")

    def _begin_loop(self) -> int:
        """The number of the loop of epochs that begins; before it, between two, and after the last are others."""
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
        """The steps of a section, each again until it is done.

        Args:
            source: a DataLoader or any other iterable: a step has one batch of it; or a number of steps. A process that
                replaces another skips the batches that are done: at no cost with allranks' DistributedSampler.

        Raises:
            UsageError: called in the middle of another section.
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
        """End a program that has trained without a loop of epochs, on all ranks."""
        self._ends = True
        self._write_checkpoint(at_once=True)
        for step in self.steps(1):
            with step:
                pass
        self._announce(OVER, b"1")
        raise SystemExit(0)

    def _is_in(self, key: tuple[int, int, int]) -> bool:
        """Whether the training is in this section: not if the others have ended it while this process waited."""
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
                if self._pending_values:  # also where no step is left: the program may read them after the loop
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
                finally:  # also where the program leaves the loop by `break`
                    self._end_step(step, batches)
                self._check_used(step, batches)
                if step.committed:
                    if step.frame is not None:
                        # A loss before the next step here (in this commit on another rank, in a checkpoint, in another
                        # section) makes a process that needs the variables as they are after this step.
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
                self._loop_variables = _NO_VARIABLES  # let go of the program's functions

    def _end_step(self, step: Step | None, batches: Batches | None) -> None:
        """Count a step that the program has left; once only.

        A program that leaves a loop by ``break`` may still hold the generator of its steps. Then the generator does not
        see that, and the next section or epoch calls this.
        """
        if step is None or batches is None or self._step is not step:
            return
        self._step = None
        if step.committed:
            batches.take()
            self._position.index += 1
            self._position.done += not self._ends

    def _check_used(self, step: Step, batches: Batches) -> None:
        """The program has used a step as it should."""
        if not step.entered:
            raise UsageError("a step of State.steps() was not used: write `with step:` around its body")
        if self._batches is not batches:
            raise UsageError(
                "State.steps: two sections were run at the same time.\n  Finish one, or leave it by `break`,"
                " before the next one begins"
            )

    def _check_abandoned(self) -> None:
        """Refuse to continue where the program has left a loop although its last step must be repeated."""
        if self._abandoned:
            self._abandoned = False
            raise StateLostError(_ABANDONED)

    def _end_abandoned(self) -> None:
        if self._abandoned:  # the program has ended without another call, in which this would have been raised
            print(f"allranks.StateLostError: {_ABANDONED}", file=sys.stderr, flush=True)
            os._exit(1)

    def _follow(self, step: Step) -> None:
        """Does what ranks have asked for at the commit of a step."""
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
        """Lets a rank that is to leave stay for one more step, unless all leave now.

        That is where the rank leaves for which it keeps tensors, or where too few would be left, to whom the same may
        have been sent: a signal reaches the ranks of a job one after the other.
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
        """The number of ranks without which the job ends."""
        lineage = self._world.lineage
        table = lineage.board.table() if lineage is not None and lineage.board.launched else None
        return 0 if table is None else table.least

    def _write_last(self, step: Step) -> None:
        """Writes a checkpoint if all ranks leave: nobody is left who has the state."""
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
        """Begins a checkpoint where one is due. That is done when all ranks agree, as a step is.

        Args:
            at_once: whatever is not on the disk is due, and this returns when it is there.
        """
        disk, position = self._disk, self._position
        while disk is not None:
            try:
                if self._recovered:
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
        """The least value of all ranks.

        Raises:
            _Undone: that is 0, or a loss has hit a rank in another call.
        """
        if value == _UNDONE:
            abort_groups()  # a rank may wait there for this one, which makes no further call in this step
        outcome = self._world.agree(value)
        if outcome == _UNDONE:
            raise _Undone
        return outcome

    @property
    def _place(self) -> tuple[int, int]:
        return self._world.rank(), self._world.size()

    # --- what a step calls ---

    def _meet_at(self, step: Step) -> None:
        """Before the program gets a step: its variables are what they were, and ranks have the same state.

        Raises:
            StateLostError: they have not; on every rank.
        """
        step.is_last = self._ends
        frame = step.frame = loop_frame()
        step.place = _place_of(frame)
        if self._loop_variables.is_of(frame):
            step.variables = self._loop_variables
        else:
            step.variables = variables.LoopVariables(program_frames(frame))
            # A generator of the program ends when the program drops it, which a reference to its frame would prevent.
            self._loop_variables = step.variables if variables.is_plain_function(frame) else _NO_VARIABLES
        if self._arrived is not None:
            self._arrived()
            self._arrived, self._kept_at = None, ""
        plan = self._plans.setdefault(step.place, StepPlan())
        if not plan.met:
            # If a rank is lost in the comparison below, the process in its place gets these values.
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
        """Copy the variables that the loop carries, as the next step finds them."""
        self._begin_values[step.place] = {
            name: (value, _copied(value)) for name, value in self._variables_now(step, after=True).items()
        }
        self._kept_at = step.place

    def _begin(self, step: Step) -> None:
        """A step begins: what it may change is copied, and the generators are seeded."""
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
        """Restore what an undone step has changed. Called again before the step is repeated: code after it has run."""
        if step.frame is None or step.is_last:
            return
        changed = self._undo.take_back()
        self._sent.clear()  # these versions
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
        """What the program changes after the commit, so that neither a copy nor a version counter tells of it."""
        plan = self._plans[step.place]
        unseen = {n for n in plan.unseen - plan.saved if not (plan.modules and n.endswith("{}"))}
        return min(unseen, default="")

    def _fill_variables(self, frame: FrameType) -> None:
        """Assign what other ranks have sent for the variables of a loop."""
        place = _place_of(frame)
        values, kept = self._pending_values.get(place), _latest(self._pending_kept)
        self._kept_at = ""
        self._pending_values, self._pending_kept = {}, {}  # those of other places are older
        if values is None:
            return
        # Those that are this rank's own, unless the program has begun anew with them. Until a place has shown which
        # these are, the backup has all of them.
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
        """Notice a tensor of this rank's own that has changed after the commit, which the first steps did not do.

        Its backup lacks that change until the next commit. Later steps are committed at their end.
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
        """Hashes of what ranks keep for each other."""
        found = {name: digest(value) for name, value in self._variables_now(step).items()}
        return found | {name: digest(tensor) for name, tensor in self._all_own().items()}

    def _check_what_follows(self, step: Step) -> None:
        """What changes after ``step.commit()`` is not kept by another rank; a learning step shows it."""
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
        """Returns when all ranks agree that the step is done.

        Raises:
            _Undone: it is not.
        """
        world, lineage, step = self._world, self._world.lineage, self._step
        assert step is not None
        if losses_seen() != step.losses:
            # The program may have caught the error; a call has not happened all the same.
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
            step.broken = True  # the group; the step is done
        step.losses = losses_seen()

    def _commit_early(self) -> None:
        """Commit within the step: no call may follow in it, as nothing would undo the step if that is interrupted."""
        self._commit()
        assert self._step is not None
        self._step.calls = calls_made()

    def _finish(self, step: Step) -> None:
        """The end of a ``with`` block without an error.

        Raises:
            UsageError: the first steps have shown that a loss could not be repaired; on every rank.
            _Undone: the step is not done.
        """
        if step.committed:
            if calls_made() != step.calls:
                self._wants_late = True  # a loss in those calls would have cut the rest of the step off
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
        # So seldom that comparing the ranks takes less than 0.5 % of the time.
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
            self._audits.pop(step.place, None)  # it holds what the variables held in the first step
        if not plan.learns:
            self._settle(step)

    def _settle(self, step: Step) -> None:
        """The plan of a place is complete."""
        plan = self._plans[step.place]
        self._undo.forget_plan()
        if plan.late and self._world.rank() == 0 and self._audits_steps:
            callsite.warn(
                f"State: steps at {step.place} {plan.why_late}: they are committed at their end, and a copy of"
                f" {_size(self._undo.nbytes)} is made in each. To avoid that, do it before the first optimizer.step();"
                " see docs/resilience.md#what-a-step-is"
            )

    def _meet_variables(self, step: Step, plan: StepPlan) -> None:
        """The ranks compare variables that a loop does not assign, before its first step.

        A process that has just replaced a lost rank may have computed them from results that it does not have:
        ``count = train(); evaluate(count)``. Then it takes those of the others.

        Raises:
            StateLostError: nobody can tell which value is right; on every rank.
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
            # A replacement process that has not computed it has skipped the loop that does.
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
        """Plain values that the program has computed since its first loop began.

        What a variable held before that, each process computes itself: options, and what depends on the process, such
        as ``os.environ["ALLRANKS_START"]``. An argument of a function that has been called since is known by its name.
        """
        return {key: value for key, value in values.items() if self._is_computed(key, value)}

    def _is_computed(self, key: str, value: object) -> bool:
        before = self._at_entry.get(key, _NOTHING)
        if before is _NOTHING:
            before = self._at_entry_by_name.get(_plain_name(key), _NOTHING)
        return value is not before and variables.is_plain(value) and not _same(value, before)

    def _without_covered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Without the variables that are declared as local or covered by a part."""
        local, covered = self._local_names, self._covered_ids
        return {
            name: value
            for name, value in values.items()
            if id(value) not in covered and not (local and _plain_name(name) in local)
        }

    def _variables_now(self, step: Step, after: bool = False) -> dict[str, Any]:
        """The variables that the loop assigns, and reads before.

        Args:
            step: the present one.
            after: with those that only the program after the loop reads, detached from their computation, and those
                that the loop does not assign and that are the same on all ranks.
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
        """Whether a loss could be repaired: only then a program must keep to what State covers."""
        return self._world.lineage is not None or self._disk is not None

    def _covered(self) -> list[Any]:
        """All objects that the parts consist of, and those of the State itself."""
        reached = self._coverage.reached()
        found = [*reached.tensors.values(), *reached.arrays.values(), *reached.containers.values()]
        found += [*reached.owners.values(), *reached.generators.values(), *reached.wrappers.values()]
        return [*found, *self._wrappers, *self._local, *self.parts.values(), *self._own]

    def _own_values(self, step: Step, differing: Set[str]) -> dict[str, Tensor]:
        """What only this rank has, and its backup does not have yet.

        Args:
            step: the present one.
            differing: buffers and variables that belong to it from this step on.
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
        """All that only this rank has, as of the last commit, for a backup that keeps nothing yet."""
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
        """A loss has interrupted a step after its commit: this rank does not have what the step should have left."""
        step.broken = True
        self._lacks = True
        self._why_lacks = (
            f"a loss interrupted step {step.index} of this section after its commit, in a call after optimizer.step()"
            " or step.commit()"
        )

    def _verify(self, step: Step) -> None:
        """Compare what all ranks must have in common: after a recovery, and from time to time.

        Raises:
            StateLostError: they differ; on every rank.
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
        if not after_recovery:  # ranks have come to differ in buffers or variables: each one's is kept from now on
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
        """Of the objects around the parts that were the same on all ranks in the first steps.

        If a replacement process has others, the program has changed them: between two steps, or later.
        """
        common = set().union(*(plan.around for plan in self._plans.values()))
        if not common or step.frame is None:
            return {}
        audit = Audit(step.variables.frames, self._covered(), self._local)
        return {f"{n} (no part of the State)": d for n, d in audit.around(step.variables.frames).items() if n in common}

    def _variable_digests(self, step: Step) -> dict[str, int]:
        """Of the variables that ranks have in common when a step begins."""
        plans, reset = self._plans.values(), self._reset_names(step.place)
        known = {name for plan in plans for name in plan.known}  # a variable has one name at all places of a function
        own = {name for plan in plans for name in plan.variables} - reset
        return {
            f"{_VARIABLE}{name}": digest(value)
            for name, (_, value) in self._begin_values[step.place].items()
            if name in known and name in step.variables.within and name not in own
        }

    def _wish(self) -> int:
        if self._leaves:
            return _LEAVES
        if self._disk is not None and self._disk.has_failed:
            return _UNSAVED
        if self._somebody_comes():
            return _CHANGES
        return _LATE if self._wants_late and not self._late else _STAYS

    def _somebody_comes(self) -> bool:
        """Whether processes wait to join, and can. Rank 0 looks, from time to time."""
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
        """The start of each seat's process, by rank."""
        lineage = self._world.lineage
        return {} if lineage is None else dict(lineage.members)

    def _take_notice(self, number: int, _: object) -> None:
        self._leaves = True
        self._noticed_at = time.monotonic()
        if self._aside:
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
        """The loop begins: what was called before is over."""
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
        """Find what the program has around its parts: wrappers of their modules, and generators of random numbers."""
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
        """Goes on from the newest checkpoint. That is done when all ranks agree, as a step is."""
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
        """Joins the others, where this process takes a place."""
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
        """Gives those their state that were given only a part of what the calls before the loop had brought."""
        flags = torch.zeros(self._world.size(), dtype=torch.uint8, device="cpu")
        self._world.all_gather(flags, torch.tensor([lacks], dtype=torch.uint8, device="cpu"))
        empty = flags.nonzero().flatten().tolist()
        if empty:
            self._hand_over([rank for rank in range(len(flags)) if rank not in empty], empty)

    def _recover(self) -> None:
        """Goes on with those that are left, and with those that have taken the places of others.

        That is done when all ranks agree, as a step is: no rank begins a step while another still waits for its state.
        """
        vain = 0
        self._kept_at = ""
        self._differing.clear()
        if self._undone is not None:
            self._take_back(self._undone)  # once more: the program has run what is after the step
            self._undone = None
        while True:
            before = self._world.size()
            progress = NEWCOMER if self._lacks else self._position.done
            abort_groups()
            successor = advance(self._world, progress=progress, replaces=True)
            self._aside = False
            full, empty = _full_and_empty(successor.decision)
            if not full or (self._lacks and successor.rank in full):
                # The second: the loss was decided on before this rank saw that it cannot undo the step.
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
            self._lacks = self._lacks or successor.rank in empty  # it has waited
            if before == 1 < self._world.size():
                for plan in self._plans.values():
                    plan.steps = plan.boundaries = 0  # a rank alone has learnt nothing of what differs between ranks
            self._verifies = True
            try:
                renew_groups()
                if self._replicas is not None and not self._replicas.obstacle:
                    self._replicas.check_groups()
                self._hand_over(full, empty)
            except (*LOSSES, _Undone):
                continue
            except JoinError:  # of members of a group, of whom one may be lost
                vain += 1
                if vain == _VAIN:
                    raise
                continue
            self._recovered = True
            return

    def _count(self) -> None:
        """As of the present generation. All ranks come to the same."""
        lineage = self._world.lineage
        assert lineage is not None
        counted = lineage.tally - self._not_counted
        self.replaced, self.lost, self.joined = counted.replaced, counted.lost, counted.joined

    def _follow_count(self, counted: Tally) -> None:
        """Goes on from what a rank in the same generation has counted."""
        lineage = self._world.lineage
        assert lineage is not None
        self._not_counted = lineage.tally - counted
        self._count()

    def _hand_over(self, full: list[int], empty: list[int]) -> None:
        """Give the state to the ranks that have none. Done when all ranks agree that it is."""
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
        if renewed:  # a new process keeps nothing yet; all are as of the last commit
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
        """Whether ranks have changed what is theirs since their backups got it: then the lost rank had, too."""
        found = torch.tensor(bool(self._unsent), dtype=torch.uint8, device="cpu")
        self._world.all_reduce(found, ReduceOp.MAX)
        return bool(found)

    def _share_plans(self, source: int) -> None:
        """All ranks continue with what one of them has learnt: a loss may have hit them at different moments."""
        buddies, seeds = self._buddies, self._seeds
        mine = (self._plans, self._late, self._verify_every, seeds.base if seeds.agreed else None)
        message: list[Any] = [mine, (buddies.ring, buddies.step)]
        objects.broadcast_object_list(message, source, self._world)
        self._plans, self._late, self._verify_every, base = message[0]
        buddies.ring, buddies.step = message[1]  # all must agree on who is whose backup
        if base is not None:
            self._seeds.base, self._seeds.agreed = base, True
        for plan in self._plans.values():
            plan.met = False  # a new process may have computed other values
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
        """Receive the state, and what the backup of this rank has kept. Returns that."""
        world, extras = self._world, self._coverage.extras(False)
        shared = handover.receive({**self.parts, _EXTRAS: extras}, world, donors)
        self._position.take(shared["position"])
        self._follow_count(Tally(*shared["counts"]))
        self._coverage.set_extras(extras)
        self._coverage.set_attributes(shared["attributes"])
        self._coverage.set_flags(shared["flags"])
        self._pending_values, self._reset = shared["variables"], shared["reset"]
        self._received = True
        # Before its first step a replacement process runs what the program does when an epoch begins:
        # `scheduler.step()`. The others have done that before.
        self._arrived = self._coverage.keep_light()
        self._last_variables, self._sent_variables = {}, {}
        if shared["keeper"] is None:
            return {}
        message: list[Any] = [None]
        objects.recv_object_list(message, shared["keeper"], world)
        kept: dict[str, Tensor] = {n: tensor for n, tensor in message[0].items() if self._belongs_to_rank(n)}
        self._coverage.set_own(kept)
        self._pending_kept = {name: value for name, value in kept.items() if name.startswith("variables(")}
        # This process has its predecessor's backup. What it lacks of that, nobody would be told to begin anew.
        self._last_variables = dict(self._pending_kept)
        self._sent_variables = {name: digest(value) for name, value in _latest(self._pending_kept).items()}
        return kept

    def _belongs_to_rank(self, name: str) -> bool:
        """Whether a rank gets from its backup what is kept under this name, and not from any other rank.

        The backup may have more, from a time when it was not known yet what differs between ranks.
        """
        plans = self._plans.values()
        if name in self._coverage.buffers:
            return not any(plan.steps for plan in plans) or any(name in plan.own for plan in plans)
        return not name.startswith("grad") or any(plan.own_grads for plan in plans)

    def _reset_names(self, place: str) -> set[str]:
        """The variables of this rank that are not what its backup has: the program has begun anew with them."""
        begin = self._begin_values.get(place, {})
        return {name for name, sent in self._sent_variables.items() if name in begin and digest(begin[name][1]) != sent}

    @property
    def _has_grads(self) -> bool:
        return any(plan.grads or plan.learns for plan in self._plans.values())

    @property
    def _keeps_own(self) -> bool:
        """Whether ranks keep something for each other; the same on all ranks."""
        return bool(self._own or self._coverage.buffers or any(plan.exchanges for plan in self._plans.values()))

    def _take_over(self, seats: list[int], full: list[int]) -> bool:
        """Gives the program what ranks had that are gone for good. Whether there are such ranks.

        Raises:
            StateLostError: nobody has it, and the program wants it.
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
        """A rank is lost together with the one that kept what only it had.

        Raises:
            StateLostError: that are tensors that the program has named, variables, or gradients.
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
        """Says in the beginning what a loss would show: that nobody else has a rank's shards."""
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
        """Refuses to go on with another number of ranks where a part is made for so many."""
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
        """This process waits until others come with which it forms a replica again, and has nothing till then."""
        self._aside = self._was_aside = self._returned = True
        if self._disk is not None:
            self._disk.settle()  # a save that the loss has cut off is no failure of this process
        if self._leaves:
            raise SystemExit(0)
        with torch.no_grad():
            for tensor, first in zip(self._own, self._first_own, strict=True):
                tensor.copy_(first)  # another rank has given the program what was in it
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
        """Sets the generators to where they were in the checkpoint with which this job began."""
        if self._generators is not None:
            RandomState().load_state_dict(self._generators)
            self._generators = None


class Step:
    """One step: a context in which a loss does not end the program.

    Attributes:
        batch: of the source; the index, where the source is a number.
        index: the number of the step in its section; below zero after the ``with`` block of a step that was undone, so
            that ``if step.index == 99: break`` and ``if (step.index + 1) % 100 == 0: save()`` do nothing then.
        committed: all ranks have agreed that it is done.
    """

    def __init__(self, state: State, batch: Any, index: int) -> None:
        self.batch = batch
        self.index = index
        self.committed = False
        self.entered = self.running = self.broken = self.leaves = False
        self.is_copied = False  # all that it may change
        self.went_on = False  # after a call that a loss had interrupted
        self.place = ""
        self.frame: FrameType | None = None
        self.variables = _NO_VARIABLES
        self.learning: Learning | None = None
        self.losses = self.calls = 0
        self.is_last = False  # of a loop of epochs: nothing is done in it
        self.at_commit: dict[str, int] = {}
        self.sent: dict[str, int] = {}  # hashes of the variables that the backup has when the step is done
        self.base: int | None = None
        self._state = state

    def forget(self) -> None:
        """Let go of the program's functions: their variables refer to the step, and a cycle would keep its tensors."""
        self.frame, self.variables = None, _NO_VARIABLES

    def commit(self) -> None:
        """End the part of the step that is undone after a loss.

        To be called after the last communication of the step, and before anything is changed that is not restored.
        Optimizers of the state call it before their ``step()`` where that is possible; a step without it is committed
        at its end.
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
        """Whether an error is that of a lost rank, or one that the program has raised because of it."""
        seen: BaseException | None = error if isinstance(error, Exception) else None
        while seen is not None:
            if isinstance(seen, (*LOSSES, _Undone)):
                return True
            seen = seen.__cause__ or seen.__context__
        return False


def _full_and_empty(decision: Decision) -> tuple[list[int], list[int]]:
    """The ranks that have the state of the training, and those that have none."""
    full = [rank for rank, claim in enumerate(decision.claims) if claim.progress >= 0]
    return full, [rank for rank in range(len(decision.claims)) if rank not in full]


def _unwrapped(part: Any) -> Any:
    """The module in a DistributedDataParallel, whose process may have another wrapper."""
    return part.module if isinstance(part, WRAPPERS) else part


def _latest(packed: Mapping[str, Tensor]) -> dict[str, Any]:
    """The variables that a backup has for all places, each as of the last commit that sent it."""
    found: dict[str, Any] = {}
    for _, values in sorted((unpack(each) for each in packed.values()), key=lambda each: int(each[0])):
        found |= values
    return found


def _place_of(frame: FrameType) -> str:
    """A place in the program, which has the same name in all processes."""
    return _place(frame.f_code.co_filename, frame.f_lineno)


@functools.cache  # of a program's loops
def _place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


@functools.cache  # of a program's variables
def _plain_name(key: str) -> str:
    """The name of a variable, without that of its function."""
    return key.rpartition(".")[2]


def _same(value: object, other: object) -> bool:
    # By their texts: a NaN is the same as itself.
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def _copied(value: Any) -> Any:
    """The value of a variable, with copies of its tensors."""
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
