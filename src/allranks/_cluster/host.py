"""What this host gives to this process: CPUs and GPUs.

Everything that starts threads, ranks or a busy wait asks here, so that all agree. A quota counts for its whole
CPUs only: one thread more than those is stopped in the middle of a step, and all ranks wait for it. GPUs are asked
for without CUDA, which would keep forked children from using it: the driver and NVIDIA's tool list what there is.
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
        name: what CUDA_VISIBLE_DEVICES calls it: a number, or the UUID of a GPU or of a part (MIG).
        node: the NUMA node next to it; None if nobody knows.
    """

    name: str
    node: int | None = None


def usable_cpus() -> int:
    """The CPUs that this process may keep busy: its affinity, cut by its cgroup's quota; at least 1.

    A launcher that has given each rank CPUs of its own sets ALLRANKS_CPUS to the number that its ranks have together.
    """
    if (together := os.environ.get("ALLRANKS_CPUS", "")).isdigit():
        return max(1, int(together))
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), quota)))


def cpus_of(pids: Iterable[int]) -> int:
    """The CPUs that processes of this host may keep busy together; at least 1.

    Processes that a scheduler has bound to CPUs of their own have those of all.
    """
    if "ALLRANKS_CPUS" in os.environ:
        return usable_cpus()
    together = set(os.sched_getaffinity(0))
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is of another namespace
            together |= os.sched_getaffinity(pid)
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, math.floor(min(len(together), quota)))


def cores(cpus: Set[int]) -> int:
    """How many cores these CPUs are: hyperthreads do not count."""
    topology = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
    return len({file.read_text() if file.exists() else str(file) for file in topology})


def processor() -> str:
    """The CPUs' name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs that a CUDA program started here would see, asked without CUDA.

    Args:
        environ: with CUDA_VISIBLE_DEVICES, which schedulers set, too.
        root: where /sys and /proc are.
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
                break  # CUDA sees nothing of what stands behind a wrong word
            names.append(word)
    return tuple(Gpu(name, nodes.get(parts.get(name) or numbered.get(name, name))) for name in names)


def read_numbers(path: Path) -> list[int]:
    """The numbers of a kernel's list, ``0-3,8``; none where there is no such file."""
    try:
        words = path.read_text().strip().split(",")
    except OSError:
        return []
    bounds = [word.partition("-")[::2] for word in words if re.fullmatch(r"\d+(-\d+)?", word)]  # -1: nobody knows
    return [number for low, high in bounds for number in range(int(low), int(high or low) + 1)]


def _cgroup_quota(root: Path, membership: Path) -> float:
    """The tightest quota on the way up from this process' cgroup, in CPUs; infinite where there is none.

    Args:
        root: where cgroups are mounted.
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
        top = root / (controllers if (root / controllers).is_dir() else "cpu") if controllers else root
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(top):
                break
            quota = min(quota, _granted(folder))
    return quota


def _granted(folder: Path) -> float:
    """The CPUs that a cgroup may use. In a container the path of version 1 may be the host's, where nothing is."""
    try:
        if (file := folder / "cpu.max").exists():
            granted, period = file.read_text().split()
        else:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if granted != "max" and int(granted) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf  # the root has none, and not every controller is on


_LISTED = re.compile(r"(?:GPU (?P<number>\d+):|  MIG .*Device +\d+:).*\(UUID: (?P<uuid>[^)]+)\)")


@functools.cache  # it takes its time
def _ask_nvidia_smi() -> dict[str, tuple[str, tuple[str, ...]]]:
    """UUID -> number and UUIDs of parts; empty without the tool."""
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
    """UUID -> NUMA node of the GPUs that the driver knows, in the order of their numbers."""
    found: dict[str, int | None] = {}
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        try:
            match = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
        except OSError:
            continue
        if match is not None:
            node = read_numbers(root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node")
            found[match[1]] = node[0] if node else None
    return found
