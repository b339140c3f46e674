"""Flux: its instances, and flux run, which starts ranks and agents in them.

Source: flux-run(1) and the manual of Flux. Not tested on a real system.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots, expand_hosts
from allranks._cluster.reading import Environ, Reader, TaskVariables, allocation_of, read_pmi
from allranks._cluster.schedulers.interface import RemoteCommand, Scheduler

__all__ = ["SCHEDULER"]


def _read_flux(read: Reader, context: LaunchContext) -> LaunchContext:
    return read_pmi(read, replace(context, job=read.text("FLUX_JOB_ID", "The job.")))


def _find_allocation(environ: Environ, launcher: bool) -> LaunchContext | None:
    read = Reader(environ, "flux")
    if not read.text("FLUX_URI", "The Flux instance of this allocation.") or not launcher:
        return None
    return allocation_of(read, "flux", remote_commands=("flux",))


def _read_hosts(context: LaunchContext) -> tuple[Slots, ...]:
    import subprocess  # most importers do not need it

    words = ["flux", "getattr", "hostlist"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cannot get the hosts from Flux: {error}.\n  Check that `{shlex.join(words)}` works on this host."
        ) from None
    return tuple(Slots(name) for name in expand_hosts(done.stdout.strip(), shlex.join(words)))


def _flux_run(hosts: Sequence[Slots], agent: Sequence[str]) -> list[list[str]]:
    count, names = str(len(hosts)), ",".join(host.name for host in hosts)
    return [["flux", "run", "--nodes", count, "--ntasks", count, "--requires", f"host:{names}", *agent]]


SCHEDULER = Scheduler(
    name="flux",
    title="Flux",
    interface=1,
    proof="FLUX_URI or FLUX_TASK_RANK",
    kinds=("flux",),
    tasks=(
        TaskVariables(
            "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES", more=_read_flux
        ),
    ),
    allocation=_find_allocation,
    read_hosts=_read_hosts,
    remote_commands=(RemoteCommand("flux", for_all=_flux_run),),
)
