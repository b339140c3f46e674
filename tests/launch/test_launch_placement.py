"""Assignment of CPUs and GPUs to ranks: on simulated machines, on a /sys in a folder, and on this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks._base.errors import ConfigError
from allranks._cluster import host
from allranks._cluster.host import Gpu
from allranks.launch.ranks import placement
from allranks.launch.ranks.environ import JobShare, common_environ
from allranks.launch.ranks.placement import Core, CpuPlace, Machine, describe, place
from allranks.launch.spec.options import Bind
from support.launcher_process import Launcher


def machine(cores: list[int], threads: int = 1, gpus: tuple[Gpu, ...] = (), quota: int | None = None) -> Machine:
    """Return a machine whose NUMA nodes have the given numbers of cores.

    The second hardware threads of all cores are numbered after the first ones, as on x86.
    """
    nodes = [node for node, count in enumerate(cores) for _ in range(count)]
    made = [Core(tuple(n + len(nodes) * t for t in range(threads)), node) for n, node in enumerate(nodes)]
    return Machine(tuple(made), gpus, quota or len(nodes) * threads)


def cpus(machine: Machine, nproc: int, bind: Bind) -> list[tuple[int, ...]]:
    return [seat.cpus for seat in place(machine, nproc, bind, False)]


def test_cores_are_not_split() -> None:
    assert cpus(machine([4], threads=2), 2, "core") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert cpus(machine([4], threads=2), 4, "core") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_nodes_are_not_mixed() -> None:
    assert cpus(machine([3, 3]), 4, "core") == [(0,), (1, 2), (3,), (4, 5)]
    assert cpus(machine([2, 2]), 3, "numa") == [(0, 1), (2, 3), (2, 3)]
    assert cpus(machine([2, 2, 2, 2]), 2, "core") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cpus(machine([2, 2]), 1, "numa") == [(0, 1, 2, 3)]


def test_number_of_threads_follows_the_cpus_of_a_rank() -> None:
    assert [seat.threads for seat in place(machine([3, 3]), 4, "core", False)] == [1, 2, 1, 2]
    assert [seat.threads for seat in place(machine([2, 4]), 3, "numa", False)] == [2, 2, 2]
    assert [seat.threads for seat in place(machine([8], quota=3), 2, "core", False)] == [1, 1]
    assert [seat.threads for seat in place(machine([8], quota=4), 8, "none", False)] == [1] * 8


def test_ranks_are_bound_to_the_node_of_their_gpu() -> None:
    gpus = tuple(Gpu(str(n), node) for n, node in enumerate([1, 1, 0, 0]))
    seats = place(machine([4, 4], gpus=gpus), 4, "core", True)
    assert [(seat.cpus, seat.gpu) for seat in seats] == [((4, 5), "0"), ((6, 7), "1"), ((0, 1), "2"), ((2, 3), "3")]
    assert describe(seats[:1]) == ["local rank 0: CPUs 4-5, GPU 0, 2 threads"]
    assert [seat.cpus for seat in place(machine([4, 4], gpus=gpus), 2, "numa", True)] == [(4, 5, 6, 7)] * 2
    unknown = (*gpus[:3], Gpu("3"))
    assert place(machine([4, 4], gpus=unknown), 4, "core", True)[0].cpus == (0, 1)
    crowded = tuple(Gpu(str(n), 1) for n in range(4))
    assert [seat.cpus for seat in place(machine([3, 3], gpus=crowded), 4, "core", True)] == [(0,), (1, 2), (3,), (4, 5)]


def test_too_few_cores_or_gpus_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"5 ranks .* a core each: this host allows 4 cores \(8 CPUs\)"):
        place(machine([4], threads=2), 5, "core", False)
    assert len(place(machine([4]), 5, "numa", False)) == 5
    with pytest.raises(ConfigError, match="3 ranks cannot have a GPU each: this host shows 2 GPUs"):
        place(machine([4], gpus=(Gpu("0"), Gpu("1"))), 3, "none", True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 2), st.data())
def test_placement_is_valid_on_any_machine(cores: list[int], threads: int, data: st.DataObject) -> None:
    it = machine(cores, threads)
    nproc = data.draw(st.integers(1, sum(cores)))
    whole = [set(core.cpus) for core in it.cores]
    for bind in ("core", "numa"):
        seats = place(it, nproc, bind, False)
        for seat in seats:
            assert seat.cpus
            assert set(seat.cpus) == set().union(*(core for core in whole if core & set(seat.cpus)))
            nodes = {core.node for core in it.cores if set(core.cpus) & set(seat.cpus)}
            assert len(nodes) == 1 or nproc < len(cores)
            assert 1 <= seat.threads <= len(seat.cpus)
        if bind == "core":
            assert sum(len(seat.cpus) for seat in seats) == len(set().union(*(seat.cpus for seat in seats)))


def sys_folder(root: Path) -> None:
    """Create a /sys with two GPUs and two nodes, each with two cores of two threads.

    One GPU is at node 1. The node of the other GPU is unknown.
    """
    for node, listed in enumerate(("0-1,4-5", "2-3,6-7")):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (root / f"sys/devices/system/node/node{node}/cpulist").write_text(listed + "\n")
    for cpu in range(8):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for number, (bus, node) in enumerate((("0000:1A:00.0", "1"), ("0000:3b:00.0", "-1"))):
        driver, device = root / "proc/driver/nvidia/gpus" / bus, root / "sys/bus/pci/devices" / bus.lower()
        driver.mkdir(parents=True)
        device.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t H100\nIRQ: 5\nGPU UUID: \t GPU-{number}aaa\n")
        (device / "numa_node").write_text(node + "\n")


LISTED = """\
GPU 0: NVIDIA H100 (UUID: GPU-0aaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-x)
  MIG 3g.40gb     Device  1: (UUID: MIG-y)
GPU 1: NVIDIA H100 (UUID: GPU-1aaa)
"""


def test_machine_is_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys_folder(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 6, 7})
    monkeypatch.setattr(host, "_ask_nvidia_smi", dict)
    read = placement.read_machine({}, True, tmp_path)
    assert read.cores == (Core((0, 4), 0), Core((1,), 0), Core((6,), 1), Core((7,), 1))
    assert read.gpus == (Gpu("0", 1), Gpu("1", None))
    nothing = placement.read_machine({}, True, tmp_path / "nothing")
    assert (nothing.cores[0], len(nothing.cores), nothing.gpus) == (Core((0,), 0), 5, ())


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [Gpu("MIG-x", 1), Gpu("MIG-y", 1), Gpu("1")]),
        ("1,0", [Gpu("1"), Gpu("0", 1)]),
        ("GPU-0aaa, MIG-y", [Gpu("GPU-0aaa", 1), Gpu("MIG-y", 1)]),
        ("0,-1,1", [Gpu("0", 1)]),
        ("1,7,0", [Gpu("1")]),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_visible_gpus_are_the_same_as_in_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: list[Gpu]
) -> None:
    sys_folder(tmp_path)
    monkeypatch.setattr(host, "_ask_nvidia_smi", lambda: host._parse_list(LISTED))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert list(host.visible_gpus(environ, tmp_path)) == gpus


def test_environment_of_ranks_has_the_number_of_threads_and_cpus() -> None:
    seats = (CpuPlace((0, 1), "0", 2), CpuPlace((2,), "1", 1))
    environ = common_environ({"ALLRANKS_CPUS": "9"}, JobShare(2, 2), None, "", ("", 0), seats)
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["ALLRANKS_CPUS"] == str(min(3, host.usable_cpus()))
    assert "ALLRANKS_CPUS" not in common_environ({"ALLRANKS_CPUS": "9"}, JobShare(2, 2), None, "", ("", 0))


SCRIPT = """
import os
names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "OMP_NUM_THREADS", "ALLRANKS_CPUS")
print(sorted(os.sched_getaffinity(0)), *(os.environ.get(name) for name in names))
"""
HERE = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(placement._read_cores(Path("/sys/devices/system"), set(HERE))) < 2, reason="one core")
@pytest.mark.parametrize("how", ["fork", "spawn", "command"])
def test_ranks_are_bound_to_their_cpus_on_this_host(launcher: Launcher, how: str) -> None:
    options = ["-n", "2", "--bind", "core", "--one-gpu-per-rank"]
    shown = {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a,2"}
    if how == "command":
        words = ["--", "python3", str(launcher.write(SCRIPT))]
        done = launcher.run(*options, *words, environ=shown)
    else:
        done = launcher.script(SCRIPT, *options, "--start", how, environ=shown)
    assert done.code == 0, done.err
    seats = place(placement.read_machine(shown, True), 2, "core", True)
    threads = min(seat.threads for seat in seats)
    together = min(len(HERE), host.usable_cpus())
    assert done.lines == [
        f"[{rank}] {list(seat.cpus)} {seat.gpu} {rank} {threads} {together}" for rank, seat in enumerate(seats)
    ]


def test_one_rank_is_started_for_each_gpu_that_nvidia_smi_lists(launcher: Launcher) -> None:
    """Replace nvidia-smi with a script, because the host may have no GPU."""
    shim = launcher.write(f"#!/bin/sh\ncat << EOF\n{LISTED}EOF\n", "bin/nvidia-smi")
    shim.chmod(0o755)
    environ = {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    options = ["-n", "gpu", "--one-gpu-per-rank"]
    done = launcher.script(SCRIPT, *options, "--start", "spawn", "--dry-run", environ=environ)
    assert (done.code, done.err) == (0, "")
    threads = max(1, host.usable_cpus() // 3)
    assert f"local rank 1: all CPUs, GPU MIG-y, {threads} thread" in done.out
    done = launcher.script(SCRIPT, *options, "--start", "spawn", environ=environ)
    assert done.lines == [
        f"[{rank}] {HERE} {gpu} {rank} {threads} None" for rank, gpu in enumerate(("MIG-x", "MIG-y", "1"))
    ]


def test_too_few_gpus_for_one_per_rank_print_one_error(launcher: Launcher) -> None:
    done = launcher.script("", "-n", "2", "--one-gpu-per-rank", environ={"CUDA_VISIBLE_DEVICES": "GPU-a"})
    assert (done.code, len(done.err.splitlines())) == (2, 2)
    assert "2 ranks cannot have a GPU each: this host shows 1 GPU (" in done.err
    assert launcher.wait_gone() == []
