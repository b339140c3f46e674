"""Number of CPUs that this host provides to the process."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from allranks._cluster import host


def test_cpu_quota_is_smallest_of_cgroup_v2_hierarchy(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    assert host._cgroup_quota(root, membership) == math.inf
    (root / "pod" / "box").mkdir(parents=True)
    membership.write_text("4:memory:/x\n0::/pod/box\n")
    assert host._cgroup_quota(root, membership) == math.inf
    (root / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    (root / "pod" / "cpu.max").write_text("150000 100000\n")
    (root / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "cpu.max").write_text("1000 100000\n")  # above the root of the hierarchy, so it does not apply
    assert host._cgroup_quota(root, membership) == 1.5
    membership.write_text("0::/\n")  # the path that a process in a container reads
    assert host._cgroup_quota(root, membership) == 4.0


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_cpu_quota_of_cgroup_v1(tmp_path: Path, mount: str) -> None:
    membership, box = tmp_path / "cgroup", tmp_path / "fs" / mount / "docker" / "box"
    box.mkdir(parents=True)
    membership.write_text("9:memory:/docker/box\n4:cpu,cpuacct:/docker/box\n0::/\n")
    for folder, quota in ((box, -1), (box.parent, 250000), (tmp_path / "fs" / mount, -1)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert host._cgroup_quota(tmp_path / "fs", membership) == 2.5
    membership.write_text("4:cpu,cpuacct:/kubepods/of/the/host\n")  # a container mounts its own cgroup at the top
    (tmp_path / "fs" / mount / "cpu.cfs_quota_us").write_text("100000\n")
    assert host._cgroup_quota(tmp_path / "fs", membership) == 1.0


@pytest.mark.parametrize(("quota", "usable"), [(math.inf, 4), (9.5, 4), (2.9, 2), (1.5, 1), (0.25, 1)])
def test_usable_cpus_are_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch, quota: float, usable: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(host, "_quota", lambda: quota)
    assert host.usable_cpus() == usable
