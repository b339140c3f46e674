"""The batches of a section on this rank: which one is next, and how it is had again after a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from allranks._base.errors import StateLostError, UsageError
from allranks._group.process_group import ProcessGroup
from allranks.data import DistributedSampler, adopt
from allranks.resilience.position import Position
from allranks.resilience.reachable import PLAIN, is_array
from allranks.resilience.seeds import Seeds, loader_generators, seeded_iterator

__all__ = ["Batches"]


class Batches:
    """The batches of a section, from where the training is."""

    def __init__(
        self,
        source: Any,
        world: ProcessGroup,
        position: Position,
        seeds: Seeds,
        restore: Callable[[], None],
        places: Set[tuple[int, int]],
    ) -> None:
        """
        Args:
            source: a number of steps, a DataLoader, or any other iterable.
            world: the ranks.
            position: of the training.
            seeds: of the generators.
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
        self._kept: _LoadedBatch | None = None
        self._changed: list[Tensor] = []  # of a batch that is loaded again, as the step has changed them
        self.batch: Any = None
        seeds.adopt(loader_generators(source))

    def prepare(self) -> bool:
        """Get the batch of the present step. Returns whether there is one."""
        if self._iterator is None:
            if self._position.index == 0:
                self._restore()
            self._iterator = self._begin()
            self._restore()
        if not self._ready:
            if not self._next(self._position.index):
                return False
            self._ready = True
            self._check_loaded_again()
            # A second look at these gives the same objects, as the step has left them.
            holds = self._iterator is self._source or isinstance(self._source, (list, tuple, deque))
            self._kept = _LoadedBatch(self.batch, holds)
        return True

    def _check_loaded_again(self) -> None:
        """Refuse a batch that still is as the undone step has left it.

        Raises:
            StateLostError: it lies in the same memory.
        """
        if not self._changed:
            return
        changed, self._changed = self._changed, []
        before = {_memory(tensor) for tensor in changed}
        if any(_memory(tensor) in before for tensor in _LoadedBatch(self.batch, False).tensors):
            raise StateLostError(
                f"State.steps: the step has changed its batch in place, and {type(self._source).__name__} gives the"
                " same memory again, so that the step cannot be repeated.\n  Change a copy (x = x - mean instead of"
                " x.sub_(mean)), or pass a list of batches, which are copied"
            )

    def take(self) -> None:
        """The step is done."""
        self._ready, self._kept = False, None
        size = getattr(self._source, "batch_size", None)
        self._position.samples += (size or 0) * self._world.size()

    def take_back(self) -> None:
        """The step is repeated: its batch is as it was loaded, or is loaded again."""
        if self._kept is not None and not self._kept.restore():
            self._changed = self._kept.changed()
            self.begin_again()

    def begin_again(self) -> None:
        """Load the batch of the present step anew: the position has changed, or the batch.

        Raises:
            UsageError: the source can be iterated once only.
        """
        if self._iterator is not None and self._iterator is self._source:
            raise UsageError(
                f"State.steps: a {type(self._source).__name__} can be iterated only once, and its batches are needed"
                " again after a loss.\n  Pass a DataLoader, a list, or an object whose __iter__ begins anew"
            )
        self._iterator, self._ready, self._kept = None, False, None

    def deal_anew(self) -> None:
        """The ranks are others: the rest of the epoch is dealt to them."""
        if self._sampler is not None:
            self.begin_again()

    def _next(self, index: int) -> bool:
        assert self._iterator is not None
        if not isinstance(self._source, int):
            # Augmentation in the data set draws from the generators of this process.
            self._seeds.sow(self._world.rank(), "batch", *self._position.section_key, index)
        try:
            self.batch = next(self._iterator)
        except StopIteration:
            return False
        return True

    def _sow_for_sampler(self) -> None:
        self._seeds.sow(self._world.rank(), "sampler", *self._position.section_key)

    def _begin(self) -> Iterator[Any]:
        position, source = self._position, self._source
        if isinstance(source, int):
            return iter(range(position.index, source))
        self._seeds.sow(self._world.rank(), "section", *position.section_key)
        if self._sampler is not None:
            self._sampler.deal(position.samples, self._world.rank(), self._world.size())
        if isinstance(source, DataLoader) and source.num_workers and self._seeds.enabled:
            seed = self._seeds.of_section(self._world.rank(), position.section_key)
            self._iterator = seeded_iterator(source, seed, self._sow_for_sampler)
        else:
            self._iterator = iter(source)
        if self._sampler is None:
            # Each batch that is skipped is loaded with its own seed: an iterable's random numbers follow from all of
            # them.
            for index in range(position.index):
                if not self._next(index):
                    break
        return self._iterator


class _LoadedBatch:
    """A batch as it was loaded.

    Programs change batches: ``labels = batch.pop("labels")``, ``images.sub_(mean)``. Containers are small and copied.
    A changed tensor is seen by its version counter; then the batch is loaded again, which takes time only after a loss.
    """

    def __init__(self, batch: Any, copy: bool) -> None:
        """
        Args:
            batch: the batch.
            copy: keep copies of its tensors, as it cannot be loaded again.
        """
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self._copy = copy
        self._known = self._look(batch, 0)

    def _look(self, value: Any, depth: int) -> bool:
        """Record a value. Returns whether a change of it is noticed."""
        if isinstance(value, Tensor):
            if value.is_inference():
                return False
            self._tensors.append((value, value._version, value.detach().clone() if self._copy else None))
            return True
        if type(value) in PLAIN:
            return True
        if is_array(value) or depth > 8:
            return False
        if isinstance(value, (dict, list)):
            self._containers.append((value, value.copy()))
        elif not isinstance(value, tuple):
            return False
        inner = value.values() if isinstance(value, dict) else value
        known = [self._look(each, depth + 1) for each in inner]  # all of them, also after one that is not
        return all(known)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _, _ in self._tensors]

    def changed(self) -> list[Tensor]:
        """The tensors that the step has changed and that are not restored."""
        return [tensor for tensor, version, copy in self._tensors if copy is None and tensor._version != version]

    def restore(self) -> bool:
        """Restore the containers. Returns whether the batch is as it was loaded."""
        for container, copy in self._containers:
            container.clear()
            container.update(copy) if isinstance(container, dict) else container.extend(copy)
        for tensor, version, copy in self._tensors:
            if copy is not None and tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)
        return self._known and all(copy is not None or tensor._version == v for tensor, v, copy in self._tensors)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _sampler_of(source: Any, places: Set[tuple[int, int]]) -> DistributedSampler[Any] | None:
    """The sampler of a DataLoader, where it can deal the rest of an epoch to all ranks."""
    if not isinstance(getattr(source, "batch_size", None), int) or not isinstance(source, Sized):
        return None
    sampler = adopt(getattr(source, "sampler", None))
    return sampler if sampler is not None and (sampler.rank, sampler.num_replicas) in places else None
