"""The state of a training on the disk: when it is saved, and how a job that starts goes on from it.

Ranks that are lost get the state from the memory of others. The disk is for the rest: all ranks are lost, the job is
started again. What is saved is what another process would be given, and where the training is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from allranks._api import objects
from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks._call import callsite
from allranks._engines.prelude import LOSSES
from allranks.checkpoint import Info, RandomState, Saving, latest, load, save_async
from allranks.checkpoint.values import flatten
from allranks.resilience.position import Position
from allranks.resilience.reachable import is_generator
from allranks.resilience.shards import layout_of

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup
    from allranks.resilience.shards import Parts

__all__ = ["Checkpoints", "Disk"]


_OF_THE_JOB = ("loaded", "saved")  # of a position: what another job finds out by itself


@dataclass(frozen=True)
class Checkpoints:
    """Where a State keeps its checkpoints on the disk, and how often it writes one.

    Args:
        folder: where; all ranks see it.
        every: steps between two checkpoints; None: only at the end.
        keep: so many of the newest stay; None: all.
        keep_every: those whose number of steps is a multiple of it stay, too.
        on_error: what happens if one cannot be written: ``"raise"`` ends the training, ``"warn"`` goes on without it.

    Raises:
        UsageError: a number is less than 1.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int | None = 2
    keep_every: int | None = None
    on_error: str = "raise"

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise UsageError(f"Checkpoints: {name}={number!r}: expected a whole number, at least 1")
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"Checkpoints: on_error={self.on_error!r}: expected 'raise' or 'warn'")


class Disk:
    """Saves and loads the state of a training. All ranks call each of its methods, but where it says otherwise."""

    def __init__(
        self, world: ProcessGroup, wanted: Checkpoints, parts: Parts, own: Sequence[Tensor], random: bool
    ) -> None:
        """
        Args:
            world: the ranks.
            wanted: where and how often.
            parts: of the state.
            own: tensors that have other values on each rank.
            random: with the states of the generators.
        """
        self._world = world
        self._wanted = wanted
        # Generators follow from the position; a checkpoint cannot hold them.
        self._tree: dict[str, Any] = {n: _part(n, part) for n, part in parts.items() if not is_generator(part)}
        self._own = list(own)
        self._random = random
        self._saving: Saving | None = None
        self._cut_off = False
        flatten(self._whole(Position(), 0))  # what cannot be saved is said in the beginning

    def is_due(self, position: Position, ends: bool) -> bool:
        """Whether a checkpoint is to be written now."""
        if position.saved < 0:
            return True
        since, every = position.done - position.saved, self._wanted.every
        return since > 0 and (ends or (every is not None and since >= every))

    def save(self, position: Position, seed: int) -> None:
        """Copies what this rank will write, and writes it in the background."""
        self.settle()
        self._cut_off = False
        wanted, tree = self._wanted, self._whole(position, seed)
        with self._told():
            self._saving = save_async(
                tree,
                wanted.folder,
                step=position.done,
                keep=wanted.keep,
                keep_every=wanted.keep_every,
                own=["own"],
                group=self._world,
            )

    def settle(self) -> bool:
        """Waits for the checkpoint that is being written.

        Returns:
            Whether no loss has cut it off; on this rank.

        Raises:
            CheckpointError: it could not be written, and that ends the training.
        """
        error, self._saving = self._error(), None
        self._cut_off = self._cut_off or isinstance(error, LOSSES)
        if error is not None and not isinstance(error, LOSSES):
            with self._told():
                raise error
        return not self._cut_off

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; on this rank."""
        return self._saving is not None and not self._saving.done()

    @property
    def has_failed(self) -> bool:
        """Whether one could not be written, for another reason than a loss, and nobody was told; on this rank."""
        ended = self._saving is not None and self._saving.done()
        return ended and not isinstance(self._error(), (*LOSSES, type(None)))

    @property
    def was_cut_off(self) -> bool:
        """Whether a loss has ended the last save; waits for its end. On this rank."""
        return self._cut_off or isinstance(self._error(), LOSSES)

    def _error(self) -> Exception | None:
        if self._saving is not None:
            try:
                self._saving.wait()
            except Exception as error:  # noqa: BLE001 - it is what the caller asks for
                return error
        return None

    def load(self) -> tuple[Position, int, dict[str, Any] | None] | None:
        """Fills the state from the newest checkpoint.

        Returns:
            Where the training was, this rank's seed, and the states of its generators, if they are saved. None: there
            is no checkpoint.

        Raises:
            CheckpointError: a rank cannot load it; on every rank.
        """
        folder, world = self._wanted.folder, self._world
        newest = _agreed(world, lambda: latest(folder, group=world))[world.rank()]
        if newest is None:
            return None
        try:
            return self._load(newest)
        except CheckpointError:
            whole = _agreed(world, lambda: latest(folder, group=world, verify=True))[world.rank()]
            if whole is None or whole.path == newest.path:
                raise
            return self._load(whole)

    def _load(self, newest: Info) -> tuple[Position, int, dict[str, Any] | None]:
        world = self._world
        tree = {**self._whole(Position(), 0), "position": {}}
        if self._random:
            tree["random"] = {}
        if world.rank() >= newest.ranks:  # rank 0's are not this rank's
            del tree["own"]["tensors"]
        _agreed(world, lambda: load(newest, into=tree, group=world) and None)
        where = tree["position"]
        position = Position(**{"loop": int(where["epoch"] >= 0), **where})  # before 0.4 there was no loop
        position.saved = position.done
        return position, int(tree["seed"]), tree.get("random")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """An error ends the training, or is a warning: as the program wants it."""
        try:
            yield
        except CheckpointError as error:
            if self._wanted.on_error == "raise":
                raise
            if self._world.rank() == 0:
                callsite.warn(f"State: the training goes on without this checkpoint. {error}")

    def _whole(self, position: Position, seed: int) -> dict[str, Any]:
        where = {name: value for name, value in asdict(position).items() if name not in _OF_THE_JOB}
        whole: dict[str, Any] = {"parts": self._tree, "position": where}
        whole["own"] = {"tensors": self._own}
        whole["seed"] = str(seed)  # it may have 64 bits, and a sign
        if self._random:
            whole["random"] = RandomState()
        return whole


class _Dict:
    """A dict among the parts: it gets the keys of the checkpoint, whatever it had."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return self._values

    def load_state_dict(self, came: dict[Any, Any]) -> None:
        for key, value in came.items():
            old = self._values.get(key)
            if isinstance(old, Tensor) and isinstance(value, Tensor):
                came[key] = value.to(old.device)
        self._values.clear()
        self._values.update(came)


def _part(name: str, part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if any(layout_of(value) is not None for value in part.values() if isinstance(value, Tensor)):
        raise UsageError(
            f"State: {name} has a DTensor, which checkpoints cannot load into a dict: make it a part itself"
        )
    return _Dict(part)


def _agreed(world: ProcessGroup, act: Callable[[], Any]) -> list[Any]:
    """What each rank has come to.

    Raises:
        CheckpointError: a rank could not do it; on every rank.
    """
    outcome, why = None, ""
    try:
        outcome = act()
    except LOSSES:
        raise
    except (AllranksError, OSError) as error:
        why = str(error)
    found: list[Any] = [None] * world.size()
    objects.all_gather_object(found, (outcome, why), world)
    for rank, (_, why) in enumerate(found):
        if why:
            raise CheckpointError(f"State: rank {rank} cannot go on from a checkpoint: {why}")
    return [outcome for outcome, _ in found]
