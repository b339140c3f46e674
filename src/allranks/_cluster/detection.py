"""Who started this process, by its environment: the schedulers and launchers are asked in turn, the innermost first.

A program that something else has started learns who it is (``launcher=False``). ``allranks run`` learns what is left to
do (``launcher=True``): start ranks on the nodes of an allocation, on this node only, or none at all.

Only the environment is read here, and ``read_hosts`` reads one file or asks one command. ``_rendezvous`` decides how
the ranks then meet. The table of our own variables is in ``env``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots
from allranks._cluster.reading import Environ
from allranks._cluster.schedulers import SCHEDULERS, remote_command, scheduler_named, scheduler_of
from allranks._cluster.schedulers.interface import RemoteCommand, Scheduler
from allranks._cluster.schedulers.ssh import SSH

__all__ = ["CHOICES", "command_for", "detect", "read_hosts"]

CHOICES: tuple[str, ...] = ("auto", "local", "ssh", *(scheduler.name for scheduler in SCHEDULERS))
"""The values of ALLRANKS_ENV and ``--env``, beside schedulers of other packages. "local" and "ssh" look for nothing."""


def detect(environ: Mapping[str, str], override: str = "auto", *, launcher: bool) -> LaunchContext:
    """Says where this process runs.

    Args:
        environ: the environment.
        override: one of ``CHOICES``, or a scheduler of an installed package: looks only for that. "auto": for what
            ALLRANKS_ENV says, else for all.
        launcher: this process is to start ranks. Otherwise it is a program that may be one.

    Returns:
        The context; ``kind="local"`` and ``role="none"`` where nothing is found.

    Raises:
        ConfigError: variables are missing, contradict each other, or are not what they should be; or what ``override``
            names is not found.
    """
    source = "--env"
    if override == "auto":
        source, override = "ALLRANKS_ENV", environ.get("ALLRANKS_ENV", "").strip() or "auto"
    if override in ("local", "ssh"):
        return LaunchContext("local", "none")
    schedulers = SCHEDULERS
    if override != "auto":
        named = scheduler_named(override)
        if named is None:
            raise ConfigError(f"{source}={override!r} is not known. Expected one of {', '.join(CHOICES)}.")
        schedulers = (named,)
    context = _find(environ, launcher, schedulers)
    if context is None and override != "auto" and launcher:
        raise ConfigError(
            f"{source}={override}, but no variable of it is set here: expected {schedulers[0].proof}.\n"
            "  Start this where that scheduler has set them, or leave the choice to allranks: --env auto"
        )
    return context or LaunchContext("local", "none")


def read_hosts(context: LaunchContext) -> tuple[Slots, ...]:
    """The nodes of an allocation, also where they stand in no variable.

    Raises:
        ConfigError: their file cannot be read, or is not what it should be; or the scheduler does not answer.
    """
    scheduler = scheduler_of(context.kind)
    if context.hosts or scheduler is None or scheduler.read_hosts is None:
        return context.hosts
    if context.role != "allocation" and not context.hostfile:
        return ()
    return scheduler.read_hosts(context)


def command_for(context: LaunchContext) -> RemoteCommand:
    """How agents are started on the nodes of an allocation: by the first of its commands that is here, else ssh."""
    commands = (remote_command(name) for name in context.remote_commands)
    return next((command for command in commands if shutil.which(command.name)), SSH)


def _find(environ: Environ, launcher: bool, schedulers: tuple[Scheduler, ...]) -> LaunchContext | None:
    """Variables of ranks come first, then those of what started one process on each host, then allocations'."""
    for scheduler in schedulers:
        if scheduler.rank is not None and (context := scheduler.rank(environ, launcher)) is not None:
            return context
    if (context := _find_task(environ, launcher, schedulers)) is not None:
        return context
    for scheduler in schedulers:
        if scheduler.node is not None and (context := scheduler.node(environ, launcher)) is not None:
            return context
    for scheduler in schedulers:
        if scheduler.allocation is not None and (context := scheduler.allocation(environ, launcher)) is not None:
            return context
    return None


def _find_task(environ: Environ, launcher: bool, schedulers: tuple[Scheduler, ...]) -> LaunchContext | None:
    """A process that MPI's launcher or a scheduler started as one of several.

    MPI's variables win, as a scheduler's stay in the environment of what is started inside. Where both say the same,
    they are one launcher's, and the scheduler knows more: the nodes.
    """
    context: LaunchContext | None = None
    for row in (row for scheduler in schedulers for row in scheduler.tasks):
        if not row.applies(environ) or (context is not None and row.is_mpi):
            continue
        try:
            found = row.find(environ)
        except ConfigError:
            if context is None:
                raise
            continue  # leftovers, beside what proves itself
        if found is None:
            continue
        if context is None:
            context = found
        elif (found.rank, found.size) == (context.rank, context.size):
            context = replace(found, pmi=found.pmi if context.pmi is None else context.pmi, why=context.why + found.why)
            break
    if context is not None and launcher:
        return _as_node(context)
    return context


def _as_node(context: LaunchContext) -> LaunchContext:
    """One task on each node, and so the only one here: an agent is wanted, not a rank."""
    one_each = context.size == context.nodes if context.nodes is not None else context.local_size == 1
    if not one_each or any(slots.count not in (None, 1) for slots in context.hosts):
        return context
    return replace(context, role="node", node=context.rank, nodes=context.size, local_rank=None, local_size=None)
