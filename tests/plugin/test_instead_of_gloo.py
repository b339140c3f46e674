"""A program that requests gloo from torch.distributed runs unchanged on allranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    optimizer.step()
half = dist.new_group([0, 1], backend="gloo", pg_options=dist.ProcessGroupGloo._Options())  # torch ignores them
total = torch.ones(1)
dist.all_reduce(total, group=half)
dist.monitored_barrier()
kind = type(dist.group.WORLD).__name__
print(dist.get_backend(), dist.get_backend(half), total.item(), model.module.weight.sum().item().hex(), kind)
dist.destroy_process_group()
"""
NOTICE = "the program requested gloo"


def run(folder: Path, *options: str, **variables: str) -> tuple[set[str], str]:
    """Run the program; return the lines that the ranks print, without prefixes, and stderr."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "allranks", "run", "-n", "2", *options, str(script)]
    environ = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    printed = {line.partition("] ")[2] for line in done.stdout.splitlines()}
    return {line for line in printed if not line.startswith("[Gloo]")}, done.stderr  # printed by torch 2.10


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_program_has_the_same_result_as_on_gloo(start: str, tmp_path: Path) -> None:
    (on_gloo,), said = run(tmp_path)
    assert on_gloo.endswith("ProcessGroup")
    assert NOTICE not in said
    (on_ours,), said = run(tmp_path, "--instead-of-gloo", "--start", start)
    assert said.count(NOTICE) == 1
    assert on_ours.split()[:4] == on_gloo.split()[:4]
    assert on_ours.endswith("TorchGroup")


def test_environment_variable_replaces_gloo(tmp_path: Path) -> None:
    for value, kind in (("1", "TorchGroup"), ("0", "ProcessGroup")):
        (printed,), _ = run(tmp_path, ALLRANKS_INSTEAD_OF_GLOO=value)
        assert printed.split()[-1] == kind
