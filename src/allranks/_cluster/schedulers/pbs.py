"""PBS Professional and OpenPBS: allocations, pbsdsh, which starts agents in them, and qsub.

Source: the manual of OpenPBS (pbsdsh) and its design of reliable jobs (tolerate_node_failures); PBS Professional's
qsub(1B) and its reference guide. Not tested on a real system.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots
from allranks._cluster.reading import Environ, Reader, allocation_of
from allranks._cluster.schedulers.files import counted_lines
from allranks._cluster.schedulers.interface import Job, RemoteCommand, Scheduler, Submission
from allranks._cluster.schedulers.script import clock, job_script, noticed_after

__all__ = ["SCHEDULER"]


def _find_allocation(environ: Environ, launcher: bool) -> LaunchContext | None:
    read = Reader(environ, "pbs")
    path = read.text("PBS_NODEFILE", "This file lists its nodes.")
    job = read.text("PBS_JOBID", "The job.")
    if not path or not launcher:
        return None
    return allocation_of(read, "pbs", hostfile=f"PBS_NODEFILE={path}", remote_commands=("pbsdsh",), job=job)


def _pbsdsh(hosts: Sequence[Slots], agent: Sequence[str]) -> list[list[str]]:
    """Return one command per host. pbsdsh identifies a host by the number of the host's first line in PBS_NODEFILE.

    Neither stdin nor variables reach the agent.
    """
    lines = itertools.accumulate((host.count or 1 for host in hosts), initial=0)
    return [["pbsdsh", "-n", str(line), "--", *agent] for line, _ in zip(lines, hosts, strict=False)]


def _file(job: Job) -> str:
    """Return the file for qsub of PBS Professional and OpenPBS: one chunk per node, each on a host of its own."""
    chunk = [
        f"select={job.nodes}",
        f"ncpus={job.nproc * job.cpus}",
        f"mpiprocs={job.nproc}",
        f"ngpus={job.gpus}" if job.gpus else "",
        f"mem={job.memory_mib}mb" if job.memory_mib else "",
    ]
    return job_script(
        job,
        "#PBS",
        [
            f"-N {job.name}",
            f"-l {':'.join(filter(None, chunk))}",
            "-l place=scatter",
            f"-l walltime={clock(job.time_s)}" if job.time_s else "",
            f"-q {job.queue}" if job.queue else "",
            f"-P {job.account}" if job.account else "",
            "-j oe",
            "-W tolerate_node_failures=all" if job.least is not None else "",
        ],
        # PBS sends no signal before the time limit, so timeout(1) sends it.
        ["timeout", "--foreground", "--preserve-status", str(time_s)] if (time_s := noticed_after(job)) else [],
    )


SCHEDULER = Scheduler(
    name="pbs",
    title="PBS",
    interface=1,
    proof="PBS_NODEFILE",
    kinds=("pbs",),
    allocation=_find_allocation,
    read_hosts=counted_lines,
    remote_commands=(RemoteCommand("pbsdsh", for_all=_pbsdsh, carries_environ=False, takes_names=False),),
    submission=Submission(
        file=_file,
        command=("qsub",),
        id=r"^(\d+\S*)$",
        state="qstat {id}",
        output="cat {name}.o{number}  (available after the job ends)",
        stop="qdel {id}",
    ),
)
