"""The role of this process in its job, derived from its environment: the result of ``detection``.

A context includes the variables from which it was derived, so that ``allranks env`` and errors can show them.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from allranks._cluster.hostlist import Slots

__all__ = ["PORTS_TRIED", "Clue", "LaunchContext", "Role", "job_ports", "job_secret", "with_domain"]

Role: TypeAlias = Literal["rank", "node", "allocation", "none"]

PORTS_TRIED = 6
"""Number of ports that are tried in turn, because other programs may use some of them."""

_PORTS = range(24_000, 32_000)  # Below the ephemeral ports that the system assigns: 32768 and above on Linux.


@dataclass(frozen=True)
class Clue:
    """One variable from which a finding was derived.

    Attributes:
        name: Name of the variable.
        value: Its value.
        meaning: What follows from it, as one sentence.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class LaunchContext:
    """The role of this process in its job.

    Attributes:
        kind: The launcher that started the process, or the scheduler that owns the allocation: "allranks", "torchrun",
            "openmpi", "mvapich", "mpich", "pals", "jsrun", "flux", "slurm", "kubeflow", "pytorchjob", "jobset",
            "indexedjob", "sagemaker", "pbs", "lsf", "sge", or one of ``kinds`` of another scheduler. "local" if there
            is none.
        role: "rank": this process is one rank of a job. "node": this process is to be replaced by one agent, which
            starts the ranks of this node. "allocation": the nodes are allocated to this job, but nothing runs on the
            other nodes yet. "none": the process runs alone.
        rank: Number of this process (role "rank").
        size: Number of processes.
        local_rank: Number of this process on its node. None if unknown.
        local_size: Number of processes on its node.
        node: Number of this node.
        nodes: Number of nodes. None if unknown.
        leader: Host of node 0, on which rank 0 runs. "" if unknown.
        ports: Ports reserved for this job.
        hosts: Nodes of the job in order, and the number of processes intended for each.
        hostfile: File that lists the nodes, as NAME=PATH. ``detection.read_hosts`` reads it.
        remote_commands: Names of the commands that can start a process on the nodes of the allocation, in order of
            preference.
        job: Text that is unique among the jobs of this scheduler. "" if there is none.
        pmi: Descriptor of a PMI-1 server. None if there is none.
        hint: A probable oversight of the user, as one sentence. "" if none was found.
        why: The variables from which this context was derived.
    """

    kind: str
    role: Role
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    leader: str = ""
    ports: tuple[int, ...] = ()
    hosts: tuple[Slots, ...] = ()
    hostfile: str = ""
    remote_commands: tuple[str, ...] = ()
    job: str = ""
    pmi: int | None = None
    hint: str = ""
    why: tuple[Clue, ...] = field(default=(), compare=False)


def with_domain(leader: str, own: str) -> str:
    """Return the leader's name with the domain of this pod.

    The name server of a cluster resolves only the full name of a pod.
    Args:
        leader: Name of the leader.
        own: Full name of this pod.
    """
    _, dot, domain = own.partition(".")
    return leader if "." in leader or not dot else f"{leader}.{domain}"


def job_secret(context: LaunchContext, secret: bytes) -> bytes:
    """Return a secret that the processes of this job share, and that no other job of this user has.

    Args:
        context: Context of one of the processes.
        secret: Secret of the user.
    """
    return hmac.digest(secret, f"allranks-job|{context.kind}|{context.job}|{context.size}".encode(), "sha256")


def job_ports(secret: bytes) -> list[int]:
    """Return the ports at which the first process of a job may listen. They are derived from the job's secret.

    Other programs may use some of these ports, so a server must prove that it belongs to the job.
    """
    digest = hashlib.sha256(b"allranks-ports|" + secret).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * PORTS_TRIED, 4))
    return list(dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers))
