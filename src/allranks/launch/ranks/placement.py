"""The CPUs and the GPU of each rank of a host.

A rank that moves between NUMA nodes loses half of its memory bandwidth. Two ranks on the two threads of one core share
that core. Therefore ``--bind core`` gives each rank its own whole cores. ``--bind numa`` gives it the cores of one NUMA
node, which it may share. Both choose CPUs next to the rank's GPU, if it has one and the GPU's node is known.

The first half is pure: a machine is passed in as data. The second half reads it from the kernel; ``_cluster.host``
finds the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks._base.errors import ConfigError, spans
from allranks._cluster.host import Gpu, read_numbers, usable_cpus, visible_gpus
from allranks.launch.spec.options import Bind

__all__ = ["Core", "Machine", "CpuPlace", "describe", "place", "cpu_places_of", "read_machine"]


@dataclass(frozen=True)
class Core:
    """A core: its usable CPUs, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True)
class Machine:
    """The resources that a process of a host may use.

    Attributes:
        cores: the cores, grouped by NUMA node.
        gpus: the GPUs, in the order of their numbers.
        quota: number of CPUs that may be busy simultaneously, which may be less than the number of CPUs.
    """

    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...]
    quota: int

    @property
    def cpus(self) -> int:
        """Number of CPUs."""
        return sum(len(core.cpus) for core in self.cores)


@dataclass(frozen=True)
class CpuPlace:
    """The CPUs and the GPU of one rank.

    Attributes:
        cpus: the CPUs that it is bound to; empty if it is not bound.
        gpu: the one GPU that it sees; None for all.
        threads: number of threads for its computations.
    """

    cpus: tuple[int, ...]
    gpu: str | None
    threads: int

    def environ(self) -> dict[str, str]:
        """Return the variables for it."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}


def place(machine: Machine, nproc: int, bind: Bind, one_gpu_per_rank: bool) -> tuple[CpuPlace, ...]:
    """Assign CPUs and a GPU to each rank of a host.

    Args:
        machine: the resources of the host.
        nproc: number of ranks.
        bind: the kind of CPU sets that ranks are bound to.
        one_gpu_per_rank: each rank sees one GPU.

    Returns:
        The places, by local rank.

    Raises:
        ConfigError: the resources do not suffice for all ranks.
    """
    gpus: list[Gpu | None] = [None] * nproc
    if one_gpu_per_rank:
        if len(machine.gpus) < nproc:
            count = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) != 1)}" if machine.gpus else "no GPU"
            raise ConfigError(
                f"{nproc} ranks cannot have a GPU each: this host shows {count} (nvidia-smi -L, CUDA_VISIBLE_DEVICES)"
                ".\n  Start fewer ranks, or remove --one-gpu-per-rank."
            )
        gpus = list(machine.gpus[:nproc])
    names = [None if gpu is None else gpu.name for gpu in gpus]
    fair = max(1, machine.quota // nproc)
    if bind == "none":
        return tuple(CpuPlace((), name, fair) for name in names)
    if bind == "core" and nproc > len(machine.cores):
        raise ConfigError(
            f"{nproc} ranks cannot have a core each: this host allows {len(machine.cores)} cores"
            f" ({machine.cpus} CPUs).\n  Start fewer ranks, or use --bind numa or --bind none."
        )
    shares = _share(machine, [None if gpu is None else gpu.node for gpu in gpus], bind)
    cpu_places = []
    for share, name in zip(shares, names, strict=True):
        # With "numa", ranks that share a node also share its CPUs.
        threads = len(share) // (shares.count(share) if bind == "numa" else 1)
        # Threads beyond the quota of the cgroup would be throttled.
        if machine.quota < machine.cpus:
            threads = min(threads, fair)
        cpu_places.append(CpuPlace(share, name, max(1, threads)))
    return tuple(cpu_places)


def _share(machine: Machine, preferred: Sequence[int | None], bind: Bind) -> list[tuple[int, ...]]:
    """Return the CPUs of each rank."""
    nproc = len(preferred)
    nodes: dict[int, list[Core]] = {}
    for core in machine.cores:
        nodes.setdefault(core.node, []).append(core)
    order = sorted(nodes)
    homes: list[tuple[int, ...]]  # the nodes of each rank
    wanted = [node for node in preferred if node in nodes]
    if len(wanted) == nproc and (bind == "numa" or all(wanted.count(node) <= len(nodes[node]) for node in nodes)):
        homes = [(node,) for node in wanted]
    elif nproc < len(order):
        homes = [tuple(order[n * len(order) // nproc : (n + 1) * len(order) // nproc]) for n in range(nproc)]
    else:  # the node at the middle of an even share
        by_core = [node for node in order for _ in nodes[node]]
        homes = [(by_core[(2 * n + 1) * len(by_core) // (2 * nproc)],) for n in range(nproc)]
    shares = []
    for rank, home in enumerate(homes):
        cores = [core for node in home for core in nodes[node]]
        if bind == "core":
            count, turn = homes.count(home), homes[:rank].count(home)
            cores = cores[turn * len(cores) // count : (turn + 1) * len(cores) // count]
        shares.append(tuple(sorted(cpu for core in cores for cpu in core.cpus)))
    return shares


def describe(cpu_places: Sequence[CpuPlace]) -> list[str]:
    """Return a line for each local rank."""
    lines = []
    for number, cpu_place in enumerate(cpu_places):
        cpus = f"CPUs {spans(cpu_place.cpus, ',')}" if cpu_place.cpus else "all CPUs"
        gpu = f"GPU {cpu_place.gpu}" if cpu_place.gpu is not None else "all GPUs"
        lines.append(f"local rank {number}: {cpus}, {gpu}, {cpu_place.threads} thread{'s' * (cpu_place.threads != 1)}")
    return lines


def cpu_places_of(nproc: int, bind: Bind, one_gpu_per_rank: bool, environ: Mapping[str, str]) -> tuple[CpuPlace, ...]:
    """Assign CPUs and a GPU to each rank of this host; empty if no rank is restricted.

    Raises:
        ConfigError: the resources do not suffice for all ranks.
    """
    if bind == "none" and not one_gpu_per_rank:
        return ()
    return place(read_machine(environ, one_gpu_per_rank), nproc, bind, one_gpu_per_rank)


def read_machine(environ: Mapping[str, str], with_gpus: bool, root: Path = Path("/")) -> Machine:
    """Read the resources of this host.

    Args:
        environ: an environment with CUDA_VISIBLE_DEVICES.
        with_gpus: find GPUs, too.
        root: folder that contains /sys and /proc.
    """
    cores = _read_cores(root / "sys/devices/system", os.sched_getaffinity(0))
    return Machine(cores, visible_gpus(environ, root) if with_gpus else (), usable_cpus())


def _read_cores(system: Path, cpus: set[int]) -> tuple[Core, ...]:
    nodes: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):
        for cpu in read_numbers(folder / "cpulist"):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    cores: dict[tuple[int, tuple[int, ...]], Core] = {}
    for cpu in sorted(cpus):
        siblings = read_numbers(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or [cpu]
        node = nodes.get(cpu, 0)
        cores[node, tuple(siblings)] = Core(tuple(sorted(cpus.intersection(siblings))), node)
    return tuple(sorted(cores.values(), key=lambda core: (core.node, core.cpus)))
