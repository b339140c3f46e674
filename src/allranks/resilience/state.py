"""The loop of a training that survives losses.

A step is done when all ranks agree that it is (``commit``): after their last communication, and before any of them
changes its weights. A loss before that undoes the step on every survivor, and it is repeated; a loss after it does not
touch the step, as what is left of it needs no other rank. So the survivors are always at the same step, with the same
weights, and a process that takes a lost rank's place gets them from the memory of one of them.

What a step may change before its commit is taken back: buffers of modules (running means), tensors and dicts of the
state, gradients. Random numbers need not be: each step begins with seeds of its own, which follow from the seed of the
program, the rank, and the number of the step.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set, Sized
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from allranks._api.world import abort_groups, destroy_process_group, open_groups, renew_groups, resolve_group
from allranks._base.errors import AllranksError, ExcludedError, JoinError, StateLostError, UsageError
from allranks._engines.prelude import LOSSES, Prelude
from allranks._group.elastic import LOOP, OVER
from allranks._group.process_group import ProcessGroup
from allranks._group.succession import Tally
from allranks._group.survival import advance
from allranks._rendezvous.succession import NEWCOMER, Decision
from allranks.checkpoint import RandomState
from allranks.data import DistributedSampler, adopt
from allranks.resilience import fully_sharded, handover, torchs_ddp
from allranks.resilience.buddies import Buddies
from allranks.resilience.changed import Changed
from allranks.resilience.disk import Checkpoints, Disk
from allranks.resilience.position import Position
from allranks.resilience.replicas import Replicas
from allranks.resilience.shards import dtensors_in, layout_of

__all__ = ["State", "Step"]

_cuda: Any = torch.cuda  # its annotations are few
# What a rank says at the commit of a step; all come to the least of it.
_UNDONE, _LEAVES, _UNSAVED, _CHANGES, _STAYS = range(5)
_SOME, _ALL = 1, 2  # what ranks say to other questions
_LOOK_S = 0.25  # between two looks at whether others wait to join
_TOGETHER_S = 5.0  # after a signal, for others to get it
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
        parts: modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``, tensors, and dicts
            of values that can be pickled. The same on all ranks, but for what each step computes anew. Optimizers
            commit the step by themselves, before their first ``step()``.

    Attributes:
        parts: the parts, by name; of a wrapper such as DistributedDataParallel the module in it.
        replaced: how often another process has taken the place of a lost rank.
        lost: how many ranks have been lost, with those that were lost before they got the state.
        joined: how many ranks have come later. These three are the same on all ranks, in each step.

    Raises:
        NotInitializedError: there is no process group yet.
        UsageError: a part cannot be one, or a checkpoint cannot hold it.
        CheckpointError: in the loop: a checkpoint cannot be loaded, or was not written; on every rank.
        StateLostError: in the loop: nobody is left that has the state, or a part of it; on every rank.

    Cost:
        a step: an all_reduce of 8 bytes, a copy of the modules' buffers and of the tensors among the parts, and where
        there are buffers, a message with them to another rank. A loss: some round trips to the launcher's store, making
        the group, and the size of the state through shared memory or TCP. A checkpoint: a copy of this rank's share of
        the state, while the loop waits; the rest happens in the background.
    """

    def __init__(
        self,
        *,
        reseed: bool = True,
        own: Sequence[Tensor] = (),
        inherit: Callable[[list[Tensor]], None] | None = None,
        leave_on: Sequence[int] = (),
        checkpoints: Checkpoints | None = None,
        **parts: Any,
    ) -> None:
        for name, part in parts.items():
            handover.check_part(name, part)
            if isinstance(part, nn.Module):
                fully_sharded.check_not_flat(name, part)
            if isinstance(part, nn.parallel.DistributedDataParallel):
                torchs_ddp.check(name, part)
        handover.check_own(own)
        self._world = resolve_group(None)
        self.parts = {name: _innermost(part) for name, part in parts.items()}
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        self._sharded = any(True for _ in dtensors_in(self.parts))
        self._replicas = Replicas(self.parts, modules, self._world) if self._sharded else None
        if self._sharded:
            self._warn_of_shards()
        self._torchs = [part for part in parts.values() if isinstance(part, nn.parallel.DistributedDataParallel)]
        self._position = Position(loaded=checkpoints is None)
        self._places = {self._place}
        self._disk = None if checkpoints is None else Disk(self._world, checkpoints, self.parts, own, not reseed)
        self._ends = self._recovered = self._lacks = False
        self._reseed = reseed
        self._seed = torch.initial_seed()
        self._generators: dict[str, Any] | None = None
        self._entered = False
        self._epoch, self._section = -1, 0  # where the program is: that of a process that takes a place lags behind
        self._step: Step | None = None
        self._buddies = Buddies(modules, own)
        self._inherit = inherit
        self._inherited: set[int] = set()  # seats, since the last commit
        self._changed = Changed(self.parts, modules, own)
        self._first_own = [tensor.clone() for tensor in own]
        self._aside = self._was_aside = self._returned = False
        self.replaced = self.lost = self.joined = 0
        self._not_counted = Tally()  # of that of the world
        self._leaves = False
        self._noticed_at = 0.0
        self._outcome = _STAYS
        self._announced = self._warned = False
        self._look_at = 0.0
        for number in leave_on:
            signal.signal(number, self._take_notice)
        for part in self.parts.values():
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_pre_hook(self._before_optimizer)

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
        if self._position.epoch < 0:
            self._position.move(first)
        while self._position.epoch < count:
            self._epoch, self._section = self._position.epoch, 0
            yield self._epoch
            if self._position.epoch == self._epoch:  # else the others have gone further while this process waited
                self._position.move(self._epoch + 1)
        self._epoch, self._section, self._ends = count, 0, True
        self._write_checkpoint(at_once=True)
        for step in self.steps(1):  # so that no rank is past the loop while another may still need it
            with step:
                pass
        self._position.move(count)
        self._ends = False
        lineage = self._world.lineage
        if lineage is not None and lineage.board.launched:
            lineage.board.write(OVER, b"1")

    def steps(self, source: Any) -> Iterator[Step]:
        """The steps of a section, each again until it is done.

        Args:
            source: a DataLoader or any other iterable: a step has one batch of it; or a number of steps. A process that
                takes a place skips the batches that are done: at no cost with allranks' DistributedSampler.
        """
        self._enter()
        section, self._section = self._section, self._section + 1
        if (self._epoch, section) < (self._position.epoch, self._position.section):
            return
        if section > self._position.section:
            self._position.move(self._epoch, section)
        self._places.add(self._place)
        batches = _Batches(source, self._world, self._position, self._seeds, self._restore, self._places)
        yield from self._run_section(batches, section)
        if self._is_in(section):
            self._position.move(self._epoch, section + 1)

    def _is_in(self, section: int) -> bool:
        """Whether the training is in this section: not if the others have ended it while this process waited."""
        return (self._position.epoch, self._position.section) == (self._epoch, section)

    def _run_section(self, batches: _Batches, section: int) -> Iterator[Step]:
        place = self._place
        while True:
            self._write_checkpoint()
            if self._returned:
                self._returned = False
                batches.begin_again()
            if not self._is_in(section):
                return
            if self._place != place:
                place = self._place
                self._places.add(place)
                batches.deal_anew()
            if not batches.prepare():
                return
            step = self._step = Step(self, batches.batch, self._position.index)
            try:
                yield step
            finally:  # also where the program leaves the loop by `break`
                self._step = None
                if step.committed:
                    batches.take()
                    self._position.index += 1
                    self._position.done += not self._ends
            if not step.entered:
                raise UsageError("a step of State.steps() was not used: write `with step:` around its body")
            if step.committed:
                self._follow(step)
            if step.broken:
                self._recover()

    def _follow(self, step: Step) -> None:
        """Does what ranks have asked for at the commit of a step."""
        if self._outcome == _STAYS:
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
        leave = torch.zeros(self._world.size(), dtype=torch.uint8)
        try:
            self._world.all_gather(leave, torch.tensor([step.leaves], dtype=torch.uint8))
        except LOSSES:
            step.leaves, step.broken = False, True  # it leaves after the next step
            return
        if not step.leaves or leave.all():
            return
        seats, buddies = self._seats(), self._buddies
        ward = buddies.ward_of(seats[self._world.rank()]) if seats and buddies.own else None
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
                    disk.save(position, self._seed)
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
        outcome = self._world.agree(value)
        if outcome == _UNDONE:
            raise _Undone
        return outcome

    @property
    def _place(self) -> tuple[int, int]:
        return self._world.rank(), self._world.size()

    # --- what a step calls ---

    def _begin(self) -> None:
        if self._reseed:
            self._sow(self._seeds(self._position.index))
        self._changed.keep()

    def _take_back(self) -> None:
        self._changed.take_back()

    def _commit(self) -> None:
        """Returns when all ranks agree that the step is done.

        Raises:
            _Undone: it is not.
        """
        world, lineage = self._world, self._world.lineage
        if self._buddies.needed:
            self._buddies.exchange(world)
        assert self._step is not None
        self._step.leaves = self._leaves
        self._outcome = self._agree(self._wish())
        self._step.committed = True
        if self._buddies.needed:
            self._buddies.commit(world, self._seats())
            self._inherited.clear()
        if lineage is not None and lineage.decided is not None:
            self._step.broken = True  # the group; the step is done

    def _wish(self) -> int:
        if self._leaves:
            return _LEAVES
        if self._disk is not None and self._disk.has_failed:
            return _UNSAVED
        return _CHANGES if self._somebody_comes() else _STAYS

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
                warnings.warn(f"State: ranks have come that cannot join, as the program has {what}", stacklevel=5)
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
        if self._step is not None and self._step.running and not self._step.committed:
            self._commit()

    # --- losses ---

    def _enter(self) -> None:
        """The loop begins: what was called before is over."""
        if self._entered:
            return
        self._entered = True
        lineage = self._world.lineage
        if lineage is not None:
            self._not_counted = lineage.tally
            if self._replicas is not None:
                lineage.replica, lineage.on_aside = self._replicas.size, self._wait_aside
        self._meet()
        while not self._position.loaded:
            self._load()

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
            self._position, self._seed, self._generators = found
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
        flags = torch.zeros(self._world.size(), dtype=torch.uint8)
        self._world.all_gather(flags, torch.tensor([lacks], dtype=torch.uint8))
        empty = flags.nonzero().flatten().tolist()
        if empty:
            self._hand_over([rank for rank in range(len(flags)) if rank not in empty], empty)

    def _recover(self) -> None:
        """Goes on with those that are left, and with those that have taken the places of others.

        That is done when all ranks agree, as a step is: no rank begins a step while another still waits for its state.
        """
        vain = 0
        while True:
            before = self._world.size()
            progress = NEWCOMER if self._lacks else self._position.done
            abort_groups()
            successor = advance(self._world, progress=progress, replaces=True)
            self._aside = False
            full, empty = _full_and_empty(successor.decision)
            if not full:
                raise self._nobody_left()
            if self._replicas is not None and not self._replicas.obstacle:
                self._replicas.check(successor.decision.claims)
                self._replicas.renumber(self._world)
            if not self._lacks:
                self._check_ranks(before)
                self._changed.clear()
                for wrapper in self._torchs:
                    torchs_ddp.renew(wrapper)
                self._count()
            self._lacks = self._lacks or successor.rank in empty  # it has waited
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
        if not full:
            raise self._nobody_left()
        world, seats = self._world, self._seats()
        me, machines = world.rank(), [member.machine for member in world.members]
        for rank in empty:
            donors = handover.Donors(rank, full, machines, self._sharded)
            if me == rank:
                position, counted, keeper = handover.receive(self.parts, world, donors)
                self._position.take(position)
                self._follow_count(Tally(*counted))
                if keeper is not None:
                    self._buddies.receive(world, keeper)
                continue
            kept_by = self._buddies.keeper_of(seats[rank])
            keeper = seats.index(kept_by) if kept_by in seats and seats.index(kept_by) in full else None
            if kept_by is not None and keeper is None:
                self._miss(seats[rank], kept_by, first=me == full[0])
            if me in full:
                counts = self.replaced, self.lost, self.joined
                handover.send(self.parts, (self._position, counts, keeper), world, donors)
            if me == keeper:
                self._buddies.send(world, rank)
        gone = self._take_over(seats, full)
        exchanges = bool(empty or gone) and self._buddies.needed  # a new process keeps nothing yet
        if exchanges:  # all are as of the last commit
            self._buddies.exchange(world)
        self._lacks = False
        self._agree(_ALL)
        if exchanges:
            self._buddies.commit(world, seats)
            self._inherited.clear()

    def _take_over(self, seats: list[int], full: list[int]) -> bool:
        """Gives the program what ranks had that are gone for good. Whether there are such ranks.

        Raises:
            StateLostError: nobody has it, and the program wants it.
        """
        buddies = self._buddies
        gone = [seat for seat in buddies.ring if seat not in seats] if buddies.own else []
        for seat in gone:
            keeper = buddies.keeper_of(seat)
            if keeper not in [seats[rank] for rank in full]:
                if self._inherit is not None:
                    raise self._unkept(seat, keeper)
            elif keeper == seats[self._world.rank()] and seat not in self._inherited:
                self._inherited.add(seat)
                if self._inherit is not None:
                    self._inherit(buddies.kept_own())
                else:
                    warnings.warn(
                        f"rank {seat} is gone, and its tensors (own=) with it: State(inherit=...) is given them",
                        stacklevel=6,
                    )
        return bool(gone)

    def _unkept(self, seat: int, keeper: int | None) -> StateLostError:
        return StateLostError(
            f"rank {seat} is lost, and rank {keeper}, which kept its tensors (own=): nobody has them.\n  Start the"
            " job again from a checkpoint (allranks run --restarts does so by itself)"
        )

    def _miss(self, seat: int, keeper: int, first: bool) -> None:
        """A rank is lost together with the one that kept what only it had.

        Raises:
            StateLostError: that are tensors that the program has named.
        """
        if self._buddies.own:
            raise self._unkept(seat, keeper)
        if first:
            warnings.warn(
                f"rank {seat} is lost, and rank {keeper}, which kept its buffers: its process gets those of another"
                " rank, and the result is not that of an undisturbed run to the last bit",
                stacklevel=6,
            )

    def _warn_of_shards(self) -> None:
        """Says in the beginning what a loss would show: that nobody else has a rank's shards."""
        lineage, me = self._world.lineage, self._world.rank()
        if me or lineage is None or not lineage.replaces:
            return
        for name, tensor in dtensors_in(self.parts):
            layout = layout_of(tensor)
            if layout is not None and not layout.is_replicated:
                warnings.warn(
                    f"State: each rank has shards of {name} that no other rank has. A lost rank cannot be replaced: the"
                    " job ends. Use a mesh with a replicated dimension; see docs/resilience.md",
                    stacklevel=3,
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
            for tensor, first in zip(self._buddies.own, self._first_own, strict=True):
                tensor.copy_(first)  # another rank has given the program what was in it
        warnings.warn(
            f"State: rank {self._world.rank()} waits. A rank of its replica of the model is lost, and nobody takes its"
            " place; it goes on when one comes",
            stacklevel=9,
        )

    def _nobody_left(self) -> AllranksError:
        lineage = self._world.lineage
        assert lineage is not None
        if lineage.board.read(OVER) is not None or lineage.others_have_ended():
            if self._was_aside:
                destroy_process_group()
                raise SystemExit(0)
            return ExcludedError(
                f"rank {lineage.seat}: the training was over when this process came to take a lost rank's place"
            )
        return StateLostError(
            f"rank {lineage.seat}: all ranks that had the state of the training are lost. Start the job again from a"
            " checkpoint (allranks run --restarts does so by itself)"
        )

    # --- random numbers ---

    def _seeds(self, index: int) -> int:
        """The seed of a step, on this rank; of the section where the index is -1."""
        place = (self._seed, self._position.epoch, self._position.section, index, self._world.rank())
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "big")

    def _restore(self) -> None:
        """Sets the generators to where they were in the checkpoint with which this job began."""
        if self._generators is not None:
            RandomState().load_state_dict(self._generators)
            self._generators = None

    def _sow(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for all kinds of devices: 200 us
        if _cuda.is_initialized():
            _cuda.manual_seed_all(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class Step:
    """One step: a context in which a loss does not end the program.

    Attributes:
        batch: of the source; the index, where the source is a number.
        index: the number of the step in its section.
        committed: all ranks have agreed that it is done.
    """

    def __init__(self, state: State, batch: Any, index: int) -> None:
        self.batch = batch
        self.index = index
        self.committed = False
        self.entered = self.running = self.broken = self.leaves = False
        self._state = state

    def commit(self) -> None:
        """Ends the part of the step that is taken back after a loss.

        To be called after the last communication of the step, and before anything is changed that is not taken back.
        Optimizers of the state call it before their ``step()``; a step without it is committed at its end.
        """
        if not self.committed:
            self._state._commit()

    def __enter__(self) -> Step:
        self.entered = self.running = True
        self._state._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is None and not self.committed:
                self._state._commit()
        except (*LOSSES, _Undone) as loss:
            error = loss
        finally:
            self.running = False
        if error is None:
            return True
        if not isinstance(error, (*LOSSES, _Undone)):
            return False
        self.broken = True
        if not self.committed:
            self._state._take_back()
        return True


class _Batches:
    """The batches of a section on this rank, from where the training is."""

    def __init__(
        self,
        source: Any,
        world: ProcessGroup,
        position: Position,
        seeds: Callable[[int], int],
        restore: Callable[[], None],
        places: Set[tuple[int, int]],
    ) -> None:
        """
        Args:
            source: of the batches.
            world: the ranks.
            position: of the training.
            seeds: of a step.
            restore: sets the generators, once, to where they were in a checkpoint: before the iterator is made, which
                draws random numbers, or where that was made already, after it.
            places: rank and number of ranks, whatever they have been: a sampler with others deals to some ranks.
        """
        self._source = source
        self._restore = restore
        self._world = world
        self._position = position
        self._seeds = seeds
        self._sampler = _sampler_of(source, places)
        self._iterator: Iterator[Any] | None = None
        self._ready = False
        self.batch: Any = None

    def prepare(self) -> bool:
        """Gets the batch of the present step. Whether there is one."""
        if self._iterator is None:
            if self._position.index == 0:
                self._restore()
            self._iterator = self._begin()
            self._restore()
        if not self._ready:
            try:
                self.batch = next(self._iterator)
            except StopIteration:
                return False
            self._ready = True
        return True

    def take(self) -> None:
        """The step is done."""
        self._ready = False
        size = getattr(self._source, "batch_size", None)
        self._position.samples += (size or 0) * self._world.size()

    def begin_again(self) -> None:
        """This process has waited: the training may be anywhere."""
        self._iterator, self._ready = None, False

    def deal_anew(self) -> None:
        """The ranks are others: what is left of the epoch is dealt to them."""
        if self._sampler is not None:
            self._iterator, self._ready = None, False

    def _begin(self) -> Iterator[Any]:
        if isinstance(self._source, int):
            return iter(range(self._position.index, self._source))
        torch.default_generator.manual_seed(self._seeds(-1))  # an iterator of a DataLoader draws a seed for its workers
        if self._sampler is not None:
            self._sampler.deal(self._position.samples, self._world.rank(), self._world.size())
            return iter(self._source)
        return itertools.islice(iter(self._source), self._position.index, None)


def _full_and_empty(decision: Decision) -> tuple[list[int], list[int]]:
    """The ranks that have the state of the training, and those that have none."""
    full = [rank for rank, claim in enumerate(decision.claims) if claim.progress >= 0]
    return full, [rank for rank in range(len(decision.claims)) if rank not in full]


def _sampler_of(source: Any, places: Set[tuple[int, int]]) -> DistributedSampler[Any] | None:
    """The sampler of a DataLoader, where it can deal what is left of an epoch to all ranks."""
    if not isinstance(getattr(source, "batch_size", None), int) or not isinstance(source, Sized):
        return None
    sampler = adopt(getattr(source, "sampler", None))
    return sampler if sampler is not None and (sampler.rank, sampler.num_replicas) in places else None


def _innermost(part: Any) -> Any:
    """The module in a wrapper such as DistributedDataParallel, whose process may have another one."""
    return part.module if isinstance(part, nn.Module) and isinstance(getattr(part, "module", None), nn.Module) else part
