"""Selection of the samples that a rank trains on.

`DistributedSampler` is torch's class, but it reads rank and world size from allranks's world instead of
torch.distributed's. The indices are exactly the same. One behavior of torch is kept on purpose: before
`init_process_group`, it raises. A sampler that assumed a world of one rank would train every rank on all of the data,
and the job would appear to work.

`DataLoader` and `Dataset` are torch's. The caller is responsible for `set_epoch` before each epoch, and for the tail
of the data set (see `DistributedSampler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as _TorchDistributedSampler

from allranks._api import world
from allranks._base.errors import UsageError
from allranks._base.public import publish

__all__ = ["DistributedSampler"]

T_co = TypeVar("T_co", covariant=True)


class DistributedSampler(_TorchDistributedSampler[T_co]):
    """Distributes one permutation of a data set over the ranks, one element after the other.

    Rank r of R gets elements r, r + R, r + 2R, ... of a permutation that depends on ``seed`` and on the epoch only.
    With a per-rank batch size of b, the k-th batches of all ranks together are therefore its elements [k*b*R,
    (k+1)*b*R). One process with batch size b*R would use the same global batch, for any number of ranks.

    The exception is the tail. With ``drop_last=False`` (the default), the permutation is padded with its own beginning
    until R divides its length. Up to R - 1 samples then count twice. This is right for training, but wrong for
    measuring accuracy (slice the test set with ``data[rank::world_size]`` instead). With ``drop_last=True`` here and in
    the `DataLoader`, no sample counts twice.

    Args:
        dataset: The data set to sample from. Only its length is used.
        num_replicas: Number of ranks. Default: the size of the world.
        rank: This rank. Default: its rank in the world.
        shuffle: False: use the order of the data set.
        seed: Must be the same on all ranks.
        drop_last: Drop up to R - 1 samples instead of repeating them.

    Raises:
        NotInitializedError: ``num_replicas`` or ``rank`` is omitted and there is no world yet.
        UsageError: ``rank`` is not in [0, ``num_replicas``).

    Cost: One permutation of the data set's indices per epoch, on every rank; no communication.

    Source: torch.utils.data.distributed.DistributedSampler, which it subclasses.

    Example:
        >>> from allranks.data import DistributedSampler
        >>> list(DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=False))
        [1, 3, 5, 7, 9]
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = world.get_world_size()
        if rank is None:
            rank = world.get_rank()
        if not 0 <= rank < num_replicas:
            raise UsageError(f"DistributedSampler: rank={rank}: expected 0 to num_replicas - 1 = {num_replicas - 1}")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self._dealt = 0  # elements of the permutation that all ranks have received before

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the permutation. The whole data set is distributed again."""
        super().set_epoch(epoch)
        self._dealt = 0

    def deal(self, dealt: int, rank: int, num_replicas: int) -> None:
        """Distribute the rest of an epoch, over other ranks or the same ones.

        Args:
            dealt: Number of elements of the permutation that all ranks together have already received. A number above
                the length of the data set counts as that length.
            rank: This rank.
            num_replicas: Number of ranks.

        Raises:
            UsageError: ``rank`` is not in [0, ``num_replicas``), or ``dealt`` is negative.
        """
        if not 0 <= rank < num_replicas:
            raise UsageError(f"DistributedSampler: rank={rank}: expected 0 to num_replicas - 1 = {num_replicas - 1}")
        if dealt < 0:
            raise UsageError(f"DistributedSampler: dealt={dealt}: expected a number of elements, at least 0")
        self.rank, self.num_replicas = rank, num_replicas
        self._dealt = min(dealt, len(self.dataset))  # type: ignore[arg-type]
        left = len(self.dataset) - self._dealt  # type: ignore[arg-type]
        self.num_samples = left // num_replicas if self.drop_last else -(-left // num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[T_co]:
        if not self._dealt:
            yield from super().__iter__()
            return
        order = self._permutation()
        rest = order[self._dealt :][: self.total_size]
        # Pad with the beginning of the permutation, as torch does.
        while len(rest) < self.total_size:
            rest += order[: self.total_size - len(rest)]
        yield from rest[self.rank :: self.num_replicas]

    def _permutation(self) -> list[Any]:
        count = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator, device="cpu").tolist()


def adopt(sampler: object) -> DistributedSampler[Any] | None:
    """Return a sampler that can distribute the rest of an epoch; None if it is neither allranks's nor torch's own.

    A sampler of torch is converted in place, because a DataLoader does not accept a replacement.
    """
    if type(sampler) is _TorchDistributedSampler:
        sampler.__class__ = DistributedSampler
        vars(sampler)["_dealt"] = 0
    return sampler if isinstance(sampler, DistributedSampler) else None


publish(globals())
