"""What a job asks for, before any batch system's spelling of it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        name: what queues call it.
        words: what follows ``allranks run`` and its own options: ``script.py ...``, ``-m module ...``, ``-- command``.
        nodes: number of hosts.
        nproc: ranks on each.
        cpus: CPUs for each rank.
        gpus: GPUs on each host.
        memory_mib: memory on each host; None for the queue's default.
        time_s: how long it may take; None for the queue's default.
        queue: partition or queue.
        account: account or project.
        folder: where it runs; "" where the image says.
        python: the interpreter.
        venv: the virtual environment that this is of, or "".
        image: Kubernetes: the container's.
        namespace: Kubernetes: where it runs.
        secret: Kubernetes: what its pods prove to each other.
    """

    name: str
    words: tuple[str, ...]
    nodes: int = 1
    nproc: int = 1
    cpus: int = 1
    gpus: int = 0
    memory_mib: int | None = None
    time_s: int | None = None
    queue: str = ""
    account: str = ""
    folder: str = ""
    python: str = ""
    venv: str = ""
    image: str = ""
    namespace: str = ""
    secret: str = field(default="", repr=False)
