"""A training under ``allranks run --elastic`` on several hosts: a rank is replaced, a host is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, finish, jobs, read_until
from support.sshd import Ssh

PROGRAM = """
import os, signal, sys, time
import torch
import allranks as dist

dist.init_process_group(timeout=30)
seat, start = int(os.environ["RANK"]), int(os.environ["ALLRANKS_START"])
torch.manual_seed(seat)
nn = torch.nn
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
wrapped = dist.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = dist.resilience.State(model=wrapped, optimizer=optimizer)
if start == 0 and seat == 0:
    print("up", flush=True)
for step in state.steps(40):
    with step:
        if DIES and start == 0 and seat == 2 and step.index == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        wrapped(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(PAUSE)
weights = sum(float(p.detach().double().sum()) for p in model.parameters())
print(f"end {dist.get_world_size()} {weights!r} {state.replaced}", flush=True)
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def _ends(out: str) -> list[str]:
    return [line.partition("end ")[2] for line in out.splitlines() if "end " in line]


def test_a_rank_of_another_host_is_replaced(job: Jobs) -> None:
    words = ["-H", "node0:2,node1:2", "--elastic", "3"]
    calm = job.run(2, *words, job.write(PROGRAM.replace("DIES", "False").replace("PAUSE", "0.005")), torch=True)
    assert calm.code == 0, calm.err
    hit = job.run(2, *words, job.write(PROGRAM.replace("DIES", "True").replace("PAUSE", "0.005")), torch=True)
    assert hit.code == 0, hit.err
    assert "rank 2 (host node1" in hit.err
    assert len(set(_ends(calm.out))) == 1
    assert [end.rpartition(" ")[0] for end in _ends(hit.out)] == [end.rpartition(" ")[0] for end in _ends(calm.out)]
    assert {end.split()[-1] for end in _ends(hit.out)} == {"1"}


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_go_on_when_a_host_is_lost(job: Jobs, lost: int) -> None:
    program = PROGRAM.replace("DIES", "False").replace("PAUSE", "0.1")
    process = job.start(2, "-H", "node0:2,node1:2", "--elastic", "2", job.write(program), torch=True)
    read_until(process, 1)
    for pid in job.on(lost, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    ends = _ends(done.out)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    assert ends[0].startswith("2 ")
