"""Random numbers of a training: every draw follows from the seed of the program, the rank, and the position.

A process that replaces a lost rank cannot receive the states of generators, because no rank has a copy. State therefore
seeds all generators again at fixed points: before a batch is loaded, when a step begins, and when the program continues
after a section. Between two of these points, a program draws the same numbers in every process that takes the same
path.

The workers of a DataLoader are seeded for each batch. A worker of a replacement process has not loaded the previous
batches, so its generators would be in another state.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from allranks._base.errors import UsageError

__all__ = ["Seeds", "seeded_iterator"]

_cuda: Any = torch.cuda  # its annotations are incomplete
_MASK_32 = 0xFFFFFFFF  # NumPy's global seed has 32 bits


def _digest(*about: object) -> int:
    """Return a seed of 56 bits: torch accepts signed 64-bit integers, and NumPy only numbers of at least 0."""
    # blake2b instead of hash(), which differs between processes for strings.
    return int.from_bytes(hashlib.blake2b(repr(about).encode(), digest_size=7).digest(), "big")


class Seeds:
    """The generators of this process, seeded by position.

    Attributes:
        base: Seed of the training. It is rank 0's seed from the first commit on.
        agreed: All ranks have the same base. Without it, each process of a program that sets no seed has another one.
        enabled: False: generators are never changed (``State(reseed=False)``).
    """

    def __init__(self, enabled: bool) -> None:
        self.base = torch.initial_seed()
        self.agreed = False
        self.enabled = enabled
        self._own: dict[int, tuple[Any, int]] = {}  # by id: a generator, and its own origin seed

    def adopt(self, generators: Mapping[str, Any]) -> None:
        """Also seed these generators of the program. Their seeds follow from their current state.

        The seeds do not depend on the rank: the program's own seeds decide whether ranks draw the same numbers.
        """
        if not self.enabled:
            return
        for generator in generators.values():
            # The default generator is seeded with the rank. A second seed from here would remove that.
            if id(generator) not in self._own and generator is not torch.default_generator:
                self._own[id(generator)] = (generator, _digest(len(self._own), _origin(generator)))

    def of_section(self, *position: object) -> int:
        """Return the seed from which the seeds of a section's batches follow."""
        return _digest(self.base, "batches", *position)

    def seed_generators(self, *position: object) -> None:
        """Seed all generators.

        Args:
            position: Values that determine the seed. The first one is the rank.

        Cost:
            10 us; 15 us if the program uses NumPy.
        """
        if not self.enabled:
            return
        seed = _digest(self.base, *position)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed searches for all device types: 200 us
        if _cuda.is_initialized():
            _cuda.manual_seed_all(seed)
        random.seed(seed)
        # Only if the program has imported NumPy, which is not a dependency.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & _MASK_32)
        for generator, origin in self._own.values():
            # position[0] is the rank, on which the program's own generators must not depend.
            _seed(generator, _digest(origin, *position[1:]))


def _origin(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = getattr(generator, "bit_generator", generator)
    return str(state.state) if hasattr(state, "state") else str(state.get_state())


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & _MASK_32)


def loader_generators(source: Any) -> dict[str, Any]:
    """Return the generators of a DataLoader and its samplers, by path."""
    found: dict[str, Any] = {}
    for path in ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator"):
        value = source
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            found[path] = value
    return found


def seeded_iterator(
    loader: DataLoader[Any], seed_of_section: int, seed_generators: Callable[[], None]
) -> Iterator[Any]:
    """Return an iterator of a DataLoader with workers that seeds the generators for each batch.

    The seed of a batch follows from the section and the indices of its samples. It does not depend on the worker, or on
    the number of batches that were loaded before.

    Args:
        loader: The loader.
        seed_of_section: The seed from which the seeds of batches follow.
        seed_generators: Called before the sampler draws. Before that point, a DataLoader that keeps its workers has
            drawn other numbers than one that starts them.

    Raises:
        UsageError: The workers outlive the section, and cannot receive its seed.
    """
    batches = loader.batch_sampler
    persistent = bool(loader.persistent_workers)
    mapped = getattr(loader, "_dataset_kind", None) == 0
    if persistent and (batches is None or not mapped):
        kind = "an IterableDataset" if not mapped else "batch_size=None"
        raise UsageError(
            f"State: a DataLoader with persistent_workers=True and {kind} draws different random numbers in a"
            " replacement process, because its workers are new.\n  Pass persistent_workers=False."
        )
    # The attributes are read when the iterator is created, so they are restored afterwards.
    init = loader.worker_init_fn
    attributes = vars(loader)  # DataLoader.__setattr__ rejects a new batch_sampler
    try:
        if not isinstance(init, _SeedBatches):
            loader.worker_init_fn = _SeedBatches(init, seed_of_section)
        if batches is not None and mapped:
            # Persistent workers keep the iterator and its sampler, so a new batch_sampler would have no effect.
            if persistent and isinstance(getattr(loader._iterator, "_index_sampler", None), _SeededIndices):
                loader._iterator._index_sampler.renew(seed_of_section, seed_generators)  # type: ignore[union-attr]
            attributes["batch_sampler"] = _SeededIndices(batches, seed_of_section, seed_generators)
        return iter(loader)
    finally:
        loader.worker_init_fn = init
        attributes["batch_sampler"] = batches


class _Indices(list[Any]):
    """The indices of a batch, with the seed of the section for which they are loaded."""

    def __init__(self, indices: Any, seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Indices, (list(self), self.seed)


class _SeededIndices:
    """A batch sampler whose batches transfer the seed of the current section to the workers."""

    def __init__(self, batches: Any, seed: int, seed_generators: Callable[[], None]) -> None:
        self._batches = batches
        self.renew(seed, seed_generators)

    def renew(self, seed: int, seed_generators: Callable[[], None]) -> None:
        """Set the seed of a new section."""
        self.seed, self._seed_sampler = seed, seed_generators

    def __iter__(self) -> Iterator[_Indices]:
        self._seed_sampler()
        for indices in self._batches:
            yield _Indices(indices, self.seed)

    def __len__(self) -> int:
        return len(self._batches)


class _SeedBatches:
    """Initializes a worker of a DataLoader so that it seeds its generators before it loads a batch."""

    def __init__(self, init: Callable[[int], None] | None, seed: int) -> None:
        self._init = init
        self._seed = seed

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        from torch.utils.data._utils import fetch

        load, seed_of_section = fetch._MapDatasetFetcher.fetch, self._seed

        def fetch_seeded(self: Any, indices: Any) -> Any:
            # Without a batch sampler, indices have no seed. The worker then uses the section for which it was started.
            known = getattr(indices, "seed", seed_of_section)
            seed = _digest(known, list(indices) if isinstance(indices, list) else indices)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed & _MASK_32)
            return load(self, indices)  # type: ignore[no-untyped-call]

        # This changes only this worker process. Its main loop creates the fetcher after this call.
        fetch._MapDatasetFetcher.fetch = fetch_seeded  # type: ignore[method-assign]
