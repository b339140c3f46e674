"""Detection of the launcher or scheduler that started this process, from the environment: the innermost one first.

A program that was started by another launcher obtains its rank (``launcher=False``). ``allranks run`` obtains which
processes it must start (``launcher=True``): ranks on the nodes of an allocation, ranks on this node only, or none.

This module reads only the environment. ``read_hosts`` also reads one file or runs one command. ``_rendezvous`` decides
how the ranks then meet. The table of allranks's own variables is in ``env``.
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
"""Values of ALLRANKS_ENV and ``--env``, besides schedulers of other packages. "local" and "ssh" skip the detection."""


def detect(environ: Mapping[str, str], override: str = "auto", *, launcher: bool) -> LaunchContext:
    """Return where this process runs.

    Args:
        environ: The environment.
        override: One of ``CHOICES``, or a scheduler of an installed package: detect only this one. "auto": the value of
            ALLRANKS_ENV if it is set, else detect all.
        launcher: This process is to start ranks. False: it is a program that may be a rank.

    Returns:
        The context. It has ``kind="local"`` and ``role="none"`` if nothing is found.

    Raises:
        ConfigError: Variables are missing, contradict each other, or have invalid values. The scheduler that
            ``override`` names is unknown; or a launcher does not find it.
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
            f"{source}={override}, but this process has no variable of that scheduler: expected"
            f" {schedulers[0].proof}.\n"
            "  Start this command in a job of that scheduler, or let allranks detect the environment with --env auto."
        )
    return context or LaunchContext("local", "none")


def read_hosts(context: LaunchContext) -> tuple[Slots, ...]:
    """Return the nodes of an allocation, even if no variable lists them.

    Raises:
        ConfigError: The file with the nodes cannot be read or is invalid, or the scheduler does not answer.
    """
    scheduler = scheduler_of(context.kind)
    if context.hosts or scheduler is None or scheduler.read_hosts is None:
        return context.hosts
    if context.role != "allocation" and not context.hostfile:
        return ()
    return scheduler.read_hosts(context)


def command_for(context: LaunchContext) -> RemoteCommand:
    """Return the command that starts agents on the nodes: the context's first installed command, else ssh."""
    commands = (remote_command(name) for name in context.remote_commands)
    return next((command for command in commands if shutil.which(command.name)), SSH)


def _find(environ: Environ, launcher: bool, schedulers: tuple[Scheduler, ...]) -> LaunchContext | None:
    """Search for variables of ranks, then of launchers that start one process per host, then of allocations."""
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
    """Return the context of a process that an MPI launcher or a scheduler started as one of several.

    MPI's variables take precedence, because a process started inside a scheduler's job inherits the scheduler's
    variables. If both give the same rank and size, they describe the same job, and the scheduler's context is used
    because it includes the nodes.
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
            continue  # inherited variables of another job; a valid launcher was found already
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
    """Convert the context to role "node" if the launcher started one task per node: an agent is wanted, not a rank."""
    one_each = context.size == context.nodes if context.nodes is not None else context.local_size == 1
    if not one_each or any(slots.count not in (None, 1) for slots in context.hosts):
        return context
    return replace(context, role="node", node=context.rank, nodes=context.size, local_rank=None, local_size=None)
