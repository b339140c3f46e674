"""The loop of a training that survives losses.

The class is in four files, each of which uses only those before it: `step_values` (the values that a step changes),
`state_recovery` (a loss and the transfer of the state), `step_commit` (one step), and this file (epochs and sections).

`coverage` finds what a State covers, `backups` stores values that only one rank has, and `audit` rejects uncovered
state. Random numbers are not restored: they follow from the position of the step (`seeds`).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from allranks._base.errors import (
    StateLostError,
    UsageError,
)
from allranks._base.integers import integer_of
from allranks._elastic.joining import OVER
from allranks._elastic.replay import LOSSES
from allranks._elastic.training import fully_sharded, handover, torchs_ddp
from allranks._elastic.training.audit import loop_frame
from allranks._elastic.training.batches import Batches
from allranks._elastic.training.disk import Checkpoints
from allranks._elastic.training.reachable import WRAPPERS
from allranks._elastic.training.rehearsal import EPOCHS
from allranks._elastic.training.seeds import Seeds
from allranks._elastic.training.step import NO_VARIABLES, Step, Undone
from allranks._elastic.training.step_commit import StepCommit

__all__ = ["State", "Step"]

_ABANDONED = (
    "State: the program has left the loop after a step that a loss has undone, so the step is missing.\n  Leave"
    " the loop only if the step is committed: `if step.committed and ...: break`."
)


class State(StepCommit):
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
        check_every: Compare the parts of all ranks every this number of steps, before checkpoints, and at the beginning
            and end of each section, and copy them in memory. If they differ, for example because a memory cell is
            damaged, a warning names the ranks, the tensor and its elements. All ranks then return to their copies and
            repeat the steps. If the values differ again after two repetitions, the program causes it, and all ranks
            raise a StateLostError. None: compare at intervals that take less than 0.5 % of the time, without copies. A
            difference then ends the training.
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
        check_every: int | None = None,
        **parts: Any,
    ) -> None:
        for name, part in parts.items():
            handover.check_part(name, part)
            if isinstance(part, nn.Module):
                fully_sharded.check_not_flat(name, part)
            if isinstance(part, WRAPPERS):
                torchs_ddp.check(name, part)
        handover.check_own(own)
        wrappers = [part for part in parts.values() if isinstance(part, WRAPPERS)]
        plain = {name: _unwrapped(part) for name, part in parts.items()}
        super().__init__(plain, own, local, wrappers, Seeds(reseed), inherit, checkpoints, leave_on, check_every)
        self._ranks_and_sizes = {self._rank_and_size}
        # Position of the program. In a replacement process it is behind the position of the training.
        self._loop, self._epoch, self._section = 0, -1, 0
        self._abandoned = False

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
        # The training may already be in this loop or a later one: in a replacement process, or after a checkpoint.
        if position.loop < loop:
            position.move(loop, max(position.epoch, first))
        try:
            while position.loop == loop and position.epoch < count:
                self._epoch, self._section = position.epoch, 0
                # Random numbers that the program draws before the first step of an epoch also follow from the epoch.
                self._seeds.seed_generators(self._world.rank(), "epoch", loop, self._epoch)
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
        self._epoch, self._section, self._in_last_step = count, 0, True
        self._write_checkpoint(write_now=True)
        for step in self.steps(1):  # no rank leaves the loop while another rank may still need its state
            with step:
                pass
        self._in_last_step = False
        self._position.epoch = max(self._position.epoch, count)
        self._announce(OVER, b"1")

    def _begin_loop(self) -> int:
        """Return the number of the loop of epochs that begins. It is odd; numbers outside of loops are even."""
        if self._batches is not None or self._loop % 2:
            raise UsageError(
                "State.epochs: called within another loop of epochs, or within a section of steps.\n  Write one loop of"
                " epochs after the other, each with sections of steps in it."
            )
        self._loop += 1
        # Without this, a replacement process in the second loop would conclude that the training is over.
        self._announce(OVER, b"")
        return self._loop

    def _announce(self, key: str, value: bytes) -> None:
        history = self._world.history
        if history is not None and history.membership.launched and (value or history.membership.read(key)):
            history.membership.write(key, value)

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
                "State.steps: called within a step. A repeated step would run only a part of the inner loop.\n"
                "  Write a plain loop within the step, or one section after the other."
            )
        self._end_step(self._step, self._batches)
        section, self._section = self._section, self._section + 1
        key, position = (self._loop, self._epoch if self._loop % 2 else 0, section), self._position
        # This process runs the program from the top, and the other ranks have finished this section.
        if key < position.section_key:
            return
        # The program has reached a new section. Otherwise the section continues at the position's index.
        if key > position.section_key:
            position.move(self._loop, self._epoch if self._loop % 2 else position.epoch, section)
        self._ranks_and_sizes.add(self._rank_and_size)
        batches = Batches(source, self._world, position, self._seeds, self._restore_generators, self._ranks_and_sizes)
        yield from self._run_section(batches, key)
        # A replacement process that has skipped the section must continue with the same random numbers.
        self._seeds.seed_generators(self._world.rank(), "after", *key)
        if self._is_in(key):
            position.move(position.loop, position.epoch, section + 1)
        if self._rehearsal is not None and not self._loop % 2 and not self._in_last_step and self._rehearsal.is_over:
            self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        """End the rehearsal of a program that trains without a loop of epochs, on all ranks."""
        self._in_last_step = True
        self._write_checkpoint(write_now=True)
        for step in self.steps(1):
            with step:
                pass
        self._announce(OVER, b"1")
        raise SystemExit(0)

    def _is_in(self, key: tuple[int, int, int]) -> bool:
        """Return whether the training is in this section. False if the others have finished it during a recovery."""
        return self._position.section_key == key

    def _run_section(self, batches: Batches, key: tuple[int, int, int]) -> Iterator[Step]:
        rank_and_size = self._rank_and_size
        # The program may have assigned variables since the last section, so the copies are outdated.
        self._batches, self._copied_at = batches, ""
        try:
            while True:
                if self._returns_to_equal_step(batches):
                    continue
                self._write_checkpoint()
                # The process has waited for its replica, and the others have trained on: its loaded batch is outdated.
                if self._rejoined:
                    self._rejoined = False
                    batches.reload()
                if not self._is_in(key):
                    return
                if self._rehearsal is not None and not self._in_last_step and self._rehearsal.ends_section():
                    return
                if self._rank_and_size != rank_and_size:
                    rank_and_size = self._rank_and_size
                    self._ranks_and_sizes.add(rank_and_size)
                    batches.redistribute()
                if self._pending_values:  # also if no step remains: the program may read them after the loop
                    self._fill_variables(loop_frame())
                if not batches.prepare():
                    if self._returns_to_equal_step(batches, ends=True):
                        continue
                    return
                if self._rehearsal is not None and not self._in_last_step:
                    self._rehearsal.at("loading")
                step = Step(self, batches.batch, self._position.index)
                try:
                    # Before the step is yielded: these calls are outside of `with`, so a loss in them is handled here.
                    self._prepare_step(step)
                except (*LOSSES, Undone):
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
                    # Before `_recover`, which reports whether any rank has unsent values.
                    self._find_unsent()
                    # After the copies of the variables: this call can end the process, or mark the step as broken.
                    self._apply_outcome(step)
                if step.broken:
                    self._recover()
                step.forget()
        # The program has left the loop by `break` or `return`. After an undone step, this would lose a step silently.
        except GeneratorExit:
            if self._undone_step is not None:
                self._abandoned = True
                atexit.register(self._end_abandoned)
            raise
        finally:
            if self._batches is batches:
                self._batches = None
                self._loop_variables = NO_VARIABLES  # releases the program's functions

    def _returns_to_equal_step(self, batches: Batches, ends: bool = False) -> bool:
        """Compare the ranks if it is due. Return whether the section must continue at the current position."""
        index = self._position.index
        try:
            returns = self._check_replicas(ends)
        except (*LOSSES, Undone):
            # Also if the ranks were about to return, and have done so.
            self._recover()
            returns = True
        if self._position.index != index and self._batches is batches:
            batches.reload()
        return returns

    def _end_step(self, step: Step | None, batches: Batches | None) -> None:
        """Count a step that the program has left. It is counted only once.

        A program that leaves a loop by ``break`` may still hold the generator of its steps. The generator is then not
        closed, so the next section or epoch calls this method.
        """
        if step is None or batches is None or self._step is not step:
            return
        self._step = None
        if step.committed:
            batches.advance()
            self._position.index += 1
            # The empty last step of a loop is not a step of the program.
            self._position.done += not self._in_last_step

    def _check_used(self, step: Step, batches: Batches) -> None:
        """Raise if the program has not used a step correctly."""
        if not step.entered:
            raise UsageError(
                "State.steps: a step was not used as a context manager.\n  Write `with step:` around its body."
            )
        if self._batches is not batches:
            raise UsageError(
                "State.steps: two sections ran at the same time.\n  Finish one, or leave it with `break`,"
                " before the next one starts."
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

    @property
    def _rank_and_size(self) -> tuple[int, int]:
        return self._world.rank(), self._world.size()


def _unwrapped(part: Any) -> Any:
    """Return the module in a DistributedDataParallel. A replacement process may have another wrapper."""
    return part.module if isinstance(part, WRAPPERS) else part
