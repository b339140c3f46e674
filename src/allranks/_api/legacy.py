"""Names of THD and of earlier torch that still mean something, and questions about what is there.

THD had no lists in its collectives: one call gathered or scattered on the root, another elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from allranks import _engines
from allranks._api import collectives, world
from allranks._base.errors import ConfigError, UsageError
from allranks._base.public import publish
from allranks._call.types import ReduceOp, as_reduce_op
from allranks._cluster.env import DEFAULT_BACKEND
from allranks._engines import registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from allranks._group.process_group import ProcessGroup

__all__ = [
    "Backend",
    "default_pg_timeout",
    "gather_recv",
    "gather_send",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_num_processes",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "scatter_recv",
    "scatter_send",
    "supports_complex",
]

default_pg_timeout = timedelta(seconds=world.DEFAULT_TIMEOUT_S)


class Backend(str):
    """A name of an engine, in small letters: ``Backend("NATIVE") == Backend.NATIVE == "native"``.

    The names are torch's and ours; ``is_backend_available`` tests which of them this version has.

    Attributes:
        backend_list: the names of allranks' engines, and torch's others.
        default_device_backend_map: the engine by device type.
        backend_capability: the device types by engine; of the native one, which moves any, the usual ones.
    """

    UNDEFINED = "undefined"
    NATIVE = "native"
    ALLRANKS = "allranks"  # the same, as torch.distributed calls it
    TCP = "tcp"
    GLOO = "gloo"
    NCCL = "nccl"
    XCCL = "xccl"
    UCC = "ucc"
    MPI = "mpi"

    backend_list = (UNDEFINED, *registry.BUILT_IN, XCCL, UCC)
    default_device_backend_map: ClassVar[dict[str, str]] = _engines.engines_of(DEFAULT_BACKEND)
    backend_capability: ClassVar[dict[str, list[str]]] = {
        name: list(spec.devices or ("cpu", "cuda")) for name, spec in registry.BUILT_IN.items()
    }

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise UsageError(f"Backend: expected a name, not {name!r}")
        return super().__new__(cls, name.lower())


def get_num_processes(group: ProcessGroup | None = None) -> int:
    """``get_world_size`` by THD's name.

    Raises:
        NotInitializedError: there is no such group.
    """
    return world.get_world_size(group)


def gather_send(tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> None:
    """``gather`` on a rank that is not ``dst``.

    Args:
        tensor: what this rank gives.
        dst: who gets it, as a rank of the world.
        group: None is the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: as ``gather``.

    Shape:
        as ``gather``.

    Cost:
        as ``gather``.
    """
    collectives.gather(tensor, None, dst, group)


def gather_recv(tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """``gather`` on the rank that gets the tensors.

    Args:
        tensor_list: written: one tensor per rank.
        tensor: what this rank gives.
        group: None is the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: as ``gather``.

    Shape:
        as ``gather``.

    Cost:
        as ``gather``.
    """
    collectives.gather(tensor, tensor_list, None, group, group_dst=world.get_rank(group))


def scatter_send(tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """``scatter`` on the rank that has the tensors.

    Args:
        tensor_list: one tensor per rank.
        tensor: written: this rank's own.
        group: None is the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: as ``scatter``.

    Shape:
        as ``scatter``.

    Cost:
        as ``scatter``.
    """
    collectives.scatter(tensor, tensor_list, None, group, group_src=world.get_rank(group))


def scatter_recv(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """``scatter`` on a rank that is not ``src``.

    Args:
        tensor: written: what this rank gets.
        src: who has the tensors, as a rank of the world.
        group: None is the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: as ``scatter``.

    Shape:
        as ``scatter``.

    Cost:
        as ``scatter``.
    """
    collectives.scatter(tensor, None, src, group)


def is_backend_available(backend: str) -> bool:
    """Whether the engine is here: gloo and nccl are where torch was built with them, mpi where mpi4py is installed, one
    of another package where that is installed and in order.
    """
    return _engines.available(backend.lower())


def is_gloo_available() -> bool:
    """Whether the gloo engine is here: torch was built with it."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Whether the nccl engine is here: torch was built with it."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Whether the mpi engine is here: mpi4py is installed. Whether it finds an MPI shows when a group is made."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Whether this version of allranks has the ucc engine."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Whether this version of allranks has the xccl engine."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Whether torchrun, or a launcher that sets its variables, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """The engine by device type: ``cpu:native``, ``cpu:gloo,cuda:nccl``.

    Raises:
        NotInitializedError: there is no such group.
    """
    return ",".join(f"{device}:{name}" for device, name in _engines.engines_of(world.get_backend(group)).items())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """The engine that tensors on a device use, where the group was made without naming any.

    Raises:
        ConfigError: this version has none for it.
    """
    kind = str(device).partition(":")[0]
    usual = _engines.engines_of(DEFAULT_BACKEND)
    here = _engines.check_backend(None)
    if kind not in usual and not _engines.moves(here, kind):
        raise ConfigError(f"no engine of the default backend ({here}) moves tensors on {device}")
    return usual.get(kind, here)


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Whether the op takes complex numbers.

    Raises:
        UsageError: not a reduce op.
    """
    return as_reduce_op(reduceOp) in (ReduceOp.SUM, ReduceOp.AVG)


publish(globals())
