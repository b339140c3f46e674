"""Which rank has what of a DTensor, so that a process that takes a place gets its shard from a rank with the same one.

That is a rank with the same coordinates in all dimensions of the mesh in which the tensor is not replicated. A model
that is sharded without a replicated dimension has one such rank only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Layout", "Parts", "dtensors_in", "is_dtensor", "layout_of", "local_of", "meshes_in", "restored", "shard_of"]


Parts = Mapping[str, Any]
"""What a state consists of: modules, optimizers, anything with state_dict and load_state_dict, tensors, dicts."""


class Layout(NamedTuple):
    """How a DTensor lies over ranks. Two ranks' DTensors with one layout are parts of the same tensor.

    Attributes:
        device: the type of the mesh's devices.
        extents: of the mesh.
        ranks: in the world, of the mesh's places, the last dimension fastest.
        placements: by dimension of the mesh.
        shape: of the whole tensor.
        stride: of the whole tensor.
    """

    device: str
    extents: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def mesh(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What tells meshes apart."""
        return self.device, self.extents, self.ranks

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the same as another one."""
        return any(
            extent > 1 and placement.is_replicate()
            for extent, placement in zip(self.extents, self.placements, strict=True)
        )

    def same(self, rank: int, other: int) -> bool:
        """Whether two ranks have the same of the tensor; those that are not in the mesh have nothing."""
        return self._shard(rank) == self._shard(other)

    def _shard(self, rank: int) -> tuple[int, ...] | None:
        """A rank's coordinates in the dimensions in which the tensor is not replicated."""
        if rank not in self.ranks:
            return None
        place, found = self.ranks.index(rank), []
        for extent, placement in zip(reversed(self.extents), reversed(self.placements), strict=True):
            place, coordinate = divmod(place, extent)
            if not placement.is_replicate():
                found.append(coordinate)
        return tuple(found)


def layout_of(tensor: Tensor) -> Layout | None:
    """That of a DTensor; None of any other tensor."""
    if not is_dtensor(tensor):
        return None
    found: Any = tensor
    mesh = found.device_mesh
    return Layout(
        mesh.device_type,
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(found.placements),
        tuple(found.shape),
        tuple(found.stride()),
    )


def local_of(tensor: Tensor) -> Tensor:
    """The memory that this rank has of a tensor, detached."""
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def shard_of(tensor: Tensor) -> str:
    """Which shard of a DTensor this rank has, as a text; "" for any other tensor."""
    if not is_dtensor(tensor):
        return ""
    found: Any = tensor
    coordinates = found.device_mesh.get_coordinate() or ()
    return str([c for c, p in zip(coordinates, found.placements, strict=False) if not p.is_replicate()])


def restored(local: Tensor, layout: Layout, meshes: Mapping[Any, Any]) -> Tensor:
    """A DTensor of which this rank has ``local``. The meshes are those of ``meshes_in``."""
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    return made.from_local(  # type: ignore[no-any-return]
        local,
        meshes[layout.mesh],
        layout.placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
    )


def dtensors_in(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """The DTensors among the parts of a state and in its modules, with their names."""
    for name, part in parts.items():
        found: Iterable[tuple[str, Any]] = ()
        if isinstance(part, nn.Module):
            found = [*part.named_parameters(), *part.named_buffers()]
        elif isinstance(part, dict):
            found = part.items()
        elif isinstance(part, Tensor):
            found = [("", part)]
        for inner, tensor in found:
            if is_dtensor(tensor):
                yield f"{name}: {inner}" if inner else name, tensor


def meshes_in(parts: Parts) -> dict[Any, Any]:
    """The meshes of these DTensors, by ``Layout.mesh``."""
    found = {}
    for _, tensor in dtensors_in(parts):
        layout = layout_of(tensor)
        assert layout is not None
        found[layout.mesh] = tensor.device_mesh  # type: ignore[attr-defined]
    return found


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where it is not imported there are none
    return module is not None and isinstance(value, module.DTensor)
