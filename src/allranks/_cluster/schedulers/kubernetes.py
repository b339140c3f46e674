"""Kubernetes: pods of Kubeflow, of a PyTorchJob, of an Indexed Job or a JobSet; and the manifest of such a job.

Source: Kubernetes' documents on Indexed Jobs with pod-to-pod communication, on headless Services, and on dependent
environment variables; those of JobSet, and of Kubeflow's PyTorchJob and Trainer v2. For elastic jobs: on backoff limits
per index (from Kubernetes 1.29 on) and success policies (from 1.31 on). Not tested on a real system.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.reading import Environ, Reader, host_of, node_or_hint, port_of
from allranks._cluster.schedulers.interface import Job, Scheduler, Submission
from allranks._cluster.schedulers.script import NOTICE_S, noticed_after

__all__ = ["SCHEDULER"]

_PORT = 29500  # torch's usual port
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 56  # a pod's host name is the job's name, a dash and a number, at most 63 characters


def _find_node(environ: Environ, launcher: bool) -> LaunchContext | None:
    for find in (_find_kubeflow, _find_pytorchjob, _find_indexed_job):
        if (context := find(environ, launcher)) is not None:
            return context
    return None


def _find_kubeflow(environ: Environ, launcher: bool) -> LaunchContext | None:
    if not environ.get("PET_NODE_RANK", "").strip():
        return None
    read = Reader(environ, "kubeflow")
    read.require("PET_NODE_RANK", "PET_NNODES")
    nodes = read.text("PET_NNODES", "The number of pods.")  # may be MIN:MAX
    count = int(nodes) if nodes.isdecimal() else None
    leader = read.text("PET_MASTER_ADDR", "Host of the first pod.") or read.text(
        "MASTER_ADDR", "Host of the first pod."
    )
    port = "PET_MASTER_PORT" if environ.get("PET_MASTER_PORT") else "MASTER_PORT"
    context = LaunchContext(
        "kubeflow",
        "node",
        node=read.number("PET_NODE_RANK", "The number of this pod.", 0, None if count is None else count - 1),
        nodes=count,
        leader=host_of(leader),
        ports=port_of(read.number(port, "The port there.", 1, 65535)),
    )
    return node_or_hint(replace(context, why=read.why), launcher)


def _find_pytorchjob(environ: Environ, launcher: bool) -> LaunchContext | None:
    if not launcher or not environ.get("KUBERNETES_SERVICE_HOST") or environ.get("LOCAL_RANK", "").strip():
        return None
    if not environ.get("RANK", "").strip():
        return None
    read = Reader(environ, "pytorchjob")
    read.require("RANK", "WORLD_SIZE", "MASTER_ADDR")
    nodes = read.number("WORLD_SIZE", "The number of pods, as LOCAL_RANK is not set.", 1)
    assert nodes is not None
    context = LaunchContext(
        "pytorchjob",
        "node",
        node=read.number("RANK", "The number of this pod.", 0, nodes - 1),
        nodes=nodes,
        leader=host_of(read.text("MASTER_ADDR", "Host of the first pod.")),
        ports=port_of(read.number("MASTER_PORT", "The port there.", 1, 65535)),
    )
    return replace(context, why=read.why)


def _find_indexed_job(environ: Environ, launcher: bool) -> LaunchContext | None:
    if not environ.get("JOB_COMPLETION_INDEX", "").strip() or not launcher:
        return None  # the pods of an Indexed Job are often independent programs
    read = Reader(environ, "indexedjob")
    index = read.number("JOB_COMPLETION_INDEX", "The number of this pod.")
    jobset = read.text("JOBSET_NAME", "The JobSet, and the domain of its pods.")
    own = read.text("HOSTNAME", "This pod. The first pod has the same name with a 0 at the end.")
    stem, dash, last = own.partition(".")[0].rpartition("-")
    known = bool(dash) and last == str(index)
    leader = f"{stem}-0" if known else ""
    job, dash, number = stem.rpartition("-")
    if jobset:
        read.kind = "jobset"
        leader = f"{job}-0-0.{jobset}" if known and dash and number.isdecimal() else ""
    return LaunchContext(read.kind, "node", node=index, leader=leader, job=own and stem, why=read.why)


def _file(job: Job) -> str:
    """Return the manifest for kubectl: an Indexed Job with one pod per node, host names for its pods, and their secret.

    The first pod is found by its name, ``JOB-0.JOB``, even before it is ready. /dev/shm is as large as the memory of
    the pod. Its default of 64 MB is soon filled by the workers of a data loader.
    """
    run = ["allranks", "run", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.nproc)]
    run += ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    run += ["--master-addr", f"{job.name}-0.{job.name}", "--master-port", str(_PORT)]
    # Kubernetes replaces $(NAME) in a command, so each $ in the user's words is escaped as $$.
    command = [_quoted(word) for word in run] + [_quoted(word.replace("$", "$$")) for word in job.words]
    limits = [f"cpu: {job.nproc * job.cpus}"]
    limits += [f"memory: {job.memory_mib}Mi"] if job.memory_mib else []
    limits += [f"nvidia.com/gpu: {job.gpus}"] if job.gpus else []
    ours = [f"name: {_quoted(job.name)}"] + ([f"namespace: {_quoted(job.namespace)}"] if job.namespace else [])
    # At the deadline Kubernetes signals the pods. They then have the grace period to exit.
    deadline = [f"activeDeadlineSeconds: {noticed_after(job) or job.time_s}"] if job.time_s else []
    template = (Path(__file__).parent / "indexed_job.yaml").read_text()
    return template.format(
        metadata=_indented(ours, 2),
        name=_quoted(job.name),
        secret=_quoted(job.secret),
        nodes=job.nodes,
        failures=_indented(_failures(job), 2),
        deadline=_indented(deadline, 2),
        grace=NOTICE_S,
        image=_quoted(job.image),
        folder=_indented([f"workingDir: {_quoted(job.folder)}"] if job.folder else [], 10),
        command=_indented([f"- {word}" for word in command], 12),
        limits=_indented(limits, 14),
    )


def _failures(job: Job) -> list[str]:
    """Return the lines that define what Kubernetes does when a pod fails.

    The first pod runs the launcher. In an elastic job, its exit code is 0 when the job has succeeded, regardless of
    lost pods. Any other pod that fails is recreated with the same number, and joins the launcher's job again.
    """
    if job.least is None:
        return ["backoffLimit: 0"]
    needed = -(-job.least // job.nproc)  # nodes, rounded up
    return [
        f"backoffLimitPerIndex: {job.respawns}",
        f"maxFailedIndexes: {job.nodes - needed}",
        "successPolicy:",
        "  rules:",
        '    - succeededIndexes: "0"',
    ]


def _indented(lines: Sequence[str], by: int) -> str:
    return "".join(f"\n{' ' * by}{line}" for line in lines)


def _quoted(text: str) -> str:
    """Return the text as a quoted scalar of YAML, so that no character of it has a special meaning."""
    escaped = "".join(
        f"\\{letter}" if letter in '"\\' else letter if " " <= letter <= "~" else f"\\U{ord(letter):08X}"
        for letter in text
    )
    return f'"{escaped}"'


def _check(job: Job) -> None:
    if not job.image:
        raise ConfigError("Kubernetes requires an image.\n  Pass --image REGISTRY/NAME:TAG.")
    for option, value in (("--name", job.name), ("--namespace", job.namespace or "default")):
        if len(value) > _LONGEST_LABEL or not _DNS_LABEL.fullmatch(value):
            raise ConfigError(
                f"{option} {value!r} is not a valid Kubernetes name. Expected a lower-case letter, then lower-case"
                f" letters, digits and dashes, at most {_LONGEST_LABEL} characters, for example train-7."
            )
    if job.folder and not job.folder.startswith("/"):
        raise ConfigError(f"--chdir {job.folder!r}: expected a folder of the image, such as /srv/train")
    if job.account:
        raise ConfigError("Kubernetes has no accounts.\n  Omit --account.")
    if job.queue:
        raise ConfigError("Kubernetes has no queues.\n  Omit --queue.")


def _name_for(stem: str) -> str:
    import secrets

    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")
    suffix = secrets.token_hex(3)  # a second job may be submitted before the first one is deleted
    return f"{name[: _LONGEST_LABEL - len(suffix) - 1].strip('-') or 'job'}-{suffix}"


SCHEDULER = Scheduler(
    name="k8s",
    title="Kubernetes",
    interface=1,
    proof="PET_NODE_RANK, JOB_COMPLETION_INDEX, or RANK without LOCAL_RANK in a pod",
    kinds=("kubeflow", "pytorchjob", "indexedjob", "jobset"),
    node=_find_node,
    submission=Submission(
        file=_file,
        command=("kubectl", "create", "-f", "-"),
        id=r"^(job\.batch/\S+)",
        state="kubectl get{space} pods --selector job-name={name}",
        output="kubectl logs{space} --follow --prefix --max-log-requests {nodes} --selector job-name={name}",
        stop="kubectl delete{space} job,service,secret {name}",
        containers=True,
        check=_check,
        name_for=_name_for,
    ),
)
