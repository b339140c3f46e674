"""What this host gives to this process: CPUs.

Everything that starts threads, ranks or a busy wait asks here, so that all agree. A quota counts for its whole
CPUs only: one thread more than those is stopped in the middle of a step, and all ranks wait for it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["count_gpus", "usable_cpus"]


def usable_cpus() -> int:
    """The CPUs that this process may keep busy: its affinity, cut by its cgroup's quota; at least 1.

    A launcher that has given each rank CPUs of its own says in ALLRANKS_CPUS how many its ranks have together.
    """
    if (together := os.environ.get("ALLRANKS_CPUS", "")).isdigit():
        return max(1, int(together))
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), quota)))


def count_gpus() -> int:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES where it is set, else NVIDIA's of this host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _cgroup_quota(root: Path, membership: Path) -> float:
    """The tightest quota on the way up from this process' cgroup (version 2), in CPUs; infinite where there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for folder in (root / path, *(root / path).parents):
            if not folder.is_relative_to(root):
                break
            try:
                granted, period = (folder / "cpu.max").read_text().split()
            except (OSError, ValueError):
                continue  # the root has none, and not every controller is on
            if granted != "max":
                quota = min(quota, int(granted) / int(period))
    return quota
