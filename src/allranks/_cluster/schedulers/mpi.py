"""MPI's launchers: Open MPI, MVAPICH, Cray PALS, and all launchers that set the variables of hydra (MPICH, Intel MPI).

Source: the variables that Open MPI's prte, MPICH's and Intel MPI's hydra set; the manuals of MVAPICH2 and Cray PALS.
Open MPI and MPICH are tested on a real system.
"""

from __future__ import annotations

from dataclasses import replace

from allranks._cluster.context import LaunchContext
from allranks._cluster.reading import Reader, TaskVariables, read_pmi
from allranks._cluster.schedulers.files import counted_lines
from allranks._cluster.schedulers.interface import Scheduler

__all__ = ["SCHEDULER"]


def _read_openmpi(read: Reader, context: LaunchContext) -> LaunchContext:
    read.text("PMIX_HOSTNAME", "Name of this host in Open MPI.")
    job = read.text("PMIX_NAMESPACE", "The job. Its PMIx server provides the host of rank 0.")
    # The namespace consists of host and PID of mpirun. Containers that share the host's network can have both in
    # common, but not the port of the server. Ranks of several hosts have several servers, so they cannot use it.
    if job and context.local_size == context.size:
        server = read.text("PMIX_SERVER_URI2", "The PMIx server of this host. It distinguishes jobs in containers.")
        job = f"{job} {server}".rstrip()
    return replace(context, job=job)


def _read_pals(read: Reader, context: LaunchContext) -> LaunchContext:
    hostfile = read.text("PBS_NODEFILE", "This file lists the nodes.")
    context = replace(context, hostfile=f"PBS_NODEFILE={hostfile}" if hostfile else "")
    return read_pmi(read, replace(context, job=read.text("PALS_APID", "The job's name.")))


_TASKS = (
    TaskVariables(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",  # not OMPI_COMM_WORLD_NODE_RANK, which is not the number of a node
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        more=_read_openmpi,
        is_mpi=True,
    ),
    TaskVariables(
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        more=read_pmi,
        is_mpi=True,
    ),
    # Before mpich: PALS sets PMI_SIZE, too, which makes the row of mpich match.
    TaskVariables(
        "pals",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE",
        "PALS_NODEID",
        proof="PALS_RANKID",
        more=_read_pals,
        is_mpi=True,
    ),
    TaskVariables("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", more=read_pmi, is_mpi=True),
)

SCHEDULER = Scheduler(
    name="mpi",
    title="MPI",
    interface=1,
    proof=f"one of {', '.join(row.rank for row in _TASKS)}",
    kinds=tuple(row.kind for row in _TASKS),
    tasks=_TASKS,
    read_hosts=counted_lines,
)
