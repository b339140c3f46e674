"""The CPUs and GPUs of this host that this process may use.

All code that starts threads, starts ranks or busy-waits uses these functions, so that all parts use the same numbers.
Only the whole CPUs of a quota count: the kernel would throttle one additional thread in the middle of a step, and all
ranks would wait for it. GPUs are listed by the driver and by NVIDIA's tool, not by CUDA, because a process that has
initialized CUDA prevents its forked children from using it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Gpu", "cores", "cpus_of", "processor", "read_numbers", "usable_cpus", "visible_gpus"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one.

    Attributes:
        name: Its name in CUDA_VISIBLE_DEVICES: a number, or the UUID of a GPU or of a part (MIG).
        node: The NUMA node to which it is attached. None if unknown.
    """

    name: str
    node: int | None = None


def usable_cpus() -> int:
    """Return how many CPUs this process may keep busy: its affinity, limited by its cgroup's quota; at least 1.

    A launcher that gives each rank its own CPUs sets ALLRANKS_CPUS to the number of CPUs that its ranks have together.
    """
    if (together := os.environ.get("ALLRANKS_CPUS", "")).isdigit():
        return max(1, int(together))
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), _quota())))


def cpus_of(pids: Iterable[int]) -> int:
    """Return the number of CPUs that processes of this host may keep busy together; at least 1.

    If a scheduler has bound each process to its own CPUs, the union of these CPUs counts.
    """
    if "ALLRANKS_CPUS" in os.environ:
        return usable_cpus()
    together = set(os.sched_getaffinity(0))
    for pid in pids:
        if len(together) == os.cpu_count():
            break
        with contextlib.suppress(OSError):  # it has exited, or belongs to another pid namespace
            together |= os.sched_getaffinity(pid)
    return max(1, math.floor(min(len(together), _quota())))


def cores(cpus: Set[int]) -> int:
    """Return the number of cores to which these CPUs belong: hyperthreads of one core count once."""
    topology = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
    return len({file.read_text() if file.exists() else str(file) for file in topology})


def processor() -> str:
    """Return the model name of the CPUs."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Return the GPUs that a CUDA program started here would see, without using CUDA.

    Args:
        environ: The environment, with CUDA_VISIBLE_DEVICES, which schedulers also set.
        root: The folder that contains /sys and /proc.
    """
    nodes = _read_drivers(root)
    installed = _ask_nvidia_smi() or {uuid: (str(n), ()) for n, uuid in enumerate(nodes)}
    parts = {part: gpu for gpu, (_, mig) in installed.items() for part in mig}
    numbered = {number: uuid for uuid, (number, _) in installed.items()}
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        names = [name for uuid, (number, mig) in installed.items() for name in (mig or (number,))]
    else:
        names = []
        for word in wanted.split(","):
            word = word.strip()
            if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", word) or (word.isdigit() and installed and word not in numbered):
                break  # CUDA ignores all entries after an invalid one
            names.append(word)
    return tuple(Gpu(name, nodes.get(parts.get(name) or numbered.get(name, name))) for name in names)


def read_numbers(path: Path) -> list[int]:
    """Return the numbers of a kernel's list, ``0-3,8``. Return an empty list if the file does not exist."""
    try:
        words = path.read_text().strip().split(",")
    except OSError:
        return []
    # The kernel writes -1 if the number is unknown; the pattern does not match it.
    bounds = [word.partition("-")[::2] for word in words if re.fullmatch(r"\d+(-\d+)?", word)]
    return [number for low, high in bounds for number in range(int(low), int(high or low) + 1)]


@functools.cache  # each new group calls it, and reading the files takes 0.4 ms
def _quota() -> float:
    return _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))


def _cgroup_quota(root: Path, membership: Path) -> float:
    """Return the smallest quota of this process's cgroup and its ancestors, in CPUs. Infinite if there is none.

    Args:
        root: Mount point of the cgroups.
        membership: ``/proc/self/cgroup``: ``0::/path`` of version 2, ``4:cpu,cpuacct:/path`` of version 1.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 1 has one mount per set of controllers, named like the set (cpu,cpuacct) or only cpu.
        top = root / (controllers if (root / controllers).is_dir() else "cpu") if controllers else root
        place = top / path.lstrip("/")
        # The quota of an ancestor limits all its descendants together.
        for folder in (place, *place.parents):
            if not folder.is_relative_to(top):
                break
            quota = min(quota, _granted(folder))
    return quota


def _granted(folder: Path) -> float:
    """Return the CPUs that a cgroup may use. Infinite if no quota is readable.

    In a container, the path in version 1 may be the path on the host, which does not exist in the container.
    """
    try:
        if (file := folder / "cpu.max").exists():
            granted, period = file.read_text().split()
        else:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if granted != "max" and int(granted) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf  # the root cgroup has no such file, and a controller may be disabled


_LISTED = re.compile(r"(?:GPU (?P<number>\d+):|  MIG .*Device +\d+:).*\(UUID: (?P<uuid>[^)]+)\)")


@functools.cache  # nvidia-smi is slow to start
def _ask_nvidia_smi() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return, by UUID of a GPU, its number and the UUIDs of its parts. Return an empty dict without nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return _parse_list(done.stdout)


def _parse_list(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    last = ""
    for line in text.splitlines():
        match = _LISTED.fullmatch(line)
        if match is None:
            continue
        if match["number"] is not None:
            last = match["uuid"]
            found[last] = (match["number"], ())
        elif last:
            number, parts = found[last]
            found[last] = (number, (*parts, match["uuid"]))
    return found


def _read_drivers(root: Path) -> dict[str, int | None]:
    """Return, by UUID, the NUMA node of each GPU that the driver lists, in the order of their numbers."""
    found: dict[str, int | None] = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        try:
            match = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
        except OSError:
            continue
        if match is not None:
            # sysfs writes PCI addresses in lower case.
            node = read_numbers(root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node")
            found[match[1]] = node[0] if node else None
    return found
