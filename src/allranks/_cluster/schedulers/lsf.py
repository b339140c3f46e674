"""LSF: its allocations, jsrun, which starts ranks in them, and blaunch, which starts agents.

Source: the manuals of LSF (jsrun, blaunch) and its bsub reference. Not tested on a real system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots, parse_pairs
from allranks._cluster.reading import Environ, Reader, TaskVariables, allocation_of
from allranks._cluster.schedulers.files import counted_lines
from allranks._cluster.schedulers.interface import Job, RemoteCommand, Scheduler, Submission
from allranks._cluster.schedulers.script import NOTICE_S, job_script

__all__ = ["SCHEDULER"]


def _read_jsrun(read: Reader, context: LaunchContext) -> LaunchContext:
    hostfile = read.text("LSB_DJOB_RANKFILE", "This file lists the nodes, after the launch host.")
    job = read.text("LSB_JOBID", "The job.")
    return replace(context, hostfile=f"LSB_DJOB_RANKFILE={hostfile}" if hostfile else "", job=job)


def _find_allocation(environ: Environ, launcher: bool) -> LaunchContext | None:
    read = Reader(environ, "lsf")
    path = read.text("LSB_DJOB_HOSTFILE", "This file lists its hosts.")
    pairs = read.text("LSB_MCPU_HOSTS", "Its hosts, and the number of processes planned for each host.")
    job = read.text("LSB_JOBID", "The job.")
    if not (path or pairs) or not launcher:
        return None
    hosts = parse_pairs(pairs, "LSB_MCPU_HOSTS") if pairs else ()
    hostfile = f"LSB_DJOB_HOSTFILE={path}" if path else ""
    return allocation_of(read, "lsf", hosts=hosts, hostfile=hostfile, remote_commands=("blaunch",), job=job)


def _read_hosts(context: LaunchContext) -> tuple[Slots, ...]:
    hosts = counted_lines(context)
    if context.kind == "jsrun" and len(hosts) > 1:
        return hosts[1:]  # the first is the launch host, on which jsrun was called
    return hosts


def _blaunch(host: str, agent: Sequence[str], program: str) -> list[str]:
    return ["blaunch", "-z", host, *agent]


def _file(job: Job) -> str:
    """Return the file for bsub, which reads it from stdin: a slot is a CPU, and ``ptile`` is the slots per host."""
    slots = job.nproc * job.cpus
    notice = ["-wa TERM", f"-wt {NOTICE_S // 60}"]
    return job_script(
        job,
        "#BSUB",
        [
            f"-J {job.name}",
            f"-n {job.nodes * slots}",
            f'-R "span[ptile={slots}]"',
            f'-gpu "num={job.gpus}"' if job.gpus else "",
            f'-R "rusage[mem={job.memory_mib}MB/host]"' if job.memory_mib else "",
            *([f"-W {_minutes(job.time_s)}", *notice] if job.time_s else []),
            f"-q {job.queue}" if job.queue else "",
            f"-P {job.account}" if job.account else "",
            "-o %J.out",
        ],
    )


def _minutes(seconds: int) -> str:
    minutes = -(-seconds // 60)  # rounded up, because bsub accepts no seconds
    return f"{minutes // 60}:{minutes % 60:02d}"


SCHEDULER = Scheduler(
    name="lsf",
    title="LSF",
    interface=1,
    proof="LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS or JSM_NAMESPACE_RANK",
    kinds=("jsrun", "lsf"),
    tasks=(
        TaskVariables(
            "jsrun",
            "JSM_NAMESPACE_RANK",
            "JSM_NAMESPACE_SIZE",
            "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_SIZE",
            more=_read_jsrun,
        ),
    ),
    allocation=_find_allocation,
    read_hosts=_read_hosts,
    remote_commands=(RemoteCommand("blaunch", per_host=_blaunch),),
    submission=Submission(
        file=_file,
        command=("bsub",),
        id=r"^Job <(\d+)>",
        state="bjobs {id}",
        output="bpeek -f {id}  (after the job ends: {id}.out)",
        stop="bkill {id}",
    ),
)
