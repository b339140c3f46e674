"""Recovery of the training state after a loss: the next generation, and the transfer of the state to new processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allranks._api import objects
from allranks._api.world import (
    abort_groups,
    destroy_process_group,
    renew_groups,
)
from allranks._base.errors import (
    AllranksError,
    ExcludedError,
    JoinError,
    StateLostError,
    UsageError,
)
from allranks._call import callsite
from allranks._call.digests import digest, is_plain
from allranks._elastic.early_groups import early_groups_of
from allranks._elastic.history import ChangeCounts
from allranks._elastic.joining import OVER
from allranks._elastic.membership_change import NEWCOMER, Decision
from allranks._elastic.recovery import advance
from allranks._elastic.replay import LOSSES, ReplayEngine
from allranks._elastic.training import handover, torchs_ddp, variables
from allranks._elastic.training.audit import loop_frame, program_frames, surroundings
from allranks._elastic.training.batches import Batches
from allranks._elastic.training.disk import Disk
from allranks._elastic.training.handover import assign
from allranks._elastic.training.replicas import Replicas
from allranks._elastic.training.seeds import Seeds
from allranks._elastic.training.shards import dtensors_in, layout_of
from allranks._elastic.training.step import (
    ALL,
    UNDONE,
    Step,
    Undone,
)
from allranks._elastic.training.step_values import StepValues, latest
from allranks._plugin.adapt import TORCHS_DDP

__all__ = ["StateRecovery"]

# Per process: a second State in another part of the program must be detected, too.
_loops_entered = itertools.count()
_EXTRAS = "(buffers and gradients)"  # an additional part that is transferred with those of the program
_MAX_CONNECT_ATTEMPTS = 5  # attempts to connect all groups before the error is raised


class StateRecovery(StepValues):
    """The part of a State that continues with other processes.

    Attributes:
        replaced: Number of times that another process has replaced a lost rank.
        lost: Number of ranks that have been lost, including those that were lost before they received the state.
        joined: Number of ranks that have joined later. These three are the same on all ranks, in each step.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        own: Sequence[Tensor],
        local: Sequence[Any],
        wrappers: Sequence[Any],
        seeds: Seeds,
        inherit: Callable[[list[Tensor]], None] | None,
    ) -> None:
        super().__init__(parts, own, local, wrappers)
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        self._replicas = Replicas(self.parts, modules, self._world) if self._sharded else None
        if self._sharded:
            self._warn_of_shards()
        self._torch_ddp_wrappers: list[Any] = []
        self._seeds = seeds
        self._disk: Disk | None = None
        self._generators: dict[str, Any] | None = None  # states of generators in the checkpoint that was loaded
        self._batches: Batches | None = None
        self._undone_step: Step | None = None  # must be repeated
        self._entered = self._recovered = self._leaves = False
        self._lacks_state = False  # this process needs the state of another one
        self._why_state_is_lacking = ""
        self._commits_late = False  # on all ranks, because a step has made calls after its commit
        self._differing: set[str] = set()  # names whose values have diverged between ranks, until the next commit
        self._verify_next = self._received = False
        self._verify_every = 0
        self._restore_received: Callable[[], None] | None = None  # restores values as the other ranks have sent them
        self._inherit = inherit
        self._inherited: set[int] = set()  # rank slots, since the last commit
        self._first_own = [tensor.clone() for tensor in own]
        self._waits_for_replica = self._waited_for_replica = self._rejoined = False
        self.replaced = self.lost = self.joined = 0
        self._not_counted = ChangeCounts()  # part of the group history's count that State does not report

    def _agree(self, value: int) -> int:
        """Return the lowest value of all ranks.

        Raises:
            Undone: The lowest value is 0, or a loss has interrupted another call of a rank.
        """
        if value == UNDONE:
            abort_groups()  # a rank may wait in such a group for this rank, which makes no further call in this step
        outcome = self._world.agree(value)
        if outcome == UNDONE:
            raise Undone
        return outcome

    def _slots(self) -> list[int]:
        return list(self._members())

    def _members(self) -> dict[int, int]:
        """Return the start number of each rank slot's process, by rank."""
        history = self._world.history
        return {} if history is None else dict(history.members)

    def _enter(self) -> None:
        """Enter the loop for the first time: connect with the other ranks, and load a checkpoint if one exists."""
        if self._entered:
            return
        self._entered = True
        history = self._world.history
        if history is not None and history.replaces and next(_loops_entered):
            raise UsageError(
                "State: another State has started its loop in this process. A replacement process could not determine"
                " in which of the two loops the other ranks are.\n  Use one State with all parts. Its loops may run one"
                " after another."
            )
        if history is not None:
            # Losses before the loop belong to other calls, and do not count for State.
            self._not_counted = history.counts
            if self._replicas is not None:
                history.replica, history.on_waiting = self._replicas.size, self._wait_for_replica
        # Before `_join_loop_group`, whose recovery may have to renew these wrappers.
        self._find_surroundings()
        self._note_covered()
        loop_variables = variables.LoopVariables(program_frames(loop_frame()))
        self._at_entry = {n: v for n, v in loop_variables.read(loop_variables.within).items() if is_plain(v)}
        self._at_entry_by_name = {key.rpartition(".")[2]: value for key, value in self._at_entry.items()}
        self._join_loop_group()
        # A replacement process receives the position, so it does not load a checkpoint itself.
        while not self._position.loaded:
            self._load()

    def _find_surroundings(self) -> None:
        """Find objects around the parts: wrappers of their modules, and random number generators."""
        covered = {id(module) for part in self._coverage.modules for module in part.modules()}
        found = surroundings(loop_frame(), self._local)
        for wrapper in found.wrappers.values():
            if id(wrapper.module) in covered and not any(wrapper is each for each in self._wrappers):
                self._wrappers.append(wrapper)
        self._coverage.set_wrappers(self._wrappers)
        self._torch_ddp_wrappers = [each for each in self._wrappers if isinstance(each, TORCHS_DDP)]
        for wrapper in self._wrappers:
            torchs_ddp.check("model", wrapper)
            if not isinstance(wrapper, TORCHS_DDP):
                wrapper.compare_replicas(0)  # `ReplicaCheck` compares more
        self._seeds.adopt({**self._coverage.reached().generators, **found.generators})

    def _load(self) -> None:
        """Continue from the newest checkpoint. Like a step, this is complete when all ranks agree."""
        assert self._disk is not None
        try:
            found = self._disk.load()
            self._agree(ALL)
        except (*LOSSES, Undone):
            self._recover()
            return
        # Only after the agreement: until then a rank may be lost, and all ranks load again.
        if found is not None:
            position, self._seeds.base, self._generators = found
            self._position.take(position)
            self._seeds.agreed = True
        self._position.loaded = True

    def _join_loop_group(self) -> None:
        """Switch from the replay log to the group of the loop, and receive the state if this process lacks it."""
        replay, decision = self._world.engine, self._world.entered
        # Not an elastic job: the world has no replay log.
        if not isinstance(replay, ReplayEngine):
            return
        # A replacement process has no connection yet. The recovery connects it and requests the state.
        if replay.engine is None:
            self._lacks_state = True
            self._recover()
            return
        self._world.use(replay.engine)
        early, history = early_groups_of(self._world), self._world.history
        assert early is not None
        assert history is not None
        lacks = replay.lacks_results or early.lacks_results
        self._lacks_state = lacks or decision is not None
        try:
            # No loss has occurred before the loop, so the groups are still connected.
            if history.generation == 1:
                early.enter()
            else:
                self._recovered = True
                renew_groups()
            if decision is not None:
                self._transfer_state(*_split_by_state(decision))
            else:
                self._complete(lacks)
        except (*LOSSES, Undone, JoinError):
            self._recover()

    def _complete(self, lacks: bool) -> None:
        """Send the state to ranks that have replayed only part of the calls before the loop."""
        flags = torch.zeros(self._world.size(), dtype=torch.uint8, device="cpu")
        self._world.all_gather(flags, torch.tensor([lacks], dtype=torch.uint8, device="cpu"))
        without_state = flags.nonzero().flatten().tolist()
        if without_state:
            self._transfer_state([rank for rank in range(len(flags)) if rank not in without_state], without_state)

    def _recover(self) -> None:
        """Continue with the remaining ranks, and with the processes that have replaced lost ranks.

        Like a step, this is complete when all ranks agree: no rank begins a step while another still waits for its
        state.
        """
        failed_attempts = 0
        self._copied_at = ""
        self._differing.clear()
        if self._undone_step is not None:
            self._restore_undone_step(self._undone_step)  # once more: the program has run code after the step
            self._undone_step = None
        while True:
            before = self._world.size()
            # The proposals report which ranks have the state, so no further exchange is needed after the decision.
            progress = NEWCOMER if self._lacks_state else self._position.done
            abort_groups()  # a rank that waits there for the lost rank must also reach advance()
            successor = advance(self._world, progress=progress, replaces=True)
            self._waits_for_replica = False
            with_state, without_state = _split_by_state(successor.decision)
            if not with_state or (self._lacks_state and successor.rank in with_state):
                # In the second case, the ranks decided on the loss before this rank detected that it cannot undo the
                # step.
                raise self._state_lost_error()
            if self._replicas is not None and not self._replicas.obstacle:
                self._replicas.check(successor.decision.proposals)
                self._replicas.renumber(self._world)
            if not self._lacks_state:
                self._check_ranks(before)
                self._undo.clear()
                for wrapper in self._wrappers:
                    if isinstance(wrapper, TORCHS_DDP):
                        torchs_ddp.renew(wrapper)
                    else:
                        wrapper.renew()
                self._count()
            self._lacks_state = self._lacks_state or successor.rank in without_state  # it has waited for its replica
            if before == 1 < self._world.size():
                for plan in self._plans.values():
                    plan.steps = plan.boundaries = 0  # a single rank has not learned which values differ between ranks
            self._verify_next = True
            try:
                # After the world, because the groups connect through it.
                renew_groups()
                if self._replicas is not None and not self._replicas.obstacle:
                    self._replicas.check_groups()
                self._transfer_state(with_state, without_state)
            # Another rank was lost during the recovery: start again with the next generation.
            except (*LOSSES, Undone):
                continue
            except JoinError:  # from members of a group, one of which may be lost
                failed_attempts += 1
                if failed_attempts == _MAX_CONNECT_ATTEMPTS:
                    raise
                continue
            self._recovered = True
            return

    def _restore_undone_step(self, step: Step) -> None:
        """Restore the values that an undone step has changed.

        Called again immediately before the step is repeated, because code after the step has run in between.
        """
        if step.frame is None or step.is_last:
            return
        changed = self._undo.restore()
        self._sent.clear()  # the version counters have changed
        if changed:
            self._lacks_state = True
            self._why_state_is_lacking = (
                f"{changed[0]} was changed before the commit of a step, but not in the first steps, so no copy of"
                " it exists"
            )
        elif (
            step.continued_after_loss
            and step.learning is None
            and not step.is_copied
            and (unseen := self._unseen(step))
        ):
            self._lacks_state = True
            self._why_state_is_lacking = (
                "the program caught the error of a call that a loss had interrupted, and continued. The step may have"
                f" changed {unseen.removesuffix('{}')}, of which no copy exists"
            )
        step.variables.write({n: assign(old, copy) for n, (old, copy) in self._begin_values[step.location].items()})
        if self._batches is not None:
            self._batches.prepare_repeat()

    def _check_ranks(self, size: int) -> None:
        """Raise if the number of ranks has changed and a part requires a fixed number."""
        if self._world.size() == size:
            return
        for wrapper in self._torch_ddp_wrappers:
            torchs_ddp.check_renumbered(wrapper, self._world)
        if self._replicas is not None and self._replicas.obstacle:
            raise UsageError(
                f"State: a model that is sharded over {size} ranks cannot continue with {self._world.size()}:"
                f" {self._replicas.obstacle}.\n"
                "  Let the launcher replace lost ranks (allranks run --elastic, --respawns)."
            )

    def _wait_for_replica(self) -> None:
        """Wait until other ranks complete this rank's replica again. Until then this process has no state."""
        self._waits_for_replica = self._waited_for_replica = self._rejoined = True
        if self._disk is not None:
            self._disk.settle()  # a save that the loss has interrupted is not a failure of this process
        # This process executes no further step after which it could leave, and no rank needs its state.
        if self._leaves:
            raise SystemExit(0)
        with torch.no_grad():
            for tensor, first in zip(self._own, self._first_own, strict=True):
                tensor.copy_(first)  # another rank has passed their content to the program
        callsite.warn(
            f"State: rank {self._world.rank()} waits. A rank of its replica of the model is lost, and no process has"
            " replaced it. This rank continues when a replacement process joins"
        )

    def _state_lost_error(self) -> AllranksError:
        history = self._world.history
        assert history is not None
        # If the others have completed the training, this process has nothing to do and has not failed.
        if history.membership.read(OVER) or history.others_have_ended():
            # It was a member and did its part, so it exits with code 0. A newcomer raises ExcludedError.
            if self._waited_for_replica:
                destroy_process_group()
                raise SystemExit(0)
            return ExcludedError(
                f"rank {history.slot} cannot replace a lost rank: the training finished before this process could join."
                "\n  Ignore this error: the training is complete."
            )
        why = self._why_state_is_lacking or "all ranks that had the state of the training are lost"
        return StateLostError(
            f"rank {history.slot}: {why}.\n"
            "  Restart the job from a checkpoint (automatic with allranks run --restarts)."
        )

    def _count(self) -> None:
        """Update the counts for the current generation. The result is the same on all ranks."""
        history = self._world.history
        assert history is not None
        counted = history.counts - self._not_counted
        self.replaced, self.lost, self.joined = counted.replaced, counted.lost, counted.joined

    def _continue_counts(self, counted: ChangeCounts) -> None:
        """Continue from the counts of a rank in the same generation."""
        history = self._world.history
        assert history is not None
        self._not_counted = history.counts - counted
        self._count()

    def _transfer_state(self, with_state: list[int], without_state: list[int]) -> None:
        """Send the state to the ranks that have none. This is complete when all ranks agree."""
        if not with_state:
            raise self._state_lost_error()
        world, slots = self._world, self._slots()
        me, machines = world.rank(), [member.machine for member in world.members]
        received: dict[str, Tensor] = {}
        # Before the transfer: the plans determine which values the ranks exchange below.
        self._share_plans(with_state[0])
        if without_state and (unsent := self._unsent_anywhere()):
            raise StateLostError(
                f"State: {unsent} differs between ranks and was changed after the commit of a step,"
                " so no rank has the value of the lost rank. The first steps did not contain such a change.\n"
                "  Restart the job from a checkpoint (automatic with allranks run --restarts)."
            )
        # All ranks iterate in the same order, so that each send meets its receive.
        for rank in without_state:
            donors = handover.Donors(rank, with_state, machines, self._sharded)
            if me == rank:
                received = self._receive(donors)
                continue
            backup_slot = self._backups.backup_slot_of(slots[rank])
            backup_rank = (
                slots.index(backup_slot) if backup_slot in slots and slots.index(backup_slot) in with_state else None
            )
            if backup_slot is not None and backup_rank is None:
                self._handle_lost_backup(slots[rank], backup_slot, first=me == with_state[0])
            if me in with_state:
                self._send(donors, backup_rank)
            if me == backup_rank:
                objects.send_object_list([self._backups.protected_values], rank, world)
        has_lost_slots = self._inherit_own_tensors(slots, with_state)
        self._lacks_state, self._why_state_is_lacking = False, ""
        renewed = bool(without_state or has_lost_slots) and self._keeps_own
        if renewed:  # a new process stores no backup yet; all values are as of the last commit
            self._backups.discard_pending()
            self._sent.clear()
            self._unsent = ""
            own_values = {
                **self._all_own(),
                **{n: t for n, t in received.items() if n.startswith(("variables(", "grad"))},
            }
            self._backups.exchange(world, own_values)
        self._agree(ALL)
        # Only after the agreement: an exchange that a loss has interrupted must not replace the old backups.
        if renewed:
            self._backups.commit(world, slots)
            self._inherited.clear()

    def _unsent_anywhere(self) -> str:
        """Return a value that a rank has changed since it sent it, "" if none. The lost rank has changed it, too."""
        names = [""] * self._world.size()
        objects.all_gather_object(names, self._unsent, self._world)
        return max(names)

    def _share_plans(self, source: int) -> None:
        """Distribute one rank's plans to all ranks, because a loss may have interrupted them at different moments."""
        backups, seeds = self._backups, self._seeds
        own_plans = (self._plans, self._commits_late, self._verify_every, seeds.base if seeds.agreed else None)
        message: list[Any] = [own_plans, (backups.ring, backups.distance)]
        objects.broadcast_object_list(message, source, self._world)
        self._plans, self._commits_late, self._verify_every, base = message[0]
        backups.ring, backups.distance = message[1]  # all ranks must agree on the backup ranks
        if base is not None:
            self._seeds.base, self._seeds.agreed = base, True
        for plan in self._plans.values():
            plan.variables_compared = False  # a replacement process may have computed other values
        self._undo.discard_plan()

    def _send(self, donors: handover.Donors, backup_rank: int | None) -> None:
        """Send a rank the state that all ranks have in common."""
        shared = {
            "position": self._position,
            "counts": (self.replaced, self.lost, self.joined),
            "keeper": backup_rank,
            "variables": {
                location: {name: copy for name, (_, copy) in values.items()}
                for location, values in self._begin_values.items()
            },
            "reset": {location: self._reset_names(location) for location in self._begin_values},
            "flags": self._coverage.flags(),
            "attributes": self._coverage.attributes(),
        }
        handover.send({**self.parts, _EXTRAS: self._coverage.extras(self._has_grads)}, shared, self._world, donors)

    def _receive(self, donors: handover.Donors) -> dict[str, Tensor]:
        """Receive the state, and this rank's values from its backup rank. Return the latter."""
        world, extras = self._world, self._coverage.extras(False)
        shared = handover.receive({**self.parts, _EXTRAS: extras}, world, donors)
        self._position.take(shared["position"])
        self._continue_counts(ChangeCounts(*shared["counts"]))
        self._coverage.set_extras(extras)
        self._coverage.set_attributes(shared["attributes"])
        self._coverage.set_flags(shared["flags"])
        self._pending_values, self._reset = shared["variables"], shared["reset"]
        self._received = True
        # Before its first step, a replacement process runs the code at the start of an epoch, such as
        # `scheduler.step()`. The other ranks have already run it, so its effect must be undone.
        self._restore_received = self._coverage.copy_light()
        self._last_variables, self._sent_variables = {}, {}
        if shared["keeper"] is None:
            return {}
        message: list[Any] = [None]
        objects.recv_object_list(message, shared["keeper"], world)
        own_values: dict[str, Tensor] = {n: tensor for n, tensor in message[0].items() if self._belongs_to_rank(n)}
        self._coverage.set_own(own_values)
        self._pending_backup = {name: value for name, value in own_values.items() if name.startswith("variables(")}
        # This process has its predecessor's backup rank. Without this copy, a variable that the backup rank has but
        # this process lacks would not be reported as reset.
        self._last_variables = dict(self._pending_backup)
        self._sent_variables = {name: digest(value) for name, value in latest(self._pending_backup).items()}
        return own_values

    def _inherit_own_tensors(self, slots: list[int], with_state: list[int]) -> bool:
        """Pass the ``own`` tensors of permanently lost ranks to the program. Return whether such ranks exist.

        Raises:
            StateLostError: No remaining rank has them, and the program has passed ``inherit``.
        """
        backups = self._backups
        lost_slots = [slot for slot in backups.ring if slot not in slots] if self._own else []
        for slot in lost_slots:
            backup_slot = backups.backup_slot_of(slot)
            if backup_slot not in [slots[rank] for rank in with_state]:
                if self._inherit is not None:
                    raise self._backup_lost_error(slot, backup_slot)
            elif backup_slot == slots[self._world.rank()] and slot not in self._inherited:
                # Recorded before the call: if the recovery starts again, `inherit` must not be called twice.
                self._inherited.add(slot)
                if self._inherit is not None:
                    self._inherit(backups.protected_own_tensors(self._own))
                else:
                    callsite.warn(
                        f"State: rank {slot} is lost and not replaced, and its tensors (own=) are dropped.\n"
                        "  To receive them, pass State(inherit=...)."
                    )
        return bool(lost_slots)

    def _backup_lost_error(self, slot: int, backup_slot: int | None, what: str = "tensors (own=)") -> StateLostError:
        return StateLostError(
            f"State: rank {slot} is lost together with rank {backup_slot}, which stored its {what}. No rank has them.\n"
            "  Restart the job from a checkpoint (automatic with allranks run --restarts)."
        )

    def _handle_lost_backup(self, slot: int, backup_slot: int, first: bool) -> None:
        """Handle the loss of a rank together with its backup rank.

        Raises:
            StateLostError: The lost values include ``own`` tensors, variables, or gradients.
        """
        plans = self._plans.values()
        # These values contribute to the result, so continuing without them would give another one.
        if self._own:
            raise self._backup_lost_error(slot, backup_slot)
        if any(plan.variables or plan.own_grads for plan in plans):
            raise self._backup_lost_error(slot, backup_slot, "variables and gradients")
        if first and any(plan.own for plan in plans):
            callsite.warn(
                f"State: rank {slot} is lost together with rank {backup_slot}, which stored its buffers. The"
                " replacement process receives the buffers of another rank, so the result is not bit-identical to that"
                " of an undisturbed run"
            )

    def _warn_of_shards(self) -> None:
        """Warn at the start if a lost rank could not be replaced, because no other rank has its shards."""
        history, me = self._world.history, self._world.rank()
        if me or history is None or not history.replaces:
            return
        for name, tensor in dtensors_in(self.parts):
            layout = layout_of(tensor)
            if layout is not None and not layout.is_replicated:
                callsite.warn(
                    f"State: each rank has shards of {name} that no other rank has. If a rank is lost, it cannot be"
                    " replaced, and the job stops.\n  Use a mesh with a replicated dimension; see docs/resilience.md."
                )
                return


def _split_by_state(decision: Decision) -> tuple[list[int], list[int]]:
    """Return the ranks that have the state of the training, and those that have none."""
    with_state = [rank for rank, proposal in enumerate(decision.proposals) if proposal.progress >= 0]
    return with_state, [rank for rank in range(len(decision.proposals)) if rank not in with_state]
