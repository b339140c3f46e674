"""The batches of a section on this rank: the next batch, and the recovery of a batch after a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from allranks._base.errors import StateLostError, UsageError
from allranks._call.digests import PLAIN
from allranks._elastic.training.position import Position
from allranks._elastic.training.reachable import is_array
from allranks._elastic.training.seeds import Seeds, loader_generators, seeded_iterator
from allranks._group.process_group import ProcessGroup
from allranks.data import DistributedSampler, adopt

__all__ = ["Batches"]


class Batches:
    """The batches of a section, starting at the current position of the training."""

    def __init__(
        self,
        source: Any,
        world: ProcessGroup,
        position: Position,
        seeds: Seeds,
        restore: Callable[[], None],
        ranks_and_sizes: Set[tuple[int, int]],
    ) -> None:
        """
        Args:
            source: A number of steps, a DataLoader, or any other iterable.
            world: The process group of all ranks.
            position: Position of the training.
            seeds: Seeds of the random number generators.
            restore: Restores, once, the generator states of a checkpoint. At the start of a section it is called before
                the iterator is created, which draws random numbers. Otherwise it is called afterwards.
            ranks_and_sizes: All pairs of rank and world size that this process has had. A sampler with another pair
                does not distribute samples to all ranks.
        """
        self._source = source
        self._restore = restore
        self._world = world
        self._position = position
        self._seeds = seeds
        self._sampler = _sampler_of(source, ranks_and_sizes)
        self._iterator: Iterator[Any] | None = None
        self._ready = False
        self._loaded: _LoadedBatch | None = None
        self._changed: list[Tensor] = []  # changed tensors of a batch that is loaded again
        self.batch: Any = None
        seeds.adopt(loader_generators(source))

    def prepare(self) -> bool:
        """Load the batch of the current step. Return whether one exists."""
        if self._iterator is None:
            if self._position.index == 0:
                self._restore()
            self._iterator = self._begin()
            self._restore()
        if not self._ready:
            if not self._next(self._position.index):
                return False
            self._ready = True
            self._check_reloaded()
            # These sources return the same objects again, with the changes of the step. Their tensors are therefore
            # copied.
            holds = self._iterator is self._source or isinstance(self._source, (list, tuple, deque))
            self._loaded = _LoadedBatch(self.batch, holds)
        return True

    def _check_reloaded(self) -> None:
        """Reject a reloaded batch that still contains the changes of the undone step.

        Raises:
            StateLostError: The batch is in the same memory as the changed batch.
        """
        if not self._changed:
            return
        # Check only the first load after the loss: later batches may reuse the memory.
        changed, self._changed = self._changed, []
        # The changed tensors are still alive, so equal memory means the same storage, not reused memory.
        before = {_memory(tensor) for tensor in changed}
        if any(_memory(tensor) in before for tensor in _LoadedBatch(self.batch, False).tensors):
            raise StateLostError(
                f"State.steps: the step has changed its batch in place, and {type(self._source).__name__} returns the"
                " same memory again, so the step cannot be repeated.\n  Change a copy (x = x - mean instead of"
                " x.sub_(mean)), or pass a list of batches, which State copies."
            )

    def advance(self) -> None:
        """Advance past the batch of the completed step."""
        self._ready, self._loaded = False, None
        size = getattr(self._source, "batch_size", None)
        self._position.samples += (size or 0) * self._world.size()

    def prepare_repeat(self) -> None:
        """Prepare to repeat the step: restore its batch, or load it again if that is impossible."""
        if self._loaded is not None and not self._loaded.restore():
            self._changed = self._loaded.changed()
            self.reload()

    def reload(self) -> None:
        """Load the batch of the current step again, because the position or the batch has changed.

        Raises:
            UsageError: The source can be iterated only once.
        """
        # `iter(x) is x` identifies an iterator, which cannot start over.
        if self._iterator is not None and self._iterator is self._source:
            raise UsageError(
                f"State.steps: a {type(self._source).__name__} can be iterated only once, but its batches are needed"
                " again after a loss.\n  Pass a DataLoader, a list, or an object whose __iter__ starts over."
            )
        self._iterator, self._ready, self._loaded = None, False, None

    def redistribute(self) -> None:
        """Distribute the rest of the epoch over the new set of ranks."""
        if self._sampler is not None:
            self.reload()

    def _next(self, index: int) -> bool:
        assert self._iterator is not None
        if not isinstance(self._source, int):
            # Augmentation in the data set draws from the generators of this process.
            self._seeds.seed_generators(self._world.rank(), "batch", *self._position.section_key, index)
        try:
            self.batch = next(self._iterator)
        except StopIteration:
            return False
        return True

    def _seed_sampler(self) -> None:
        self._seeds.seed_generators(self._world.rank(), "sampler", *self._position.section_key)

    def _begin(self) -> Iterator[Any]:
        position, source = self._position, self._source
        if isinstance(source, int):
            return iter(range(position.index, source))
        # Creating an iterator draws random numbers: samplers shuffle, and a DataLoader draws a base seed.
        self._seeds.seed_generators(self._world.rank(), "section", *position.section_key)
        if self._sampler is not None:
            # A DistributedSampler skips completed samples by index, so no batch is loaded only to be discarded.
            self._sampler.deal(position.samples, self._world.rank(), self._world.size())
        if isinstance(source, DataLoader) and source.num_workers and self._seeds.enabled:
            seed = self._seeds.of_section(self._world.rank(), position.section_key)
            self._iterator = seeded_iterator(source, seed, self._seed_sampler)
        else:
            self._iterator = iter(source)
        if self._sampler is None:
            # Load each skipped batch with its own seed: the random numbers of an iterable depend on all its batches.
            for index in range(position.index):
                if not self._next(index):
                    break
        return self._iterator


class _LoadedBatch:
    """A batch in the state in which it was loaded.

    Programs change batches: ``labels = batch.pop("labels")``, ``images.sub_(mean)``. Containers are small, so they are
    copied. The version counter of a tensor reveals a change. The batch is then loaded again, which takes time only
    after a loss.
    """

    def __init__(self, batch: Any, copy: bool) -> None:
        """
        Args:
            batch: The batch.
            copy: Keep copies of its tensors, because it cannot be loaded again.
        """
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self._copy = copy
        self._known = self._detect(batch, 0)

    def _detect(self, value: Any, depth: int) -> bool:
        """Record a value. Return whether a later change of it can be detected."""
        if isinstance(value, Tensor):
            # Inference tensors have no version counter, so a change could not be detected.
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
        known = [self._detect(each, depth + 1) for each in inner]  # no short circuit: every element must be recorded
        return all(known)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _, _ in self._tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that the step has changed and that have no copy."""
        return [tensor for tensor, version, copy in self._tensors if copy is None and tensor._version != version]

    def restore(self) -> bool:
        """Restore the containers and the copied tensors. Return whether the batch is as it was loaded."""
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


def _sampler_of(source: Any, ranks_and_sizes: Set[tuple[int, int]]) -> DistributedSampler[Any] | None:
    """Return the sampler of a DataLoader if it can distribute the rest of an epoch over all ranks."""
    if not isinstance(getattr(source, "batch_size", None), int) or not isinstance(source, Sized):
        return None
    sampler = adopt(getattr(source, "sampler", None))
    return sampler if sampler is not None and (sampler.rank, sampler.num_replicas) in ranks_and_sizes else None
