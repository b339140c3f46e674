"""Who this process is in its job, from its environment: the result of ``detection``.

A context comes with the variables that led to it, so that ``allranks env`` and errors can show them.
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
"""How many ports are tried in turn, as some may be taken."""

_PORTS = range(24_000, 32_000)  # below those that systems hand out by themselves: 32768 and more, on Linux


@dataclass(frozen=True)
class Clue:
    """One variable that led to a finding.

    Attributes:
        name: the variable.
        value: what it holds.
        meaning: what follows from it, in a sentence.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class LaunchContext:
    """Who this process is in its job.

    Attributes:
        kind: who started it, or whose allocation it is: "allranks", "torchrun", "openmpi", "mvapich", "mpich", "pals",
            "jsrun", "flux", "slurm", "kubeflow", "pytorchjob", "jobset", "indexedjob", "sagemaker", "pbs", "lsf",
            "sge", or one of ``kinds`` of another scheduler; "local" for none of them.
        role: "rank": this process is one rank of a job. "node": one agent is wanted in this process' place, which
            starts the ranks of this node. "allocation": the nodes are ours, and nothing is started on the others yet.
            "none": alone.
        rank: number of this process (role "rank").
        size: number of processes.
        local_rank: its number on its node; None where it is not known.
        local_size: the number of processes on its node.
        node: number of this node.
        nodes: number of nodes; None where it is not known.
        leader: host of node 0, which is rank 0's; "" where it is not known.
        ports: reserved for this job.
        hosts: its nodes, in order, and how many processes each is meant for.
        hostfile: where they stand in a file, as NAME=PATH: ``detection.read_hosts`` reads it.
        remote_commands: the names of the commands that start a process on the nodes of the allocation, best first.
        job: text that no other job of this scheduler has; "" where there is none.
        pmi: the descriptor of a PMI-1 server; None where there is none.
        hint: what looks like an oversight, as a sentence; "" where nothing does.
        why: what led to this.
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
    """The leader's name with the domain of this pod's, as a name in a cluster is found by that only.

    Args:
        leader: its name.
        own: this pod's full name.
    """
    _, dot, domain = own.partition(".")
    return leader if "." in leader or not dot else f"{leader}.{domain}"


def job_secret(context: LaunchContext, secret: bytes) -> bytes:
    """What the processes of this job know, and no other job of this user.

    Args:
        context: of one of them.
        secret: this user's.
    """
    return hmac.digest(secret, f"allranks-job|{context.kind}|{context.job}|{context.size}".encode(), "sha256")


def job_ports(secret: bytes) -> list[int]:
    """The ports at which a job's first process is looked for. They follow from the job's secret.

    Other programs may hold some of them: a server there must prove that it is of the job.
    """
    digest = hashlib.sha256(b"allranks-ports|" + secret).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * PORTS_TRIED, 4))
    return list(dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers))
