"""``allranks run --elastic``: dead ranks are replaced, and the weights equal those of an undisturbed run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm

ROOT = Path(__file__).parents[2]


PROGRAM = """
import os, signal, sys
import torch
import allranks as dist

dist.init_process_group(timeout=30)
start = int(os.environ["ALLRANKS_START"])
seen = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(seen)
weight = torch.zeros(3)
state = dist.resilience.State(weight=weight)
dist.barrier()
for step in state.steps(30):
    with step:
        if start == 0 and os.environ["RANK"] == "1" and step.index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.full((3,), step.index * (1.0 + dist.get_rank()))
        dist.all_reduce(gradient)
        step.commit()
        weight += gradient
print("end", dist.get_rank(), dist.get_world_size(), seen.item(), weight[0].item(), state.replaced, flush=True)
"""


def _run(folder: Path, *options: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    words = [sys.executable, "-m", "allranks", "run", "-n", "3", *options, script]
    return warm.run(words, timeout=100)


def test_killed_rank_is_replaced(tmp_path: Path) -> None:
    done = _run(tmp_path, "--elastic", "2")
    lines = sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)
    assert lines == [f"{rank} 3 6.0 {float(6 * sum(range(30)))} 1" for rank in range(3)], done
    assert done.returncode == 0
    assert "was killed by SIGKILL; restarted (1 of 3)" in done.stderr


def test_without_respawns_the_others_go_on(tmp_path: Path) -> None:
    done = _run(tmp_path, "--elastic", "2", "--respawns", "0")
    lines = sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)
    total = 6 * sum(range(12)) + 3 * sum(range(12, 30))
    assert lines == [f"{rank} 2 6.0 {float(total)} 0" for rank in range(2)], done
    assert done.returncode == 0


def test_program_without_steps_fails_with_the_cause_of_the_loss(tmp_path: Path) -> None:
    program = PROGRAM.replace("for step in state.steps(30):", "for step in []:").replace(
        "print(", "os.kill(os.getpid(), 9) if dist.get_rank() == 1 else dist.barrier()\nprint("
    )
    done = _run(tmp_path, "--elastic", "2", program=program)
    assert done.returncode == 137, done
    assert "rank 1" in done.stderr
    assert "resilience" in done.stderr


def test_chaos_example_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    def weights(*options: str) -> tuple[int, str]:
        words = [
            sys.executable,
            ROOT / "examples" / "digits" / "chaos.py",
            "--epochs",
            "8",
            "--plot",
            picture,
            *options,
        ]
        done = warm.run(words, timeout=140)
        assert done.returncode == 0, done
        found = re.search(r"(\d+) ranks killed; weights (\w{12});", done.stdout)
        assert found, done
        return int(found[1]), found[2]

    picture = tmp_path / "chaos.png"
    # Without a limit, a slow machine would kill more ranks than it replaces.
    calm, hit = weights("--every", "0"), weights("--every", "0.4", "--kills", "6")
    assert calm[1] == hit[1]
    assert calm[0] == 0 < hit[0]
    assert picture.read_bytes().startswith(b"\x89PNG")


LOGS = """
import os
import torch
import allranks as dist

dist.init_process_group(timeout=30)
first = os.environ["ALLRANKS_START"] == "0"
state = dist.resilience.State(weight=(weight := torch.zeros(1)), history=(history := {"lines": []}))


def write():
    if dist.get_rank() == 0:
        with open("log", "w") as file:
            print(*history["lines"], sep="\\n", file=file)


for epoch in state.epochs(4):
    for step in state.steps(5):
        with step:
            if first and (os.environ["RANK"], epoch, step.index) == ("0", 1, 2):
                os.kill(os.getpid(), 9)
            gradient = torch.ones(1)
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            history["lines"].append(f"step {epoch} {step.index} {weight.item()}")
            step.commit()
            weight += gradient
        write()
    for step in state.steps(1):
        with step:
            score = weight.clone()
            dist.all_reduce(score, op=dist.ReduceOp.AVG)
            history["lines"].append(f"evaluation {epoch} {score.item()}")
            if first and (os.environ["RANK"], epoch) == ("1", 2):
                os.kill(os.getpid(), 9)
        write()
write()
print("end", dist.get_rank(), dist.get_world_size(), flush=True)
"""


@pytest.mark.parametrize("options", [[], ["--respawns", "0"]], ids=["replace", "shrink"])
def test_logs_and_evaluations_continue_when_rank_0_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Kill rank 0 in a step, and rank 1 in an evaluation. Without respawns, rank 1 is rank 0 by then."""
    monkeypatch.chdir(tmp_path)
    done = _run(tmp_path, "--elastic", "1", *options, program=LOGS)
    assert done.returncode == 0, done
    assert done.stderr.count("was killed by SIGKILL") == 2, done
    assert [end[1] for end in _ends(done)] == ([str(1)] if options else ["3"] * 3)
    expected = []
    for epoch in range(4):
        expected += [f"step {epoch} {index} {float(5 * epoch + index)}" for index in range(5)]
        expected.append(f"evaluation {epoch} {float(5 * epoch + 5)}")
    assert (tmp_path / "log").read_text().splitlines() == expected


BUDDIES = """
import os
import torch
import allranks as dist

dist.init_process_group(timeout=30)
start, slot = int(os.environ["ALLRANKS_START"]), int(os.environ["RANK"])
torch.manual_seed(slot)
net, own = torch.nn.BatchNorm1d(4), torch.zeros(1)
state = dist.resilience.State(net=net, own=[own] if OWN else [], local=["own"])
for step in state.steps(30):
    with step:
        if start == 0 and step.index == 10 and (slot in FIRST or (slot in THEN and state.replaced)):
            os.kill(os.getpid(), 9)
        net(torch.randn(8, 4) + slot)
        own += slot
print("end", slot, own.item(), net.running_mean.sum().item(), state.replaced, flush=True)
"""


def _run_with_backups(folder: Path, own: bool, first: list[int], then: list[int]) -> subprocess.CompletedProcess[str]:
    program = BUDDIES.replace("OWN", repr(own)).replace("FIRST", repr(first)).replace("THEN", repr(then))
    return _run(folder, "-n", "4", "--elastic", "1", program=program)


def _ends(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    lines = sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)
    return [line.split()[:3] for line in lines]


def test_replacement_of_a_backup_rank_stores_the_values_of_its_predecessor(tmp_path: Path) -> None:
    """Replace rank 2, the backup rank of rank 1. Then kill rank 1 before the next step is complete."""
    calm, hit = _run_with_backups(tmp_path, True, [], []), _run_with_backups(tmp_path, True, [2], [1])
    assert hit.returncode == 0, hit
    assert _ends(hit) == _ends(calm)
    assert [end[1] for end in _ends(hit)] == ["0.0", "30.0", "60.0", "90.0"]
    assert hit.stdout.count(" 2\n") == 4  # every rank has counted two replacements


def test_loss_of_a_rank_together_with_its_backup_rank_is_reported(tmp_path: Path) -> None:
    buffers = _run_with_backups(tmp_path, False, [1, 2], [])
    assert buffers.returncode == 0, buffers
    assert "rank 1 is lost together with rank 2, which stored its buffers" in buffers.stderr
    named = _run_with_backups(tmp_path, True, [1, 2], [])
    assert named.returncode, named
    assert "rank 1 is lost together with rank 2, which stored its tensors (own=). No rank has them" in named.stderr


LATER = """
import os
import torch
import allranks as dist

dist.init_process_group(timeout=30)
start, slot = int(os.environ["ALLRANKS_START"]), int(os.environ["RANK"])
torch.manual_seed(0)
model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = torch.zeros(1)
state = dist.resilience.State(model=model, optimizer=optimizer, own=[own])
for step in state.steps(20):
    with step:
        if start == 0 and slot == 1 and step.index == KILLED:
            os.kill(os.getpid(), 9)
        own += slot
        optimizer.zero_grad()
        model(torch.full((1, 2), slot + 1.0)).sum().backward()
        optimizer.step()
        if step.index == 10:
            own += 100
print("end", slot, own.item(), model.module.weight.sum().item(), flush=True)
"""


def test_tensor_first_changed_after_a_commit_cannot_be_restored_until_the_next_commit(tmp_path: Path) -> None:
    """Change the tensor after the commit of step 10. A loss before the next commit is an error."""

    def run(killed: int) -> subprocess.CompletedProcess[str]:
        return _run(tmp_path, "-n", "3", "--elastic", "3", program=LATER.replace("KILLED", str(killed)))

    calm = run(-1)
    for killed in (10, 12):
        hit = run(killed)
        assert hit.returncode == 0, hit
        assert _ends(hit) == _ends(calm)
    hit = run(11)
    assert hit.returncode, hit
    assert "own[0] differs between ranks and was changed after the commit of a step" in hit.stderr


ONE_AFTER_THE_OTHER = """
import os
import torch
import allranks as dist

dist.init_process_group(timeout=30)
start, slot = int(os.environ["ALLRANKS_START"]), int(os.environ["RANK"])
torch.manual_seed(0)
weight, own, norm = torch.zeros(1), torch.zeros(1), torch.nn.BatchNorm1d(2)
state = dist.resilience.State(weight=weight, own=[own], norm=norm)
for epoch in state.epochs(4):
    mine = 0.0
    for step in state.steps(5):
        with step:
            if (slot, start, epoch, step.index) in KILLS:
                os.kill(os.getpid(), 9)
            mine += (slot + 1) * (step.index + 1)
            own += mine
            norm(torch.randn(4, 2) if epoch == 2 else torch.full((4, 2), float(step.index)))
            total = torch.tensor([mine * (epoch + 1)])
            dist.all_reduce(total)
            step.commit()
            weight += total
        last = epoch
print("end", slot, own.item(), weight.item(), norm.running_mean.sum().item(), last, state.replaced, flush=True)
"""


@pytest.mark.parametrize(
    "kills",
    [
        [(1, 0, 0, 0), (0, 0, 1, 2)],  # the backup rank stored the buffers before they were found equal on all ranks
        [(0, 0, 1, 3), (1, 0, 2, 2)],  # the replacement of rank 0 sends the replacement of rank 1 its variables
        [(0, 0, 1, 3), (1, 0, 2, 0)],  # after the program has reset one of the variables
        [(1, 0, 1, 3), (1, 1, 2, 0)],
        [(1, 0, 1, 3), (1, 1, 2, 1), (2, 0, 3, 0), (0, 0, 3, 4)],
    ],
)
def test_variables_survive_the_consecutive_loss_of_several_ranks(tmp_path: Path, kills: list[tuple[int, ...]]) -> None:
    """Kill ranks one after the other. A replacement process sends the values of backups to the next one."""

    def run(kills: list[tuple[int, ...]]) -> list[list[str]]:
        done = _run(tmp_path, "--elastic", "1", program=ONE_AFTER_THE_OTHER.replace("KILLS", repr(kills)))
        assert done.returncode == 0, done
        assert done.stderr.count("was killed by SIGKILL") == len(kills), done
        return [line.split()[:5] for line in sorted(done.stdout.split("end ")[1:])]

    assert run(kills) == run([])
