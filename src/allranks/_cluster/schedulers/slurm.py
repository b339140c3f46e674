"""SLURM: its steps, whose tasks are ranks, its allocations, srun, which starts agents in them, and sbatch.

Source: srun(1) and sbatch(1). Tested on a real system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots, expand_counts, expand_hosts, expand_numbers
from allranks._cluster.reading import Environ, Reader, TaskVariables, allocation_of, read_pmi
from allranks._cluster.schedulers.interface import Job, RemoteCommand, Scheduler, Submission
from allranks._cluster.schedulers.script import NOTICE_S, clock, job_script

__all__ = ["SCHEDULER"]

_PER_TASK = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""The resources of each task of a job. Programs derive their number of workers from them."""

_SPECIAL_STEPS = 0xFFFFFFFA  # from this number on: SLURM's interactive, batch, extern and pending step


def _in_step(environ: Environ) -> bool:
    """Return whether this process is a task of a step.

    SLURM_PROCID alone proves nothing: a batch script and an interactive shell also have it. A step id alone proves
    nothing either if sbatch was called within a step: the batch script then inherits all variables of that step.
    However, sbatch overwrites the variables that it sets for every batch script. This process is a task only if the
    size of the job and the tasks per node agree with those of the step.
    """
    step = environ.get("SLURM_STEP_ID", "").strip()
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return False
    pairs = (("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"))
    return all(environ.get(a, b_value) == b_value for a, b in pairs if (b_value := environ.get(b)))


def _read_slurm(read: Reader, context: LaunchContext) -> LaunchContext:
    step = read.text("SLURM_STEP_ID", "The step: srun started this process.")
    nodelist = read.text("SLURM_STEP_NODELIST", "The nodes of this step.")
    names = expand_hosts(nodelist, "SLURM_STEP_NODELIST") if nodelist else []
    per_node = read.text("SLURM_STEP_TASKS_PER_NODE", "The number of tasks on each of these nodes.")
    counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE") if per_node else []
    ports = read.text("SLURM_STEP_RESV_PORTS", "Ports that SLURM has reserved for this step.")
    if counts and names and (len(counts) != len(names) or sum(counts) != context.size):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist}, SLURM_STEP_TASKS_PER_NODE={per_node} and"
            f" SLURM_STEP_NUM_TASKS={context.size} contradict each other: some of"
            " them belong to another step.\n"
            "  Start with srun --export=ALL from a fresh shell, or set RANK and WORLD_SIZE."
        )
    node = context.node
    if node is not None and node < len(counts):
        context = replace(context, local_size=counts[node])
    slots: list[int | None] = [*counts] or [None] * len(names)
    job = f"{read.text('SLURM_JOB_ID', 'The job.')}.{step}"
    return read_pmi(
        read,
        replace(
            context,
            nodes=len(names) or context.nodes,
            leader=names[0] if names else "",
            hosts=tuple(Slots(name, count) for name, count in zip(names, slots, strict=True)),
            ports=tuple(expand_numbers(ports, "SLURM_STEP_RESV_PORTS")) if ports else (),
            job=job,
        ),
    )


def _find_allocation(environ: Environ, launcher: bool) -> LaunchContext | None:
    read = Reader(environ, "slurm")
    job = read.text("SLURM_JOB_ID", "The job.")
    if not job:
        return None
    if not launcher:
        return _alone(read, "SLURM_NTASKS", "srun python train.py, or allranks run train.py")
    groups = _het_groups(environ) or [""]
    read.require("SLURM_JOB_ID", *(f"SLURM_JOB_NODELIST{group}" for group in groups))
    hosts = tuple(host for group in groups for host in _hosts_of(read, group))
    return allocation_of(read, "slurm", hosts=hosts, remote_commands=("srun",), job=job)


def _het_groups(environ: Mapping[str, str]) -> list[str]:
    """Return the suffixes of the variables of a heterogeneous job's components. Empty for any other job."""
    size = environ.get("SLURM_HET_SIZE", "")
    return [f"_HET_GROUP_{number}" for number in range(int(size))] if size.isdecimal() else []


def _hosts_of(read: Reader, group: str) -> list[Slots]:
    """Return the nodes of an allocation, or of one component of it."""
    nodelist, tasks = f"SLURM_JOB_NODELIST{group}", f"SLURM_TASKS_PER_NODE{group}"
    names = expand_hosts(read.text(nodelist, "Its nodes."), nodelist)
    per_node = read.text(tasks, "The number of tasks planned for each node.")
    counts: list[int | None] = [*expand_counts(per_node, tasks)] if per_node else []
    if len(counts) != len(names):
        counts = [None] * len(names)
    return [Slots(name, count) for name, count in zip(names, counts, strict=True)]


def _alone(read: Reader, tasks: str, instead: str) -> LaunchContext | None:
    count = read.number(tasks, "The number of requested tasks.")
    if count is None or count < 2:
        return None
    hint = (
        f"srun did not start this process. It runs alone in a job of {count} tasks ({tasks}). Start it with {instead}"
    )
    return LaunchContext(read.kind, "none", hint=hint, why=read.why)


def _srun(hosts: Sequence[Slots], agent: Sequence[str]) -> list[list[str]]:
    """Return the commands that start an agent on each host: one for each component that has any of the hosts.

    The agent receives all CPUs and all memory of the allocation, and divides them. ``--overlap`` lets it share them
    with a step that is already running, such as that of an interactive shell.
    """
    component = {
        name: number
        for number, group in enumerate(_het_groups(os.environ))
        for name in expand_hosts(os.environ.get(f"SLURM_JOB_NODELIST{group}", ""), "SLURM_JOB_NODELIST")
    }
    commands = []
    for number in sorted({component.get(host.name, -1) for host in hosts}):
        there = [host.name for host in hosts if component.get(host.name, -1) == number]
        count = str(len(there))
        options = [] if number < 0 else [f"--het-group={number}"]
        options += ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(there)]
        commands.append(
            ["srun", *options, "--overlap", "--cpu-bind=none", "--mem=0", "--input=none", "--quiet", *agent]
        )
    return commands


def _srun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment without the variables that srun would take as options.

    For srun, the agent is one task. With the variables of ``_PER_TASK`` it would receive the CPUs of one rank only.
    """
    return {n: v for n, v in environ.items() if not n.startswith("SRUN_") and n not in _PER_TASK}


def _file(job: Job) -> str:
    """Return the file for sbatch: a rank is a task.

    The signal goes to the batch shell. ``exec`` replaces that shell by the launcher.
    """
    return job_script(
        job,
        "#SBATCH",
        [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.nproc}",
            f"--cpus-per-task={job.cpus}",
            f"--gres=gpu:{job.gpus}" if job.gpus else "",
            f"--mem={job.memory_mib}M" if job.memory_mib else "",
            f"--time={clock(job.time_s, days=True)}" if job.time_s else "",
            f"--partition={job.queue}" if job.queue else "",
            f"--account={job.account}" if job.account else "",
            "--output=%x-%j.out",
            f"--signal=B:TERM@{NOTICE_S}",
            "--no-kill" if job.least is not None else "",  # the allocation survives the loss of a node
        ],
    )


SCHEDULER = Scheduler(
    name="slurm",
    title="SLURM",
    interface=1,
    proof="SLURM_JOB_ID",
    kinds=("slurm",),
    tasks=(
        TaskVariables(
            "slurm",
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            node="SLURM_NODEID",
            nodes="SLURM_STEP_NUM_NODES",
            proof="SLURM_STEP_ID",
            more=_read_slurm,
            applies=_in_step,
        ),
    ),
    allocation=_find_allocation,
    remote_commands=(
        RemoteCommand(
            "srun",
            for_all=_srun,
            outlives=("--no-kill", "--kill-on-bad-exit=0"),
            environ=_srun_environ,
            # srun prints this on clusters that cannot bind CPUs. It is harmless, because ``--cpu-bind=none`` requests
            # no binding.
            noise=(b"cluster configuration lacks support for cpu binding",),
        ),
    ),
    submission=Submission(
        file=_file,
        command=("sbatch", "--parsable"),
        id=r"^(\d+)(?:;.*)?$",  # followed by the cluster's name if there are several clusters
        state="squeue --jobs {id}",
        output="tail -F {name}-{id}.out",
        stop="scancel {id}",
    ),
    carries=_PER_TASK,
)
