"""SGE and its successors: allocations, and qrsh, which starts agents in them.

Source: the manual of SGE (qrsh, PE_HOSTFILE). Not tested on a real system.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots, parse_pe_hostfile
from allranks._cluster.reading import Environ, Reader, allocation_of
from allranks._cluster.schedulers.files import text_of
from allranks._cluster.schedulers.interface import RemoteCommand, Scheduler

__all__ = ["SCHEDULER"]


def _find_allocation(environ: Environ, launcher: bool) -> LaunchContext | None:
    read = Reader(environ, "sge")
    path = read.text("PE_HOSTFILE", "This file lists its hosts.")
    job = read.text("JOB_ID", "The job.")
    if not path or not launcher:
        return None
    return allocation_of(read, "sge", hostfile=f"PE_HOSTFILE={path}", remote_commands=("qrsh",), job=job)


def _read_hosts(context: LaunchContext) -> tuple[Slots, ...]:
    return parse_pe_hostfile(*text_of(context))


def _qrsh(host: str, agent: Sequence[str], program: str) -> list[str]:
    return ["qrsh", "-inherit", "-V", host, *agent]


SCHEDULER = Scheduler(
    name="sge",
    title="SGE",
    interface=1,
    proof="PE_HOSTFILE",
    kinds=("sge",),
    allocation=_find_allocation,
    read_hosts=_read_hosts,
    remote_commands=(RemoteCommand("qrsh", per_host=_qrsh),),
)
