"""Early groups of an elastic program: they survive losses in place, and are closed if that is impossible."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

HEAD = """
import os, signal, sys, time
import torch
import allranks as dist

def die(rank, start=0):
    if int(os.environ["RANK"]) == rank and int(os.environ["ALLRANKS_START"]) == start:
        os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group(timeout=30)
rank = dist.get_rank()
"""

PROGRAM = """
first = dist.new_group([0, 1])
half, halves = dist.new_subgroups(2)
quarter = dist.split_group(half, [[0], [1]])
seen = torch.tensor([rank + 1.0])
dist.all_reduce(seen, group=half)
names = [None] * 2
dist.all_gather_object(names, f"rank {rank}", group=half)
weight = torch.zeros(3)
state = dist.resilience.State(weight=weight)
for step in state.steps(20):
    with step:
        if step.index == 5:
            die(1)
        if step.index == 9:
            die(0)
            die(3)
        if step.index == 12:
            die(1, start=1)
        part = torch.full((3,), step.index * (1.0 + rank))
        dist.all_reduce(part, group=half)
        dist.all_reduce(part, group=quarter)
        if rank < 2:
            dist.broadcast(part, 1, group=first)
        dist.all_reduce(part)
        assert half.agree(rank + 7) == rank // 2 * 2 + 7
        step.commit()
        weight += part
print("end", rank, seen.item(), names, weight[0].item(), state.replaced, flush=True)
"""


def _run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(HEAD + body)
    words = [sys.executable, "-m", "allranks", "run", "-n", "4", "--elastic", "2", *options, script]
    return warm.run(words, timeout=100)


def _ends(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)


def test_early_groups_survive_losses(tmp_path: Path) -> None:
    done = _run(tmp_path, PROGRAM)
    total = float((3 + 3 + 7 + 7) * sum(range(20)))
    halves = [("3.0", "['rank 0', 'rank 1']"), ("7.0", "['rank 2', 'rank 3']")]
    assert _ends(done) == [f"{rank} {' '.join(halves[rank // 2])} {total} 4" for rank in range(4)], done
    assert done.returncode == 0


TORCH = """
import torch.distributed as td
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
pair = td.new_group([1, 2])
row = mesh["columns"].get_group()
weight = torch.zeros(1)
state = dist.resilience.State(weight=weight)
for step in state.steps(10):
    with step:
        if step.index == 3:
            die(1)
        if step.index == 6:
            die(2)
            die(0)
        part = torch.tensor([1.0 + rank])
        td.all_reduce(part, group=row)
        td.all_reduce(part, group=mesh.get_group("rows"))
        if pair is not td.GroupMember.NON_GROUP_MEMBER:
            td.all_reduce(part, group=pair)
        td.all_reduce(part)
        step.commit()
        weight += part
print("end", rank, td.get_world_size(row), weight.item(), state.replaced, flush=True)
"""


@pytest.mark.parametrize("begins", ["allranks", "torch"])
def test_meshes_and_groups_of_torch_survive_losses(begins: str, tmp_path: Path) -> None:
    head = HEAD
    if begins == "torch":
        head = head.replace(
            "dist.init_process_group(", "torch.distributed.init_process_group('allranks', timeout=T(0, "
        )
        head = "from datetime import timedelta as T\n" + head.replace("timeout=30)", "30))").replace(
            "T(0, timeout", "T(0"
        )
        assert "init_process_group('allranks', timeout=T(0, 30))" in head
    script = tmp_path / "program.py"
    script.write_text(head + TORCH)
    words = [sys.executable, "-m", "allranks", "run", "-n", "4", "--elastic", "2", script]
    done = warm.run(words, timeout=100)
    assert _ends(done) == [f"{rank} 2 {float(10 * 2 * (10 + 20))} 3" for rank in range(4)], done
    assert done.returncode == 0


def test_failed_recovery_attempt_is_repeated_and_counted_once(tmp_path: Path) -> None:
    body = """
from allranks._elastic.training import state_recovery as module

half, _ = dist.new_subgroups(2)
renew, failures = module.renew_groups, 2 * (rank == 0)


def fail_first():
    global failures
    if failures:
        failures -= 1
        raise dist.JoinError("for the test")
    renew()


module.renew_groups = fail_first
state = dist.resilience.State()
for step in state.steps(6):
    with step:
        if step.index == 3:
            die(1)
        part = torch.ones(1)
        dist.all_reduce(part, group=half)
        dist.all_reduce(part)
print("end", rank, part.item(), state.replaced, state.lost, state.joined, failures, flush=True)
"""
    done = _run(tmp_path, body)
    assert _ends(done) == [f"{rank} 8.0 1 1 0 0" for rank in range(4)], done


def test_group_created_in_a_step_is_closed_by_a_loss_with_a_reason(tmp_path: Path) -> None:
    body = """
state = dist.resilience.State()
group = None
for step in state.steps(6):
    with step:
        if step.index == 3:
            die(2)
        dist.barrier()
        try:
            group.size() and group.barrier()
        except (AttributeError, dist.NotInitializedError) as error:
            print(error)
            group = dist.new_group([0, 1, 2, 3])
print("end", rank, flush=True)
"""
    done = _run(tmp_path, body)
    assert _ends(done) == ["0", "1", "2", "3"], done
    told = re.findall(r"process group 'group 1' was closed when a rank was lost", done.stdout)
    assert len(told) == 3, done


def test_groups_are_closed_if_ranks_are_renumbered(tmp_path: Path) -> None:
    body = """
half, _ = dist.new_subgroups(2)
state = dist.resilience.State()
for step in state.steps(6):
    with step:
        if step.index == 3:
            die(1)
        dist.barrier()
try:
    dist.barrier(group=half)
except dist.NotInitializedError as error:
    print("end", dist.get_rank(), "was closed when the ranks were renumbered" in str(error), flush=True)
"""
    done = _run(tmp_path, body, "--respawns", "0")
    assert _ends(done) == ["0 True", "1 True", "2 True"], done


@pytest.mark.parametrize("moment", ["between", "creation"])
def test_early_groups_work_in_the_loop_after_a_loss_before_it(moment: str, tmp_path: Path) -> None:
    body = """
half, _ = dist.new_subgroups(2)
if "MOMENT" == "creation":
    die(2)
other = dist.new_group([0, 2])
if "MOMENT" == "between":
    die(2)
seen = torch.tensor([1.0 + rank])
dist.all_reduce(seen)
third = dist.new_group([1, 2, 3])
state = dist.resilience.State()
for step in state.steps(3):
    with step:
        part = torch.tensor([1.0])
        dist.all_reduce(part, group=half)
        if rank in (0, 2):
            dist.all_reduce(part, group=other)
        if rank > 0:
            dist.all_reduce(part, group=third)
        dist.all_reduce(part)
print("end", rank, seen.item(), part.item(), flush=True)
"""
    done = _run(tmp_path, body.replace("MOMENT", moment))
    # halves 2 2 2 2; ranks 0 and 2: 4; ranks 1 to 3: 2 + 4 + 2
    assert _ends(done) == [f"{rank} 10.0 28.0" for rank in range(4)], done
    assert done.returncode == 0


def test_error_explains_a_group_call_that_a_loss_interrupts_before_the_loop(tmp_path: Path) -> None:
    body = """
half, _ = dist.new_subgroups(2)
die(3)
dist.barrier(group=half)
state = dist.resilience.State()
for step in state.steps(3):
    with step:
        dist.barrier()
"""
    done = _run(tmp_path, body)
    assert done.returncode, done
    assert "before the training loop. Only calls on the world are repeated there" in done.stderr
