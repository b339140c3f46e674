"""The state of a training on the disk: when it is saved, and how a new job continues from it.

A process that replaces a lost rank receives the state from the memory of other ranks. The disk covers the other cases:
all ranks are lost, or the job is started again. A checkpoint contains what a replacement process would receive, and the
position of the training.
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
from allranks._elastic.replay import LOSSES
from allranks._elastic.training.position import Position
from allranks._elastic.training.reachable import is_generator
from allranks._elastic.training.shards import layout_of
from allranks.checkpoint import Info, RandomState, Saving, latest, load, save_async
from allranks.checkpoint.values import flatten

if TYPE_CHECKING:
    from allranks._elastic.training.shards import Parts
    from allranks._group.process_group import ProcessGroup

__all__ = ["Checkpoints", "Disk"]


_OF_THE_JOB = ("loaded", "saved")  # fields of a position that another job determines itself


@dataclass(frozen=True)
class Checkpoints:
    """Where a State stores its checkpoints on the disk, and how often it writes one.

    Args:
        folder: Directory of the checkpoints, with the same path on all hosts. The hosts need not share it.
        every: Steps between two checkpoints. None: only at the end.
        keep: Number of the newest checkpoints that are kept. None: all.
        keep_every: Also keep checkpoints whose number of steps is a multiple of it.
        on_error: Action if a checkpoint cannot be written: ``"raise"`` ends the training, ``"warn"`` continues without
            the checkpoint.

    Raises:
        UsageError: A number is less than 1, or ``on_error`` has another value.
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
    """Saves and loads the state of a training. All ranks call each method, except those "on this rank"."""

    def __init__(
        self, world: ProcessGroup, settings: Checkpoints, parts: Parts, own: Sequence[Tensor], random: bool
    ) -> None:
        """
        Args:
            world: The process group of all ranks.
            settings: Directory and frequency of checkpoints.
            parts: Parts of the state.
            own: Tensors whose values differ between ranks.
            random: Include the states of the generators.
        """
        self._world = world
        self._settings = settings
        # The state of a generator follows from the position, and a checkpoint cannot contain a generator.
        self._tree: dict[str, Any] = {n: _part(n, part) for n, part in parts.items() if not is_generator(part)}
        self._own = list(own)
        self._random = random
        self._saving: Saving | None = None
        self._interrupted = False
        flatten(self._checkpoint_tree(Position(), 0))  # raises now, not at the first save, if a value cannot be saved

    def is_due(self, position: Position, ends: bool) -> bool:
        """Return whether a checkpoint must be written now."""
        if position.saved < 0:
            return True
        since, every = position.done - position.saved, self._settings.every
        return since > 0 and (ends or (every is not None and since >= every))

    def save(self, position: Position, seed: int) -> None:
        """Copy this rank's share of the checkpoint, and write it in the background."""
        # One save at a time: a failed save must be reported before the next one replaces its handle.
        self.settle()
        self._interrupted = False
        settings, tree = self._settings, self._checkpoint_tree(position, seed)
        with self._apply_on_error():
            self._saving = save_async(
                tree,
                settings.folder,
                step=position.done,
                keep=settings.keep,
                keep_every=settings.keep_every,
                # These tensors differ between ranks by definition, so each rank's are saved.
                own=["own"],
                group=self._world,
            )

    def settle(self) -> bool:
        """Wait for the checkpoint that is being written.

        Returns:
            False if a loss has interrupted it. The result applies to this rank.

        Raises:
            CheckpointError: It could not be written, and ``on_error`` is ``"raise"``.
        """
        error, self._saving = self._error(), None
        # Remember it: the handle is dropped here, and `was_interrupted` is queried only after the recovery.
        self._interrupted = self._interrupted or isinstance(error, LOSSES)
        # A loss is not a failure of the disk. The ranks write the checkpoint again after the recovery.
        if error is not None and not isinstance(error, LOSSES):
            with self._apply_on_error():
                raise error
        return not self._interrupted

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, on this rank."""
        return self._saving is not None and not self._saving.done()

    @property
    def has_failed(self) -> bool:
        """Whether a write failed for a reason other than a loss and is not reported yet, on this rank."""
        ended = self._saving is not None and self._saving.done()
        # `done` is checked first, because `_error` waits for the save.
        return ended and not isinstance(self._error(), (*LOSSES, type(None)))

    @property
    def was_interrupted(self) -> bool:
        """Whether a loss has interrupted the last save, on this rank. Waits until the save has ended."""
        return self._interrupted or isinstance(self._error(), LOSSES)

    def _error(self) -> Exception | None:
        if self._saving is not None:
            try:
                self._saving.wait()
            except Exception as error:  # noqa: BLE001 - returned, not raised
                return error
        return None

    def load(self) -> tuple[Position, int, dict[str, Any] | None] | None:
        """Load the state from the newest checkpoint.

        Returns:
            The position of the training, this rank's seed, and the states of its generators if they are saved. None: no
            checkpoint exists.

        Raises:
            CheckpointError: A rank cannot load it. Raised on every rank.
        """
        folder, world = self._settings.folder, self._world
        newest = _run_on_all_ranks(world, lambda: latest(folder, group=world))[world.rank()]
        if newest is None:
            return None
        try:
            return self._load(newest)
        except CheckpointError:
            # The newest checkpoint may be damaged. verify=True finds the newest one whose content is intact.
            intact = _run_on_all_ranks(world, lambda: latest(folder, group=world, verify=True))[world.rank()]
            # The newest checkpoint is intact, so the failure has another cause.
            if intact is None or intact.path == newest.path:
                raise
            return self._load(intact)

    def _load(self, newest: Info) -> tuple[Position, int, dict[str, Any] | None]:
        world = self._world
        tree = {**self._checkpoint_tree(Position(), 0), "position": {}}
        if self._random:
            tree["random"] = {}
        if world.rank() >= newest.ranks:  # a rank that did not exist at the save must not take rank 0's tensors
            del tree["own"]["tensors"]

        def fill() -> None:
            try:
                load(newest, into=tree, group=world)
            except UsageError as error:
                # Only the cause: its advice is about arguments of `checkpoint.load`, which a State does not have.
                cause = str(error).partition("\n")[0].rstrip(".")
                raise UsageError(
                    f"{cause}.\n  Pass State the objects of the saved training, or Checkpoints an empty folder to start"
                    " from the beginning."
                ) from error

        _run_on_all_ranks(world, fill)
        where = tree["position"]
        position = Position(**{"loop": int(where["epoch"] >= 0), **where})  # before 0.4 a position had no loop
        # The state is that of the checkpoint, so the next one is due only after `every` more steps.
        position.saved = position.done
        return position, int(tree["seed"]), tree.get("random")

    @contextlib.contextmanager
    def _apply_on_error(self) -> Iterator[None]:
        """Raise a checkpoint error, or turn it into a warning, according to ``on_error``."""
        try:
            yield
        except CheckpointError as error:
            if self._settings.on_error == "raise":
                raise
            # All ranks have the same error. One warning is enough.
            if self._world.rank() == 0:
                callsite.warn(f"State: the training continues without this checkpoint. {error}")

    def _checkpoint_tree(self, position: Position, seed: int) -> dict[str, Any]:
        where = {name: value for name, value in asdict(position).items() if name not in _OF_THE_JOB}
        tree: dict[str, Any] = {"parts": self._tree, "position": where}
        tree["own"] = {"tensors": self._own}
        tree["seed"] = str(seed)  # a string, because the seed may have 64 bits and a sign
        if self._random:
            tree["random"] = RandomState()
        return tree


class _Dict:
    """A dict among the parts. Loading replaces all its keys by those of the checkpoint."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return self._values

    def load_state_dict(self, loaded: dict[Any, Any]) -> None:
        for key, value in loaded.items():
            old = self._values.get(key)
            if isinstance(old, Tensor) and isinstance(value, Tensor):
                loaded[key] = value.to(old.device)
        # Keep the dict object, because the program references it.
        self._values.clear()
        self._values.update(loaded)


def _part(name: str, part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if any(layout_of(value) is not None for value in part.values() if isinstance(value, Tensor)):
        raise UsageError(
            f"State: {name} contains a DTensor, which checkpoints cannot load into a dict.\n"
            "  Pass the DTensor to State as a separate part."
        )
    return _Dict(part)


def _run_on_all_ranks(world: ProcessGroup, action: Callable[[], Any]) -> list[Any]:
    """Run a function on each rank, and return the results of all ranks.

    Raises:
        CheckpointError: The function failed on a rank. Raised on every rank.
    """
    outcome, why = None, ""
    try:
        outcome = action()
    # The caller recovers from a loss. As an outcome of this rank, it would look like a damaged checkpoint.
    except LOSSES:
        raise
    except (AllranksError, OSError) as error:
        why = str(error)
    outcomes: list[Any] = [None] * world.size()
    # All ranks exchange the outcome, so that no rank continues while another one raises.
    objects.all_gather_object(outcomes, (outcome, why), world)
    for rank, (_, why) in enumerate(outcomes):
        if why:
            raise CheckpointError(f"State: rank {rank} cannot continue from a checkpoint: {why}")
    return [outcome for outcome, _ in outcomes]
