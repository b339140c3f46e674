"""Replicas of a sharded model that join and leave: FSDP2 on a mesh whose first dimension is replicated (HSDP).

Groups of the mesh continue in the same objects (`_elastic/early_groups`), so they return the current sizes to torch.
FSDP2 divides gradients by the sizes of its groups. The mesh itself is a separate table of ranks. `Replicas` writes the
table of the current ranks into the same mesh object, because parameters, optimizer states and modules each hold a
reference to it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from allranks._base.errors import AllranksError, UsageError
from allranks._elastic.early_groups import early_groups_of
from allranks._elastic.training.fully_sharded import param_groups
from allranks._elastic.training.shards import dtensors_in, layout_of

if TYPE_CHECKING:
    from allranks._elastic.membership_change import Proposal
    from allranks._elastic.training.shards import Parts
    from allranks._group.process_group import ProcessGroup

__all__ = ["Replicas"]

# Attributes that a mesh keeps: its groups, and the keys under which other objects have found it.
_KEPT = {"_dim_group_names", "_pg_registry", "_root_mesh", "_flatten_mapping", "_thread_id", "_hash"}


class Replicas:
    """The replicas of the sharded parts of a state.

    Attributes:
        obstacle: Why the number of replicas cannot change. "": it can.
        size: Number of ranks in one replica. 1 if an obstacle exists.
    """

    def __init__(self, parts: Parts, modules: Sequence[nn.Module], world: ProcessGroup) -> None:
        """Inspect the meshes. Called before the loop, with the ranks for which the program has created them."""
        self._parts = parts
        self._modules = modules
        self.size = 1
        self.obstacle = self._find_obstacle(world)
        if not self.obstacle:
            self.size = math.prod(self._mesh.mesh.shape[1:])

    def check(self, proposals: Sequence[Proposal]) -> None:
        """Refuse to continue if no replica is complete.

        Raises:
            AllranksError: No remaining rank has the shards of some place in a replica.
        """
        missing = set(range(self.size)) - {proposal.place % self.size for proposal in proposals}
        if missing:
            raise AllranksError(
                f"State: no remaining rank has the shards of position {min(missing)} in a replica of the model,"
                f" which has {self.size} positions.\n"
                "  Restart the job from a checkpoint (automatic with allranks run --restarts)."
            )

    def renumber(self, world: ProcessGroup) -> None:
        """Write the current ranks into the mesh. Sends nothing.

        Raises:
            UsageError: A part of the mesh cannot be determined.
        """
        mesh = self._mesh
        rows = world.size() // self.size
        ranks = torch.arange(world.size(), device="cpu").view(rows, *mesh.mesh.shape[1:])
        fresh = self._mesh_of(ranks, world.rank())
        # Check all slices before any is changed, so that a refusal leaves the mesh intact.
        slices = list(_slices(mesh))
        if mesh._flatten_mapping or any(set(each.mesh_dim_names or "?") - set(_names(mesh)) for each in slices):
            raise UsageError(
                "State: a mesh with flattened dimensions cannot continue with a different set of ranks.\n"
                "  Let the launcher replace lost ranks (allranks run --elastic, --respawns)."
            )
        for each in slices:
            _take(each, fresh[each.mesh_dim_names])
        _take(mesh, fresh)
        for info in {id(group.mesh_info): group.mesh_info for group in self._groups()}.values():
            # FSDP2 copies these numbers from the mesh when it wraps a module, and does not read the mesh again.
            info.replicate_mesh_size, info.replicate_mesh_rank = rows, world.rank() // self.size

    def check_groups(self) -> None:
        """Reject a torch version whose groups keep their original sizes.

        Raises:
            UsageError: This torch version is one of them.
        """
        extents = self._mesh.mesh.shape
        sizes = [torch.distributed.ProcessGroup.size(self._mesh.get_group(n)) for n in range(len(extents))]
        if sizes != list(extents):
            raise UsageError(
                f"State: in torch {torch.__version__} a sharded model cannot continue with a different set of"
                " ranks.\n  Let the launcher replace lost ranks (allranks run --elastic, --respawns)."
            )

    def _find_obstacle(self, world: ProcessGroup) -> str:
        if early_groups_of(world) is None:
            return "the launcher is not allranks run --elastic"
        found = [(tensor, layout_of(tensor)) for _, tensor in dtensors_in(self._parts)]
        meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor, _ in found}  # type: ignore[attr-defined]
        meshes |= {id(group.mesh_info.mesh): group.mesh_info.mesh for group in self._groups()}
        self._mesh: Any = next(iter(meshes.values()))
        if len(meshes) > 1:
            return "the model is on several meshes"
        extents = tuple(self._mesh.mesh.shape)
        if self._mesh.mesh.flatten().tolist() != list(range(world.size())) or _root(self._mesh) is not self._mesh:
            return "the mesh does not contain all ranks in order"
        if len(extents) < 2 or extents[0] < 2 or math.prod(extents[1:]) == 1:
            return "the mesh needs several replicas in its first dimension and several shards in the others"
        if not all(layout is not None and layout.placements[0].is_replicate() for _, layout in found):
            return "the model is sharded in the first dimension of the mesh"
        if any(group.post_forward_mesh_info not in (None, group.mesh_info) for group in self._groups()):
            return "the model is resharded after the forward on a mesh of fewer ranks (reshard_after_forward=N)"
        return ""

    def _groups(self) -> Iterator[Any]:
        return (group for module in self._modules for group in param_groups(module))

    def _mesh_of(self, ranks: torch.Tensor, rank: int) -> Any:
        mesh = self._mesh
        # _init_backend=False: otherwise the mesh would create process groups, which needs communication.
        made = type(mesh)(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False, _rank=rank)
        made._dim_group_names = mesh._dim_group_names
        return made


def _root(mesh: Any) -> Any:
    return mesh._get_root_mesh()


def _names(mesh: Any) -> Sequence[str]:
    return mesh.mesh_dim_names or ()


def _slices(mesh: Any) -> Iterator[Any]:
    """Yield the submeshes of this mesh that exist in the program."""
    kind = type(mesh)
    # A root mesh has no list of its submeshes, so search all objects of the process.
    for each in gc.get_objects():
        if type(each) is kind and each is not mesh and _root(each) is mesh:
            yield each


def _take(mesh: Any, fresh: Any) -> None:
    """Copy the ranks of another mesh into a mesh, which keeps its own groups."""
    for name, value in vars(fresh).items():
        if name not in _KEPT:
            setattr(mesh, name, value)
