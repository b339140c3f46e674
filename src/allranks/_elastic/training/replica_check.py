"""Comparison of the ranks: the values that must be equal on all of them are compared with hashes.

A State compares them after each recovery, and periodically. They differ if the program updates them differently on the
ranks, or if memory is damaged. By default this ends the training. With ``check_every``, each rank copies its values
when they have been found equal. If they are found to differ later, all ranks return to these copies and repeat the
steps since then. They need not find the damaged rank, which is impossible with two ranks. The repeated steps compute
what an undisturbed run computes, although a damaged value may have reached the other ranks through gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allranks._api import objects
from allranks._base.errors import StateLostError
from allranks._call import callsite
from allranks._call.digests import PLAIN, digest, local_of, shard_of
from allranks._elastic.training import variables
from allranks._elastic.training.audit import loop_frame, program_frames
from allranks._elastic.training.coverage import Undo
from allranks._elastic.training.handover import assign
from allranks._elastic.training.position import Position
from allranks._elastic.training.state_recovery import StateRecovery
from allranks._elastic.training.step import ALL, Step
from allranks._elastic.training.step_values import VARIABLE, copied
from allranks.parallel import drift

__all__ = ["ReplicaCheck"]

_MAX_RETURNS = 2  # to the same copy; if the values differ again, the program causes it


def _has_plain_elements(value: Any) -> bool:
    elements = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple, set, deque)) and PLAIN.issuperset(map(type, elements))


class _Checked(NamedTuple):
    """The values of this rank at a position at which the ranks were equal.

    Attributes:
        position: The position.
        location: Place of the loop in the program.
        undo: Copies of the values of the parts.
        values: Copies of the loop's variables, by name.
        last_variables: Packed variables that the backup rank had.
        sent_variables: Their hashes.
        finite: All parameters were finite.
    """

    position: Position
    location: str
    undo: Undo
    values: dict[str, tuple[Any, Any]]
    last_variables: dict[str, Tensor]
    sent_variables: dict[str, int]
    finite: bool


class ReplicaCheck(StateRecovery):
    """The part of a State that compares the ranks."""

    _check_every: int | None = None
    _verified_at = 0
    _checked: _Checked | None = None
    _copies_next = False  # the ranks are equal, and the next step copies their values
    _equal_at = -1  # number of completed steps at the last comparison
    _returns = 0  # to the current copies
    _is_finite = True
    _warned_of: frozenset[str] = frozenset()

    def _verify(self, step: Step) -> None:
        """Compare the values that must be equal on all ranks: after a recovery, and periodically.

        Raises:
            StateLostError: They differ. Raised on every rank.
        """
        done, every = self._position.done, self._verify_every
        # A repeated step has the same number of completed steps, and is not compared again.
        is_due = self._check_every is None and every and done and done % every == 0 and done != self._verified_at
        compares_all, is_section_start = self._verify_next or is_due, self._position.index == 0
        if not compares_all and not is_section_start:
            return
        after_recovery, self._verify_next, self._verified_at = self._verify_next, False, done
        world = self._world
        self._warn_of_unvisited()
        own = {name for plan in self._plans.values() for name in plan.own}
        digests = {"position": digest(repr(self._position.section_key) + repr((self._position.index, done)))}
        digests |= self._variable_digests(step)
        if compares_all:
            digests |= {name: found for name, found in self._coverage.common().items() if name not in own}
        if after_recovery:
            digests |= self._around(step)
        # A fast comparison of one hash per rank. The names of shards differ between ranks, so it is not possible for
        # a sharded state.
        if not self._sharded or not compares_all:
            total = torch.tensor([drift.combined(digests)], device="cpu")
            totals = torch.empty(world.size(), dtype=torch.int64, device="cpu")
            world.all_gather(totals, total)
            if bool((totals == totals[0]).all()):
                return
        gathered: list[Any] = [None] * world.size()
        objects.all_gather_object(gathered, digests, world)
        names = sorted(set().union(*gathered))
        differ = [name for name in names if len({each[name] for each in gathered if name in each}) > 1]
        if not after_recovery:  # diverged buffers and variables: backup ranks store them from now on
            self._differing = {n for n in differ if n in self._coverage.buffers or n.startswith(VARIABLE)}
            differ = [name for name in differ if name not in self._differing]
        if differ:
            compared = {name: found for name, found in digests.items() if name not in self._differing}
            raise self._replicas_differ(compared, " after a loss" if after_recovery else "")

    def _warn_of_unvisited(self) -> None:
        """Warn of parts whose elements are not restored. Rank 0 warns, once of each part."""
        large = {path: value for path, value in self._coverage.unvisited.items() if path not in self._warned_of}
        self._warned_of |= large.keys()
        new = [path for path, value in large.items() if not _has_plain_elements(value)]
        if new and self._world.rank() == 0:
            callsite.warn(
                f"State: {', '.join(new[:3])}{' and others' if len(new) > 3 else ''}: too large to be observed in each"
                " step. State restores which elements a list or dict has, but not a change within an element.\n  Do not"
                " change the elements in place, or keep their numbers in a tensor or an array."
            )

    def _recover(self) -> None:
        # A new process has no copies to return to. The next step of all ranks makes new ones.
        self._checked, self._copies_next, self._equal_at = None, False, -1
        super()._recover()

    def _check_replicas(self, ends: bool = False) -> bool:
        """Compare the ranks if ``check_every`` requires it. If they differ, return to the last copies.

        Args:
            ends: The section ends. The ranks could not return to a step of it later.

        Returns:
            Whether this rank has returned to an earlier step.

        Raises:
            StateLostError: The ranks differ, and cannot return to a step in which they were equal. Raised on every
                rank.
            Undone: A rank was lost.
        """
        every, position, checked = self._check_every, self._position, self._checked
        if every is None or self._world.size() == 1:
            return False
        is_same_section = checked is not None and checked.position.section_key == position.section_key
        since = position.done - checked.position.done if checked is not None and is_same_section else every
        if since < every and not ends and not self._saves_now():
            return False
        if position.done != self._equal_at and not self._is_equal():
            return True
        self._equal_at = position.done
        self._copies_next = not ends
        return False

    def _saves_now(self) -> bool:
        """Return whether a checkpoint is due, which must not contain damaged values."""
        return self._disk is not None and self._disk.is_due(self._position, False)

    def _is_equal(self) -> bool:
        """Compare the ranks. If they differ, return to the last copies."""
        world, position = self._world, self._position
        own = {name for plan in self._plans.values() for name in plan.own} | self._differing
        digests = {name: found for name, found in self._coverage.common().items() if name not in own}
        digests["position"] = digest(repr((position.section_key, position.index, position.done)))
        self._is_finite = all(map(_is_finite, self._coverage.parameters().values()))
        reports: list[Any] = [None] * world.size()
        summary = digests if self._sharded else drift.combined(digests)
        objects.all_gather_object(reports, (summary, self._is_finite), world)
        summaries = [each for each, _ in reports]
        self._is_finite = all(finite for _, finite in reports)
        equal = not drift.differing(summaries) if self._sharded else len(set(summaries)) == 1
        # A damaged value can make the parameters of all ranks equal: not a number. If the program causes it, they are
        # not finite again after the steps are repeated.
        became_infinite = self._checked is not None and self._checked.finite and not self._is_finite
        if equal and not (became_infinite and self._returns == 0):
            return True
        difference = None if equal else self._difference(digests)
        if difference is None and not became_infinite:
            return True  # some ranks lack a value, such as the state of a parameter that only others have used
        if difference is not None and self._returns and self._are_buffers((difference.name, *difference.others)):
            # The program computes other buffers on each rank. Backup ranks store them from now on.
            self._differing |= {difference.name, *difference.others}
            return True
        self._return_to_copies(difference)
        return False

    def _are_buffers(self, names: Sequence[str]) -> bool:
        return all(name in self._coverage.buffers for name in names)

    def _difference(self, digests: Mapping[str, int]) -> drift.Difference | None:
        tensors = {name + shard_of(tensor): tensor for name, tensor in self._coverage.reached().tensors.items()}
        return drift.locate(tensors, digests, self._world.ranks, drift.gather_in(self._world))

    def _replicas_differ(self, digests: Mapping[str, int], when: str) -> StateLostError:
        """Return the error for values that differ. Each rank calls this."""
        difference = self._difference(digests)
        return StateLostError(
            f"State: the ranks differ at step {self._position.done}{when}: {difference}. The weights would differ from"
            f" those of an undisturbed run.\n  "
            + (
                difference.memory_fault + " Restart the job from a checkpoint"
                if difference is not None and difference.memory_fault
                else "Add everything that a step changes to the State, and restart the job from a checkpoint"
            )
            + " (automatic with allranks run --restarts)."
        )

    def _copy_checked(self, step: Step) -> None:
        """Copy the values of this rank before a step, if the ranks were found to be equal."""
        if not self._copies_next or step.is_last:
            return
        self._copies_next, self._returns = False, 0
        undo = Undo(self._coverage) if self._checked is None else self._checked.undo
        undo.save_all(self._coverage.reached())
        position = Position()
        position.take(self._position)
        self._checked = _Checked(
            position,
            step.location,
            undo,
            dict(self._begin_values[step.location]),
            dict(self._last_variables),
            dict(self._sent_variables),
            self._is_finite,
        )

    def _return_to_copies(self, difference: drift.Difference | None) -> None:
        """Return to the last step at which the ranks were equal.

        Raises:
            StateLostError: There is no such step in this section, or the steps since then give the same result again.
        """
        checked, position = self._checked, self._position
        done, frame = position.done, loop_frame()
        what = "the parameters are not finite" if difference is None else str(difference)
        fault = "" if difference is None else difference.memory_fault
        if checked is None or checked.position.section_key != position.section_key or self._returns == _MAX_RETURNS:
            why = (
                f"They differ again after the steps were repeated {_MAX_RETURNS} times. The program causes this"
                if self._returns
                else "They were equal in an earlier section of steps, which cannot be repeated"
            )
            raise StateLostError(
                f"State: the ranks differ at step {done}: {what}. {why}.\n  "
                + (
                    fault
                    or "Look for code that depends on the rank and changes this value: a setting, a hook, an update."
                )
            )
        # All ranks return, or none: a rank may be lost now.
        self._agree(ALL)
        self._returns += 1
        if self._world.rank() == 0:
            callsite.warn(
                f"State: the ranks differ at step {done}: {what}. All ranks return to step {checked.position.done} and"
                f" repeat the steps since then.\n  {fault or 'If they differ again, the program causes it.'}"
            )
        checked.undo.restore()
        position.take(checked.position)
        loop_variables = variables.LoopVariables(program_frames(frame))
        values = {name: (old, copied(copy)) for name, (old, copy) in checked.values.items()}
        loop_variables.write({name: assign(old, copy) for name, (old, copy) in values.items()})
        self._begin_values[checked.location], self._copied_at = values, ""
        self._last_variables, self._sent_variables = dict(checked.last_variables), dict(checked.sent_variables)
        self._equal_at, self._verified_at = position.done, position.done
        self._sent.clear()
        self._unsent = ""
        if self._keeps_own:  # the backup ranks have newer values
            self._backups.discard_pending()
            self._backups.exchange(self._world, self._all_own())
            self._agree(ALL)
            self._backups.commit(self._world, self._slots())


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither infinity nor NaN on this rank. Cost: 4 GB/s."""
    local = local_of(tensor)
    if not local.is_floating_point() or local.is_meta or not local.numel():
        return True
    # The extremes are NaN if any element is, and take a tenth of the time of `isfinite`. Types of 8 bits have none.
    low, high = torch.aminmax(local if local.itemsize > 1 else local.float())
    return math.isfinite(low) and math.isfinite(high)
