"""Placement of DTensors on ranks. It determines which rank can send a replacement process its shard.

That rank has the same coordinates in all mesh dimensions in which the tensor is not replicated. If a model is sharded
without a replicated dimension, only one rank has these coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allranks._call.digests import is_dtensor

__all__ = ["Layout", "Parts", "dtensors_in", "layout_of", "meshes_in", "restored"]


Parts = Mapping[str, Any]
"""The contents of a state: modules, optimizers, objects with state_dict and load_state_dict, tensors, dicts."""


class Layout(NamedTuple):
    """Distribution of a DTensor over ranks. DTensors with equal layouts on two ranks are parts of the same tensor.

    Attributes:
        device: Device type of the mesh.
        extents: Extents of the mesh.
        ranks: World ranks of the mesh's positions. The last dimension varies fastest.
        placements: Placement in each dimension of the mesh.
        shape: Shape of the whole tensor.
        stride: Stride of the whole tensor.
    """

    device: str
    extents: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def mesh(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Identity of the mesh."""
        return self.device, self.extents, self.ranks

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the same data as another rank."""
        return any(
            extent > 1 and placement.is_replicate()
            for extent, placement in zip(self.extents, self.placements, strict=True)
        )

    def same(self, rank: int, other: int) -> bool:
        """Return whether two ranks have the same shard. Two ranks outside the mesh both have none."""
        return self._shard(rank) == self._shard(other)

    def _shard(self, rank: int) -> tuple[int, ...] | None:
        """Return a rank's coordinates in the dimensions in which the tensor is not replicated."""
        if rank not in self.ranks:
            return None
        place, found = self.ranks.index(rank), []
        for extent, placement in zip(reversed(self.extents), reversed(self.placements), strict=True):
            # The last dimension varies fastest, so divide by its extent first.
            place, coordinate = divmod(place, extent)
            if not placement.is_replicate():
                found.append(coordinate)
        return tuple(found)


def layout_of(tensor: Tensor) -> Layout | None:
    """Return the layout of a DTensor, or None for any other tensor."""
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


def restored(local: Tensor, layout: Layout, meshes: Mapping[Any, Any]) -> Tensor:
    """Return a DTensor with the local shard ``local``. ``meshes`` is the result of ``meshes_in``."""
    from torch.distributed.tensor import DTensor

    made: Any = DTensor
    return made.from_local(  # type: ignore[no-any-return]
        local,
        meshes[layout.mesh],
        layout.placements,
        # The check would communicate, and the other ranks do not call this function.
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
    )


def dtensors_in(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yield the DTensors among the parts of a state and in its modules, with their names."""
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
    """Return the meshes of these DTensors, by ``Layout.mesh``."""
    found = {}
    for _, tensor in dtensors_in(parts):
        layout = layout_of(tensor)
        assert layout is not None
        found[layout.mesh] = tensor.device_mesh  # type: ignore[attr-defined]
    return found
