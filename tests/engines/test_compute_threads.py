"""Number of torch compute threads in ranks for which the user has set no number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allranks
from allranks._cluster.host import cpus_of

PROGRAM = """
import os, sys, warnings
ranks, rank, store, own = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if own < 0:  # a scheduler binds each rank to a CPU of its own
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
import torch
if own > 0:
    torch.set_num_threads(own)
import allranks as dist
with warnings.catch_warnings(record=True) as caught:
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.new_group(list(range(ranks)))
x = torch.ones(1)
dist.all_reduce(x, group=group)
assert x.item() == ranks
print(torch.get_num_threads(), *[each.message for each in caught], flush=True)
dist.destroy_process_group()
"""
CPUS = len(os.sched_getaffinity(0))
_OF_OPENMP = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "ALLRANKS_CPUS")


def threads(tmp_path: Path, ranks: int, own: int = 0, **variables: str) -> list[str]:
    """Return the line of each rank: its number of threads, and its warnings."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environ = {name: value for name, value in os.environ.items() if name not in _OF_OPENMP} | variables
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(ranks), str(rank), str(tmp_path / "store"), str(own)],
            env=environ, text=True, stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return found


def test_ranks_divide_the_cpus_among_their_threads(tmp_path: Path) -> None:
    assert threads(tmp_path, 2) == [str(max(1, CPUS // 2))] * 2


def test_single_rank_keeps_its_threads(tmp_path: Path) -> None:
    assert int(*threads(tmp_path, 1)) > 1


@pytest.mark.parametrize("by", ["variable", "call"])
def test_thread_count_set_by_the_user_is_kept_with_a_warning(tmp_path: Path, by: str) -> None:
    chosen = CPUS + 1
    first, second = (
        threads(tmp_path, 2, OMP_NUM_THREADS=str(CPUS)) if by == "variable" else threads(tmp_path, 2, own=chosen)
    )
    number = CPUS if by == "variable" else chosen
    assert second == str(number)
    assert first.startswith(f"{number} 2 ranks compute with {number} threads each on {CPUS} CPUs")
    assert first.count("OMP_NUM_THREADS") == 1


def test_passive_waiting_threads_cause_no_warning(tmp_path: Path) -> None:
    assert threads(tmp_path, 2, OMP_NUM_THREADS=str(CPUS), OMP_WAIT_POLICY="passive") == [str(CPUS)] * 2


def test_ranks_bound_to_separate_cpus_use_those_cpus(tmp_path: Path) -> None:
    assert threads(tmp_path, 2, own=-1) == ["1"] * 2
    cpus = sorted(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    bound = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for process, cpu in zip(bound, cpus, strict=False):
            os.sched_setaffinity(process.pid, {cpu})
        os.sched_setaffinity(0, cpus[:1])
        assert cpus_of([]) == 1
        assert cpus_of(process.pid for process in bound) == 2
        assert cpus_of([bound[0].pid]) == 1
    finally:
        os.sched_setaffinity(0, before)
        for process in bound:
            process.kill()
            process.wait()


def test_ranks_started_by_a_rank_divide_its_cpus(tmp_path: Path) -> None:
    """Check that a number which `allranks run -n 1` has set for the parent does not count as set by the user."""
    assert threads(tmp_path, 2, OMP_NUM_THREADS=str(CPUS), LOCAL_WORLD_SIZE="1") == [str(max(1, CPUS // 2))] * 2


def test_master_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(CPUS)
    try:
        with allranks.init_master_worker(workers=1):
            assert torch.ones(1 << 22).to("worker:1").cpu().sum().item() == 1 << 22
            assert torch.get_num_threads() == CPUS
    finally:
        torch.set_num_threads(before)
