"""Descriptions of a rank's tensors, which the ranks exchange, and the bytes of the tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from allranks._base.errors import UsageError
from allranks._call.bytes import view_of
from allranks.checkpoint.layout import PartDescription, SaveJob
from allranks.checkpoint.values import Flat, Shard

__all__ = ["ComparisonRules", "digest_of", "local_part", "describe_part", "contiguous_on_cpu", "views_of", "as_words"]

_FULL_DIGEST_BYTES = 64 << 10  # larger tensors are compared by a sample
_SAMPLES, _SAMPLE_BYTES = 1024, 64  # number of samples, bytes of each
_WEIGHTS = 1 << 20  # number of weights, which is also the number of words in a sum
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class ComparisonRules(NamedTuple):
    """How tensors are compared between ranks: by all their bytes, except tensors below certain paths in the state.

    Attributes:
        own: Paths whose tensors every rank writes, without a comparison.
        alike: Paths whose tensors the program guarantees to be the same. A sample is compared.
        ranks: Number of ranks. A single rank compares nothing.
    """

    own: Sequence[str]
    alike: Sequence[str]
    ranks: int

    def digest(self, name: str, part: Tensor) -> int:
        """Return the digest of a tensor that the ranks compare."""
        # The digest is only for the comparison, which does not happen here.
        if self.ranks == 1 or is_below(name, self.own):
            return 0
        return sample_digest(part) if is_below(name, self.alike) else digest_of(part)


def is_below(name: str, paths: Sequence[str]) -> bool:
    """Return whether a tensor is at one of these paths, or below one."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def describe_part(name: str, value: Tensor | Shard, rules: ComparisonRules) -> PartDescription:
    """Return the description of a tensor of this rank."""
    part, offsets, shape = local_part(name, value)
    dtype, digest = str(part.dtype).removeprefix("torch."), rules.digest(name, part)
    is_own = is_below(name, rules.own)
    return PartDescription(name, dtype, part.element_size(), shape, offsets, tuple(part.shape), digest, is_own)


def local_part(name: str, value: Tensor | Shard) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the part of a tensor that this rank has, its offsets, and the shape of the whole tensor."""
    if isinstance(value, Shard):
        return value.tensor.detach(), value.offsets, value.shape
    if hasattr(value, "_local_tensor") and hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    return value.detach(), (0,) * value.dim(), tuple(value.shape)


def _part_of_dtensor(name: str, value: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(f"checkpoint: DTensor {name!r} is a partial sum.\n  Redistribute it before saving.")
    part = value._local_tensor.detach()
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape) != tuple(part.shape):
        raise UsageError(
            f"checkpoint: the local part of DTensor {name!r} has shape {list(part.shape)}; expected {list(shape)}.\n"
            "  Pass shape= and stride= to DTensor.from_local if the shards differ in size."
        )
    whole = tuple(value.shape)
    # For an empty shard, torch may return an offset beyond the end.
    offsets = tuple(min(begin, length) for begin, length in zip(offsets, whole, strict=True))
    return part, offsets, whole


def as_words(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of a basic dtype: torch cannot copy every dtype. Copies lazy views."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain.view(_WORDS[plain.element_size()])


def contiguous_on_cpu(tensor: Tensor) -> Tensor:
    """Return the elements without gaps, on the CPU. They are copied only if necessary."""
    return as_words(tensor).cpu().contiguous()


def digest_of(part: Tensor) -> int:
    """Return the digest of all bytes.

    A device computes another digest: a copy to the CPU would take longer than everything else.
    """
    if not part.numel():
        return 0
    if part.is_cpu:
        plain = contiguous_on_cpu(part)  # keep a reference: the view holds none
        return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1
    return sums_digest(part)


def sample_digest(part: Tensor) -> int:
    """Return the digest of all bytes of a small tensor, or of a sample of a large one."""
    if part.nbytes <= _FULL_DIGEST_BYTES:
        return digest_of(part)
    flat = as_words(part).reshape(-1)
    stride, grain = max(1, flat.numel() // _SAMPLES), max(1, _SAMPLE_BYTES // flat.element_size())
    rows = flat[: stride * _SAMPLES].view(_SAMPLES, stride)[:, :grain]
    # The last elements are added, because the rows end before a remainder.
    plain = torch.cat([rows.reshape(-1), flat[-grain:]]).cpu()
    return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1


def sums_digest(part: Tensor) -> int:
    """Return a digest that a device computes: 64-bit sums of the words, each multiplied by its own odd weight.

    An odd number is invertible modulo 2**64, so the change of a single word always changes its sum.
    """
    words = as_words(part).reshape(-1)
    words = words.view(torch.int64) if words.is_complex() else words
    weights = _weights(words.device)
    length = weights.numel()
    chunks = (words[begin : begin + length] for begin in range(0, words.numel(), length))
    sums = torch.stack([(chunk.long() * weights[: chunk.numel()]).sum() for chunk in chunks]).cpu()
    return xxhash.xxh3_64_intdigest(view_of(sums)) >> 1


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the weights, which are the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    # A separate generator with a fixed seed, so that the program's generator is unchanged.
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (_WEIGHTS,), generator=generator, device="cpu")
    return (drawn | 1).to(device)


def views_of(jobs: Sequence[SaveJob], flat: Flat) -> Sequence[memoryview]:
    """Return the bytes that this rank writes."""
    return _Views([local_part(job.description.name, flat.tensors[job.description.name])[0] for job in jobs])


class _Views(Sequence[memoryview]):
    """The memory of tensors. A tensor on a device, or not contiguous, is copied when its turn comes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._tensors[index]
        # Held until the next view is requested: the view does not keep the copy alive.
        self._plain = contiguous_on_cpu(tensor)
        return view_of(self._plain) if tensor.nbytes else memoryview(b"")

    def __iter__(self) -> Iterator[memoryview]:
        for index in range(len(self)):
            yield self[index]
