"""The supported schedulers and launchers: one file each, and one row each in ``SCHEDULERS``.

Another installed package can add a scheduler through the entry point ``allranks.schedulers``. Entry points are read
only if ALLRANKS_ENV, ``--env`` or ``submit --to`` names such a scheduler: reading the metadata of all packages takes 50
ms.
"""

from __future__ import annotations

from allranks._base.extensions import entry_points, load
from allranks._cluster.schedulers import flux, kubernetes, lsf, mpi, pbs, sagemaker, sge, slurm, torchrun
from allranks._cluster.schedulers.interface import INTERFACE, RemoteCommand, Scheduler
from allranks._cluster.schedulers.ssh import SSH

__all__ = ["ENTRY_POINTS", "SCHEDULERS", "scheduler_of", "scheduler_named", "remote_command"]

ENTRY_POINTS = "allranks.schedulers"

SCHEDULERS: tuple[Scheduler, ...] = (
    torchrun.SCHEDULER,
    mpi.SCHEDULER,
    lsf.SCHEDULER,
    flux.SCHEDULER,
    slurm.SCHEDULER,
    kubernetes.SCHEDULER,
    sagemaker.SCHEDULER,
    pbs.SCHEDULER,
    sge.SCHEDULER,
)
"""All schedulers of this package, in the order of detection: the innermost launcher first."""

_loaded: dict[str, Scheduler] = {}


def scheduler_named(name: str) -> Scheduler | None:
    """Return the scheduler of that name, of allranks or of an installed package. None if there is none.

    Raises:
        ConfigError: An installed package provides the scheduler, but it cannot be used.
    """
    for scheduler in (*SCHEDULERS, *_loaded.values()):
        if scheduler.name == name:
            return scheduler
    points = [point for point in entry_points(ENTRY_POINTS) if point.name == name]
    if not points:
        return None
    _loaded[name] = load(points, f"scheduler {name!r}", "scheduler", Scheduler, (INTERFACE, INTERFACE))
    return _loaded[name]


def scheduler_of(kind: str) -> Scheduler | None:
    """Return the scheduler that detects contexts of this kind. None if no scheduler does."""
    return next((each for each in (*SCHEDULERS, *_loaded.values()) if kind in each.kinds), None)


def remote_command(name: str) -> RemoteCommand:
    """Return the command of that name that starts agents: ssh, or the command of a scheduler."""
    commands = [command for each in (*SCHEDULERS, *_loaded.values()) for command in each.remote_commands]
    return next(command for command in (SSH, *commands) if command.name == name)
