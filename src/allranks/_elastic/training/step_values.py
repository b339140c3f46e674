"""The values that a step can change: of the parts, of variables, and of this rank alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence, Set
from types import FrameType
from typing import Any

from torch import Tensor

from allranks._api.world import (
    resolve_group,
)
from allranks._call.digests import digest, is_plain
from allranks._elastic.training import variables
from allranks._elastic.training.audit import Audit, program_frames
from allranks._elastic.training.backups import Backups, pack, unpack
from allranks._elastic.training.coverage import Coverage, Undo
from allranks._elastic.training.handover import assign
from allranks._elastic.training.position import Position
from allranks._elastic.training.shards import dtensors_in
from allranks._elastic.training.step import (
    Step,
)
from allranks._elastic.training.step_plan import StepPlan

__all__ = ["VARIABLE", "StepValues", "copied", "latest", "location_of", "version"]

_NOTHING = object()
VARIABLE = "variable "  # prefix of a variable's name in comparisons


class StepValues:
    """What a State covers, and the values that only this rank has.

    `Coverage` finds the values of the parts. A loop also carries variables, and some values differ between ranks. A
    backup rank stores the latter as of the last commit.
    """

    def __init__(
        self, parts: Mapping[str, Any], own: Sequence[Tensor], local: Sequence[Any], wrappers: Sequence[Any]
    ) -> None:
        self._world = resolve_group(None)
        self.parts = dict(parts)
        self._own = list(own)
        self._local = list(local)
        self._local_names = {each for each in local if isinstance(each, str)}
        self._sharded = any(True for _ in dtensors_in(self.parts))
        self._wrappers = list(wrappers)
        self._coverage = Coverage(self.parts, self._wrappers, self._own, self._local)
        self._undo = Undo(self._coverage)
        self._position = Position()
        self._plans: dict[str, StepPlan] = {}
        self._covered_ids: set[int] = set()  # of tensors that variables may also reference
        self._at_entry: dict[str, Any] = {}  # plain variables at the start of the first loop
        self._at_entry_by_name: dict[str, Any] = {}  # the same, without the names of functions
        # The variables of a place at the start of its last step, each with a copy of its value.
        self._begin_values: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._copied_at = ""  # the place whose variables are copied; "" if the program may have changed them since
        self._pending_values: dict[str, dict[str, Any]] = {}  # received, for the first step at each place
        self._pending_backup: dict[str, Tensor] = {}
        self._reset: dict[str, set[str]] = {}  # variables that the program has reset since the last commit
        self._backups = Backups()
        self._sent: dict[str, int] = {}  # version counters of the tensors that the backup rank has
        self._unsent = ""  # changed after it was sent, although the first steps did not show such a change
        self._needs_late_commit = False  # this rank needs commits at the end of steps from now on
        self._last_variables: dict[str, Tensor] = {}  # packed variables that the backup rank has, by place
        self._sent_variables: dict[str, int] = {}  # their hashes

    def _note_covered(self) -> None:
        self._covered_ids = set(map(id, self._coverage.reached().tensors.values()))

    def _covered(self) -> list[Any]:
        """Return all objects of the parts, and those of the State itself."""
        reached = self._coverage.reached()
        found = [*reached.tensors.values(), *reached.arrays.values(), *reached.containers.values()]
        found += [*reached.owners.values(), *reached.generators.values(), *reached.wrappers.values()]
        return [*found, *self._wrappers, *self._local, *self.parts.values(), *self._own]

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
        return value is not before and is_plain(value) and not _same(value, before)

    def _without_covered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that are neither declared as local nor covered by a part."""
        local, covered = self._local_names, self._covered_ids
        return {
            name: value
            for name, value in values.items()
            # A variable that references a tensor of a part is restored with the part.
            if id(value) not in covered and not (local and _plain_name(name) in local)
        }

    def _variables_now(self, step: Step, after: bool = False) -> dict[str, Any]:
        """Return the variables that the loop assigns, and reads before it assigns them.

        Args:
            step: The current step.
            after: Also return variables that only the program after the loop reads, and variables that the loop does
                not assign and that are the same on all ranks. Copies of tensors are detached from their computation.
        """
        loop_variables, varying = step.variables, self._plans[step.location].varying
        found: dict[str, Any] = {}
        for name, value in self._without_covered(loop_variables.read_all()).items():
            if name in loop_variables.assigned:
                chosen = variables.can_be_carried(value)
            elif not after:
                chosen = False
            elif name in loop_variables.after:
                chosen = variables.can_be_carried(value) or type(value) is Tensor
            else:
                chosen = name not in varying and self._is_computed(name, value)
            if chosen:
                found[name] = value
        return found

    def _keep_variables(self, step: Step) -> None:
        """Copy the variables that the loop carries, in the state in which the next step finds them."""
        self._begin_values[step.location] = {
            name: (value, copied(value)) for name, value in self._variables_now(step, after=True).items()
        }
        self._copied_at = step.location

    def _fill_variables(self, frame: FrameType) -> None:
        """Assign the received values to the variables of a loop."""
        location = location_of(frame)
        values, backup = self._pending_values.get(location), latest(self._pending_backup)
        self._copied_at = ""
        self._pending_values, self._pending_backup = {}, {}  # those of other places are older
        if values is None:
            return
        # The rank's own variables come from its backup rank, unless the program has reset them. Until the steps at a
        # place have shown which variables these are, the backup rank has all of them.
        own_names = {name for plan in self._plans.values() for name in (backup if plan.learns else plan.variables)}
        own_names -= self._reset.get(location, set())
        values |= {n: v for n, v in backup.items() if n in values and n in own_names}
        loop_variables = variables.LoopVariables(program_frames(frame))
        old = loop_variables.read(values)
        loop_variables.write({name: assign(old.get(name), value) for name, value in values.items()})

    def _variable_digests(self, step: Step) -> dict[str, int]:
        """Return hashes of the variables that ranks have in common when a step begins."""
        plans, reset = self._plans.values(), self._reset_names(step.location)
        known = {name for plan in plans for name in plan.known}  # a variable has one name at all places of a function
        own = {name for plan in plans for name in plan.variables} - reset
        return {
            f"{VARIABLE}{name}": digest(value)
            for name, (_, value) in self._begin_values[step.location].items()
            if name in known and name in step.variables.within and name not in own
        }

    def _reset_names(self, location: str) -> set[str]:
        """Return this rank's variables that differ from its backup rank's, because the program has reset them."""
        begin = self._begin_values.get(location, {})
        return {name for name, sent in self._sent_variables.items() if name in begin and digest(begin[name][1]) != sent}

    def _own_values(self, step: Step, differing: Set[str]) -> dict[str, Tensor]:
        """Return the values that only this rank has, and that its backup rank does not have yet.

        Args:
            step: The current step.
            differing: Buffers and variables that belong to these values from this step on.
        """
        plan = self._plans[step.location]
        changing = {name for each in self._plans.values() for name in each.changing}
        found = {
            name: tensor
            for name, tensor in self._all_own(differing).items()
            # The backup rank has the packed variables of the last commit. Changed ones are added below.
            if name not in self._last_variables
            and (name not in self._coverage.buffers or name in changing or self._sent.get(name) != version(tensor))
        }
        names = plan.variables | (differing - self._coverage.buffers.keys())
        if plan.learns or names:
            values = self._variables_now(step)
            chosen = values if plan.learns else {n: v for n, v in values.items() if n in names}
            step.sent = {name: digest(value) for name, value in chosen.items()}
            # If no variable has changed, nothing is sent: a step takes 90 us instead of 460 us (2 ranks).
            if any(self._sent_variables.get(name) != now for name, now in step.sent.items()):
                found[f"variables({step.location})"] = pack(
                    (self._position.done, {name: copied(value) for name, value in chosen.items()})
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
            # Before the first steps are compared, any buffer may differ between ranks.
            if buffer is not None and buffer.is_cpu and (name in names or not learnt):
                found[name] = buffer
        if any(plan.own_grads for plan in plans):
            grads = {n: p.grad for n, p in self._coverage.parameters().items() if p.grad is not None}
            # The list of names lets the receiver drop gradients of an earlier commit.
            found |= {f"grad({name})": grad.detach() for name, grad in grads.items()} | {"grads": pack(sorted(grads))}
        return found | self._last_variables

    def _own_named(self, name: str) -> Tensor:
        return self._own[int(name[len("own[") : -1])]

    def _keeps_version(self, name: str) -> bool:
        return name in self._coverage.buffers or name.startswith("own[")

    def _own_digests(self, step: Step) -> dict[str, int]:
        """Return hashes of the values that ranks store for each other."""
        found = {name: digest(value) for name, value in self._variables_now(step).items()}
        return found | {name: digest(tensor) for name, tensor in self._all_own().items()}

    def _find_unsent(self) -> None:
        """Detect a change of one of this rank's own tensors after the commit that the first steps did not show.

        The backup rank lacks that change until the next commit. Later steps are therefore committed at their end.
        """
        if not self._sent:
            return
        names = {name for plan in self._plans.values() for name in plan.own} & self._sent.keys()
        for name in names:
            tensor = self._coverage.buffer(name) if name in self._coverage.buffers else self._own_named(name)
            if tensor is not None and version(tensor) != self._sent[name]:
                self._unsent, self._needs_late_commit = name, True
                return

    def _unseen(self, step: Step) -> str:
        """Return the name of a value that the program changes after the commit without a copy or a version counter."""
        plan = self._plans[step.location]
        unseen = {n for n in plan.unseen - plan.saved if not (plan.modules and n.endswith("{}"))}
        return min(unseen, default="")

    def _belongs_to_rank(self, name: str) -> bool:
        """Return whether a rank receives the value with this name from its backup rank instead of its donor.

        The backup rank may have more values, from a time before the first steps had shown which values differ between
        ranks.
        """
        plans = self._plans.values()
        if name in self._coverage.buffers:
            return not any(plan.steps for plan in plans) or any(name in plan.own for plan in plans)
        return not name.startswith("grad") or any(plan.own_grads for plan in plans)

    @property
    def _has_grads(self) -> bool:
        return any(plan.grads or plan.learns for plan in self._plans.values())

    @property
    def _keeps_own(self) -> bool:
        """Whether ranks store values for each other. The same on all ranks."""
        return bool(self._own or self._coverage.buffers or any(plan.exchanges for plan in self._plans.values()))

    def _around(self, step: Step) -> dict[str, int]:
        """Return hashes of the objects around the parts that were the same on all ranks in the first steps.

        If those of a replacement process differ, the program has changed them: between two steps, or later.
        """
        common = set().union(*(plan.around for plan in self._plans.values()))
        if not common or step.frame is None:
            return {}
        audit = Audit(step.variables.frames, self._covered(), self._local)
        values = audit.around(step.variables.frames)
        return {f"{n} (not part of the State)": value for n, value in values.items() if n in common}


def latest(packed: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the variables in a backup for all places, each as of the last commit that sent it."""
    found: dict[str, Any] = {}
    # In the order of commits, so that the newest value of a variable that several places share wins.
    for _, values in sorted((unpack(each) for each in packed.values()), key=lambda each: int(each[0])):
        found |= values
    return found


def location_of(frame: FrameType) -> str:
    """Return the name of a place in the program. It is the same in all processes."""
    return _location(frame.f_code.co_filename, frame.f_lineno)


@functools.cache  # of a program's variables
def _plain_name(key: str) -> str:
    """Return the name of a variable without the name of its function."""
    return key.rpartition(".")[2]


def _same(value: object, other: object) -> bool:
    # Compare texts, because a NaN is not equal to itself.
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def copied(value: Any) -> Any:
    """Return the value of a variable, with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(map(copied, value)) if type(value) is tuple else value


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@functools.cache  # of a program's loops
def _location(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"
