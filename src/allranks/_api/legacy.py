"""Names from THD and earlier versions of torch that are still supported, and queries of available features.

THD's collectives had no lists: the root called one function to gather or scatter, and the other ranks called another.
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
    """Name of an engine, in lower case: ``Backend("NATIVE") == Backend.NATIVE == "native"``.

    The names are those of torch and allranks. ``is_backend_available`` tests which of them this version has.

    Attributes:
        backend_list: Names of allranks's engines, and torch's other names.
        default_device_backend_map: The engine by device type.
        backend_capability: The device types by engine. For the native engine, which supports any device, the usual
            types.
    """

    UNDEFINED = "undefined"
    NATIVE = "native"
    ALLRANKS = "allranks"  # the native engine, as torch.distributed calls it
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
    """Call ``get_world_size``, under its name in THD.

    Raises:
        NotInitializedError: The group does not exist.
    """
    return world.get_world_size(group)


def gather_send(tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> None:
    """Call ``gather`` on a rank other than ``dst``.

    Args:
        tensor: Input of this rank.
        dst: Rank of the world that receives it.
        group: The process group. None: the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``gather``.

    Shape:
        as ``gather``.

    Cost:
        as ``gather``.
    """
    collectives.gather(tensor, None, dst, group)


def gather_recv(tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Call ``gather`` on the rank that receives the tensors.

    Args:
        tensor_list: Receives one tensor per rank.
        tensor: Input of this rank.
        group: The process group. None: the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``gather``.

    Shape:
        as ``gather``.

    Cost:
        as ``gather``.
    """
    collectives.gather(tensor, tensor_list, None, group, group_dst=world.get_rank(group))


def scatter_send(tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Call ``scatter`` on the rank that has the tensors.

    Args:
        tensor_list: One tensor per rank.
        tensor: Receives this rank's own tensor.
        group: The process group. None: the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``scatter``.

    Shape:
        as ``scatter``.

    Cost:
        as ``scatter``.
    """
    collectives.scatter(tensor, tensor_list, None, group, group_src=world.get_rank(group))


def scatter_recv(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Call ``scatter`` on a rank other than ``src``.

    Args:
        tensor: Output of this rank.
        src: Rank of the world that has the tensors.
        group: The process group. None: the world.

    Raises:
        UsageError, MismatchError, PeerLostError, TimeoutError: See ``scatter``.

    Shape:
        as ``scatter``.

    Cost:
        as ``scatter``.
    """
    collectives.scatter(tensor, None, src, group)


def is_backend_available(backend: str) -> bool:
    """Return whether the engine is available.

    gloo and nccl are available if torch was built with them, and mpi if mpi4py is installed. An engine of another
    package is available if that package is installed and works.
    """
    return _engines.available(backend.lower())


def is_gloo_available() -> bool:
    """Return whether the gloo engine is available: torch was built with it."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return whether the nccl engine is available: torch was built with it."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed. Whether it finds an MPI library becomes known when a group is created."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether this version of allranks has the ucc engine."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether this version of allranks has the xccl engine."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Return whether torchrun, or a launcher that sets its variables, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return the engine by device type: ``cpu:native``, ``cpu:gloo,cuda:nccl``.

    Raises:
        NotInitializedError: The group does not exist.
    """
    return ",".join(f"{device}:{name}" for device, name in _engines.engines_of(world.get_backend(group)).items())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the engine for tensors on a device, if a group was created without a backend argument.

    ALLRANKS_BACKEND (``allranks run --backend``) sets the backend of such groups.

    Raises:
        ConfigError: This version has no engine for the device, or ALLRANKS_BACKEND is invalid.
    """
    kind = str(device).partition(":")[0]
    here = world.chosen_backend(None)
    # Without the variable, the engine of a device that this process lacks is known, too.
    usual = _engines.engines_of(here if os.environ.get("ALLRANKS_BACKEND") else DEFAULT_BACKEND)
    if kind not in usual and not _engines.moves(here, kind):
        raise ConfigError(
            f"get_default_backend_for_device: no engine of the default backend ({here}) supports tensors on {device}.\n"
            f"  Pass a device of type {' or '.join(usual)}."
        )
    return usual.get(kind, here)


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether the op supports complex numbers.

    Raises:
        UsageError: The argument is not a reduce op.
    """
    return as_reduce_op(reduceOp) in (ReduceOp.SUM, ReduceOp.AVG)


publish(globals())
