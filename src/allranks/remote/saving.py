"""What `torch.load` and its ``map_location`` need to bring tensors to workers.

torch reads the data of a tensor into a storage, asks for a storage on the wished device instead, and makes a tensor of
it. Handles have no storage: `Cargo` is one of the master's that says that it is the worker's, until a tensor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allranks.remote.tensor import RemoteTensor, place_of, special

__all__ = ["register"]


class Cargo(torch.UntypedStorage):
    """Data on its way to a worker."""

    target: torch.device
    there: RemoteTensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.target


def _deserialize(storage: Any, location: str) -> Any:
    device = torch.device(location) if location.partition(":")[0] == "worker" else None
    if device is None:
        return None
    cargo: Any = Cargo(storage.nbytes())  # type: ignore[no-untyped-call]
    cargo.copy_(storage)
    cargo.target = place_of(device).device
    return cargo


@special(torch.ops.aten.set_.source_Storage_storage_offset)
def _set(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, cargo, offset, size, strides = (*args, ())[:5]
    if not isinstance(cargo, Cargo):
        raise RuntimeError("set_: a tensor on a worker has no storage here; use set_ with a tensor, or copy_")
    if cargo.there is None:
        place = place_of(cargo.target)
        data = torch.UntypedStorage(cargo.nbytes())  # type: ignore[no-untyped-call]
        plain = torch.empty(0, dtype=torch.uint8).set_(data.copy_(cargo))
        cargo.there = place.master.upload(place, plain)
    typed = cargo.there if x.dtype is torch.uint8 else cargo.there.view(x.dtype)
    x.data = typed.as_strided(size, strides, offset)
    return x


def register() -> None:
    """Makes ``map_location="worker:1"`` known to `torch.load`."""
    torch.serialization.register_package(9, lambda storage: None, _deserialize)
