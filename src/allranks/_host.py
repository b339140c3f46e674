"""What this host gives to this process: CPUs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cpus"]


def usable_cpus() -> int:
    """The CPUs that this process may keep busy: its affinity, cut by its cgroup's quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cpus, int(quota))) if quota is not None else cpus


def _cgroup_quota() -> float | None:
    """The tightest CPU quota on the way up from this process' cgroup (version 2), in CPUs."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    tightest: float | None = None
    folder = Path("/sys/fs/cgroup") / path.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to("/sys/fs/cgroup"):
            break
        try:
            limit, period = (place / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue  # the root has none, and not every controller is on
        if limit != "max":
            cpus = int(limit) / int(period)
            tightest = cpus if tightest is None else min(tightest, cpus)
    return tightest
