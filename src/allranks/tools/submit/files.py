"""A job in the words of each system.

All of them come down to ``allranks run``: inside an allocation it starts the ranks on every host, in a pod of an
Indexed Job those of its own. The job keeps the interpreter, the virtual environment and the folder that it was
submitted from. A minute before its time is over it is told (SIGTERM), so that ranks can end by themselves: by the
system, or where that cannot do it by timeout(1) in the file.

Source: sbatch(1); PBS Professional's qsub(1B) and its reference guide; LSF's bsub reference; Kubernetes' documents on
Indexed Jobs with pod-to-pod communication, on headless Services, and on dependent environment variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from allranks.tools.submit.job import Job

__all__ = ["FILES", "k8s", "lsf", "pbs", "slurm"]

_NOTICE_S = 60
_PORT = 29500


def slurm(job: Job) -> str:
    """For sbatch: a rank is a task. The signal goes to the batch shell, which ``exec`` makes the launcher."""
    return _script(
        job,
        "#SBATCH",
        [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.nproc}",
            f"--cpus-per-task={job.cpus}",
            f"--gres=gpu:{job.gpus}" if job.gpus else "",
            f"--mem={job.memory_mib}M" if job.memory_mib else "",
            f"--time={_clock(job.time_s, days=True)}" if job.time_s else "",
            f"--partition={job.queue}" if job.queue else "",
            f"--account={job.account}" if job.account else "",
            "--output=%x-%j.out",
            f"--signal=B:TERM@{_NOTICE_S}",
        ],
    )


def pbs(job: Job) -> str:
    """For qsub of PBS Professional and OpenPBS: so many chunks, each on a host of its own."""
    chunk = [
        f"select={job.nodes}",
        f"ncpus={job.nproc * job.cpus}",
        f"mpiprocs={job.nproc}",
        f"ngpus={job.gpus}" if job.gpus else "",
        f"mem={job.memory_mib}mb" if job.memory_mib else "",
    ]
    return _script(
        job,
        "#PBS",
        [
            f"-N {job.name}",
            f"-l {':'.join(filter(None, chunk))}",
            "-l place=scatter",
            f"-l walltime={_clock(job.time_s)}" if job.time_s else "",
            f"-q {job.queue}" if job.queue else "",
            f"-P {job.account}" if job.account else "",
            "-j oe",
        ],
        ["timeout", "--foreground", "--preserve-status", str(time_s)] if (time_s := _told_after(job)) else [],
    )


def lsf(job: Job) -> str:
    """For bsub, which reads it from stdin: a slot is a CPU, and so many of them are on each host."""
    slots = job.nproc * job.cpus
    notice = ["-wa TERM", f"-wt {_NOTICE_S // 60}"]
    return _script(
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


def _told_after(job: Job) -> int | None:
    """After how many seconds a job is told to end; None if it is to have no notice."""
    return job.time_s - _NOTICE_S if job.time_s is not None and job.time_s > _NOTICE_S else None


def _script(job: Job, mark: str, directives: Sequence[str], before: Sequence[str] = ()) -> str:
    words = [*before, job.python, "-m", "allranks", "run", "--nproc-per-node", str(job.nproc), *job.words]
    environment = (
        [f"export VIRTUAL_ENV={shlex.quote(job.venv)}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"'] if job.venv else []
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"{mark} {directive}" for directive in directives if directive),
            "",
            "set -e",
            f"cd {shlex.quote(job.folder)}",
            *environment,
            f"exec {shlex.join(words)}",
            "",
        ]
    )


def _clock(seconds: int, days: bool = False) -> str:
    day, rest = divmod(seconds, 86400) if days else (0, seconds)
    hours, rest = divmod(rest, 3600)
    return f"{f'{day}-' if day else ''}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"


def _minutes(seconds: int) -> str:
    minutes = -(-seconds // 60)  # bsub takes no seconds
    return f"{minutes // 60}:{minutes % 60:02d}"


def k8s(job: Job) -> str:
    """For kubectl: an Indexed Job with a pod for each node, names for its pods, and their secret.

    The first pod is found by its name, ``JOB-0.JOB``, also before it is ready. /dev/shm is as large as the pod's
    memory: a pod has 64 MB of it else, which a data loader's workers soon fill.
    """
    run = ["allranks", "run", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.nproc)]
    run += ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    run += ["--master-addr", f"{job.name}-0.{job.name}", "--master-port", str(_PORT)]
    command = [_quoted(word) for word in run] + [_quoted(word.replace("$", "$$")) for word in job.words]
    limits = [f"cpu: {job.nproc * job.cpus}"]
    limits += [f"memory: {job.memory_mib}Mi"] if job.memory_mib else []
    limits += [f"nvidia.com/gpu: {job.gpus}"] if job.gpus else []
    ours = [f"name: {_quoted(job.name)}"] + ([f"namespace: {_quoted(job.namespace)}"] if job.namespace else [])
    # At the deadline pods are told, and have the grace period then.
    deadline = [f"activeDeadlineSeconds: {_told_after(job) or job.time_s}"] if job.time_s else []
    return _TEMPLATE.format(
        metadata=_indented(ours, 2),
        name=_quoted(job.name),
        secret=_quoted(job.secret),
        nodes=job.nodes,
        deadline=_indented(deadline, 2),
        grace=_NOTICE_S,
        image=_quoted(job.image),
        folder=_indented([f"workingDir: {_quoted(job.folder)}"] if job.folder else [], 10),
        command=_indented([f"- {word}" for word in command], 12),
        limits=_indented(limits, 14),
    )


FILES: dict[str, Callable[[Job], str]] = {"slurm": slurm, "pbs": pbs, "lsf": lsf, "k8s": k8s}
_TEMPLATE = (Path(__file__).parent / "indexed_job.yaml").read_text()


def _indented(lines: Sequence[str], by: int) -> str:
    return "".join(f"\n{' ' * by}{line}" for line in lines)


def _quoted(text: str) -> str:
    """A scalar of YAML that is nothing but this text."""
    escaped = "".join(
        f"\\{letter}" if letter in '"\\' else letter if " " <= letter <= "~" else f"\\U{ord(letter):08X}"
        for letter in text
    )
    return f'"{escaped}"'
