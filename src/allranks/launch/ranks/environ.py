"""The environment of a rank: its number, in the variables of torchrun, and its number of threads.

``allranks._cluster.env`` reads these variables. A port is only named here, never held: allranks does not listen on it.
An unmodified torch.distributed script on rank 0 binds it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks._cluster.host import usable_cpus
from allranks._cluster.network import MACHINE, fixed_machine
from allranks._elastic.slot_table import ELASTIC, START
from allranks.launch.ranks.placement import CpuPlace

__all__ = ["JobShare", "common_environ", "free_port", "place_environ", "threads_per_rank"]

_LOWEST_PORT = 20_000  # most services of a host listen below it
_TRIES = 8

# Left over from a job that this job is started from. They would lead torch to that job's agent.
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "ALLRANKS_CPUS", ELASTIC, START)


def openmp(threads: str, nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the OpenMP variables: the number of threads, and passive waiting if the threads outnumber the CPUs.

    Spinning threads would keep the CPUs from the threads that they wait for: about a tenth of the rounds per second
    (benchmarks/threads.py, 2 ranks with 2 threads on 2 CPUs).
    """
    crowded = threads.isdigit() and int(threads) > 1 and nproc * int(threads) > usable_cpus()
    passive = {"OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY") or "PASSIVE"} if crowded else {}
    return {"OMP_NUM_THREADS": threads, **passive}


def threads_per_rank(
    nproc: int, threads: int | None, environ: Mapping[str, str], cpu_places: Sequence[CpuPlace] = ()
) -> str:
    """Return OMP_NUM_THREADS for a rank: the option, else the user's own setting, else a fair share of the CPUs.

    The value is the same for all ranks, because torch is imported once for all. It suits the rank with the fewest CPUs.
    """
    if threads is not None:
        return str(threads)
    return environ.get("OMP_NUM_THREADS") or str(
        min((cpu_place.threads for cpu_place in cpu_places), default=max(1, usable_cpus() // nproc))
    )


@dataclass(frozen=True)
class JobShare:
    """A host's share of a job.

    Attributes:
        nproc: number of ranks on this host.
        world_size: number of ranks in the job.
        node: number of this host.
        nodes: number of hosts.
        run: name of the job.
        role: name of the task of the ranks; ranks of other hosts may have another role.
        role_size: number of ranks in the job with that role; None for all.
        restart: number of restarts of the job so far.
        restarts: greatest number of restarts.
        masters: number of ranks on this host that only control other ranks.
        elastic: a lost rank does not stop the job.
    """

    nproc: int
    world_size: int
    node: int = 0
    nodes: int = 1
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    restart: int = 0
    restarts: int = 0
    role: str = "default"
    role_size: int | None = None
    masters: int = 0
    elastic: bool = False


def common_environ(
    environ: Mapping[str, str],
    share: JobShare,
    threads: int | None,
    store: str,
    master: tuple[str, int],
    cpu_places: Sequence[CpuPlace] = (),
) -> dict[str, str]:
    """Return the environment that all ranks of a host share.

    Args:
        environ: the launcher's environment.
        share: this host's share of the job.
        threads: threads per rank; None for an automatic choice.
        store: address of the launcher's store.
        master: the address on which an unmodified torch.distributed program on rank 0 listens.
        cpu_places: the CPUs that ranks are bound to; empty if they are not bound.
    """
    bound = {cpu for cpu_place in cpu_places for cpu in cpu_place.cpus}
    # A bound rank sees only its own CPUs, so it cannot check whether all ranks together have enough.
    cpus = {"ALLRANKS_CPUS": str(min(len(bound), usable_cpus()))} if bound else {}
    computing = max(1, share.nproc - share.masters)
    return (
        cpus
        | {name: value for name, value in environ.items() if name not in _FOREIGN}
        | {
            **openmp(threads_per_rank(computing, threads, environ, cpu_places), computing, environ),
            "WORLD_SIZE": str(share.world_size),
            "LOCAL_WORLD_SIZE": str(share.nproc),
            "ROLE_WORLD_SIZE": str(share.world_size if share.role_size is None else share.role_size),
            "ROLE_NAME": share.role,
            "GROUP_RANK": str(share.node),
            "GROUP_WORLD_SIZE": str(share.nodes),
            "NODE_RANK": str(share.node),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "TORCHELASTIC_RESTART_COUNT": str(share.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(share.restarts),
            "TORCHELASTIC_RUN_ID": share.run,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ALLRANKS_STORE": store,
            MACHINE: fixed_machine(),
        }
        | ({ELASTIC: "1", START: "0"} if share.elastic else {})
    )


def place_environ(rank: int, local_rank: int, role_rank: int) -> dict[str, str]:
    """Return the variables that differ from rank to rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(role_rank)}


def free_port(wanted: int = 0) -> int:
    """Return a TCP port that is free now on every address of this host: ``wanted``, if that is free."""
    # Another process may take the port before rank 0 binds it; allranks itself does not use it. The kernel assigns the
    # ports of its local range to any connection of the host, so a port below that range is safer.
    below = [_LOWEST_PORT + secrets.randbelow(max(1, _first_local_port() - _LOWEST_PORT)) for _ in range(_TRIES)]
    for port in [*([wanted] if wanted else []), *below]:
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    """Bind the port, release it and return it. 0: the kernel chooses it."""
    with socket.socket() as probe:
        probe.bind(("", port))
        found: int = probe.getsockname()[1]
        return found


def _first_local_port() -> int:
    """Return the first port that the kernel assigns to connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768  # Linux's default
