"""The schedulers and launchers that are known: one file each, one row each in ``SCHEDULERS``.

A package that is installed beside this one brings another through the entry point ``allranks.schedulers``. It is looked
for only where ALLRANKS_ENV, ``--env`` or ``submit --to`` names it: to look at the metadata of all packages takes 50 ms.
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
"""In the order in which they are asked: the innermost launcher first."""

_loaded: dict[str, Scheduler] = {}


def scheduler_named(name: str) -> Scheduler | None:
    """The scheduler of that name, ours or an installed package's; None where there is none.

    Raises:
        ConfigError: a package brings it, and it cannot be used.
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
    """The scheduler that finds contexts of this kind; None for the kind of none."""
    return next((each for each in (*SCHEDULERS, *_loaded.values()) if kind in each.kinds), None)


def remote_command(name: str) -> RemoteCommand:
    """The way to start agents of that name: ssh's, or a scheduler's."""
    commands = [command for each in (*SCHEDULERS, *_loaded.values()) for command in each.remote_commands]
    return next(command for command in (SSH, *commands) if command.name == name)
