"""The loop of docs/checkpoints.md under ``allranks run --restarts``: the result is bit-identical after any kill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from allranks.testing import run_ranks
from support.launcher_process import Launcher
from support.marked import wait_for

TRAINS = """
import os, signal, sys, time
import torch
import allranks as dist
from allranks import checkpoint

folder, result, dies = sys.argv[1:4]
dist.init_process_group()
rank = dist.get_rank()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(300, 300)  # more than 64 KiB
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(100 + rank)
progress = {"step": 0}
state = {"model": model, "optimizer": optimizer, "random": checkpoint.RandomState(), "progress": progress}
if (last := checkpoint.latest(folder, group=dist.group.WORLD)) is not None:
    checkpoint.load(last, into=state)
print(f"begins with {progress['step']}", flush=True)
for step in range(progress["step"], 8):
    if dies == "dies" and step == 3 and rank == 1 and not os.path.exists(f"{result}.rank"):
        open(f"{result}.rank", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)  # while step 3 may still be written
    if dies == "dies" and step == 6 and not os.path.exists(f"{result}.launcher"):
        open(f"{result}.at{rank}", "x").close()
        time.sleep(500)
    model(torch.randn(4, 300)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    progress["step"] = step + 1
    checkpoint.save_async(state, folder, step=step + 1, keep=2)
dist.barrier()
if rank == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], result)
dist.destroy_process_group()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.end(5)


@pytest.mark.timeout(600)
def test_restarted_loop_has_bit_identical_results(launcher: Launcher, tmp_path: Path) -> None:
    """Kill a rank: the launcher restarts all ranks. Kill the launcher: the same command runs again."""
    launcher.write(TRAINS)
    result = tmp_path / "result"
    words = ["-n", "2", "--restarts", "1", "script.py", str(tmp_path / "folder"), str(result), "dies"]

    def undisturbed() -> None:
        sys.argv = ["script.py", str(tmp_path / "other"), str(tmp_path / "expected"), "lives"]
        exec(TRAINS, {})

    run_ranks(2, undisturbed, init=False)
    first = launcher.start(*words, real_torch=True)
    for rank in (0, 1):
        wait_for(Path(f"{result}.at{rank}").exists, 200)
    first.kill()
    out, _ = first.communicate(timeout=200)
    assert launcher.wait_gone(30) == []
    assert sorted(_begun(out)) in (["0", "0", "2", "2"], ["0", "0", "3", "3"])
    Path(f"{result}.launcher").touch()
    second = launcher.start(*words, real_torch=True)
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err.decode()
    assert _begun(out) in (["5", "5"], ["6", "6"])
    assert all(map(torch.equal, torch.load(result), torch.load(tmp_path / "expected")))


def _begun(out: bytes) -> list[str]:
    return [line.rpartition(" ")[2] for line in out.decode().splitlines() if "begins with" in line]
