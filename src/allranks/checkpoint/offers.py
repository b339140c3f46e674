"""What a rank tells the others of its tensors, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from allranks._base.errors import UsageError
from allranks._call.bytes import view_of
from allranks.checkpoint.layout import Job, Offer
from allranks.checkpoint.values import Flat, Shard

__all__ = ["local_part", "offer_of", "views_of"]

_SMALL = 64 << 10  # bytes: larger tensors are compared by a sample
_SAMPLES, _GRAIN = 1024, 64  # so many, of so many bytes


def offer_of(name: str, value: Tensor | Shard, own: Sequence[str]) -> Offer:
    """What this rank tells of a tensor. ``own``: paths of those of which each rank's is written."""
    part, offsets, shape = local_part(name, value)
    is_own = any(name == path or name.startswith(f"{path}.") for path in own)
    dtype = str(part.dtype).removeprefix("torch.")
    return Offer(name, dtype, part.element_size(), shape, offsets, tuple(part.shape), _digest(part), is_own)


def local_part(name: str, value: Tensor | Shard) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """What this rank has of a tensor: the part, where it begins, and the shape of the whole."""
    if isinstance(value, Shard):
        return value.tensor.detach(), value.offsets, value.shape
    if hasattr(value, "_local_tensor") and hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    return value.detach().resolve_conj().resolve_neg(), (0,) * value.dim(), tuple(value.shape)


def _part_of_dtensor(name: str, value: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(f"checkpoint: DTensor {name!r} is a partial sum; redistribute it before it is saved")
    part = value._local_tensor.detach()
    shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape) != tuple(part.shape):
        raise UsageError(
            f"checkpoint: DTensor {name!r}: its local part has shape {list(part.shape)}, not {list(shape)}"
        )
    whole = tuple(value.shape)
    offsets = tuple(min(begin, length) for begin, length in zip(offsets, whole, strict=True))
    return part, offsets, whole


def _digest(part: Tensor) -> int:
    """Of all bytes of a small tensor, of a sample of a large one."""
    if not part.numel():
        return 0
    if part.nbytes <= _SMALL:
        plain = part.cpu().contiguous()
        return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1
    flat = part.reshape(-1)  # a copy, where it is not contiguous
    stride = max(1, flat.numel() // _SAMPLES)
    grain = max(1, _GRAIN // part.element_size())
    rows = flat[: stride * _SAMPLES].view(-1, stride)[:, :grain] if flat.numel() >= stride * _SAMPLES else flat
    plain = torch.cat([rows.reshape(-1), flat[-grain:]]).cpu()
    return xxhash.xxh3_64_intdigest(view_of(plain)) >> 1


def views_of(jobs: Sequence[Job], flat: Flat) -> Sequence[memoryview]:
    """The bytes of what this rank writes."""
    return _Views([local_part(job.offer.name, flat.tensors[job.offer.name])[0] for job in jobs])


class _Views(Sequence[memoryview]):
    """The memory of tensors. One that is on a device, or not contiguous, is copied when it is its turn."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._tensors[index]
        self._plain = tensor.cpu().contiguous()
        return view_of(self._plain) if tensor.nbytes else memoryview(b"")

    def __iter__(self) -> Iterator[memoryview]:
        for index in range(len(self)):
            yield self[index]
