"""The schedulers and launchers that are known: one file each, one row each in ``SCHEDULERS``.

A package that is installed beside this one brings another through the entry point ``allranks.schedulers``. It is looked
for only where ALLRANKS_ENV, ``--env`` or ``submit --to`` names it: to look at the metadata of all packages takes 50 ms.
"""

from __future__ import annotations

from typing import Any

from allranks._base.errors import ConfigError
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
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS, name=name):
        _loaded[name] = _load(point)
        return _loaded[name]
    return None


def scheduler_of(kind: str) -> Scheduler | None:
    """The scheduler that finds contexts of this kind; None for the kind of none."""
    return next((each for each in (*SCHEDULERS, *_loaded.values()) if kind in each.kinds), None)


def remote_command(name: str) -> RemoteCommand:
    """The way to start agents of that name: ssh's, or a scheduler's."""
    commands = [command for each in (*SCHEDULERS, *_loaded.values()) for command in each.remote_commands]
    return next(command for command in (SSH, *commands) if command.name == name)


def _load(point: Any) -> Scheduler:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    source = f"scheduler {point.name!r} of {package} ({point.value})"
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(
            f"{source} cannot be loaded: {type(error).__name__}: {error}\n"
            f"  Mend or remove that package; this allranks has version {INTERFACE} of the interface of schedulers."
        ) from error
    if not isinstance(found, Scheduler) or found.name != point.name:
        raise ConfigError(f"{source}: expected a Scheduler of that name, got {found!r}")
    if found.interface != INTERFACE:
        newer = found.interface > INTERFACE
        what = "upgrade allranks" if newer else "upgrade that package"
        raise ConfigError(
            f"{source} was written for version {found.interface} of the interface of schedulers; this allranks has"
            f" version {INTERFACE}: {what}"
        )
    return found
