"""A training under ``allranks run --elastic`` on several hosts, with losses of a rank, a host and a pod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.jobs import SOURCE, Jobs, finish, jobs, read_until
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

SHARDED = """
import os, time
import torch
import allranks as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group(timeout=30)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.ReLU(), torch.nn.Linear(9, 1))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = dist.resilience.State(model=model, optimizer=optimizer)
print("up", flush=True)
for step in state.steps(40):
    with step:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(PAUSE)
weights = sum(float(p.full_tensor().detach().double().sum()) for p in model.parameters())
print(f"end {dist.get_world_size()} {weights!r} {state.replaced}", flush=True)
"""


GROWS = """
import os, time
import copy
import torch
import allranks as dist
from torch.utils.data import DataLoader

SAMPLES, alone = 96, False
dist.init_process_group(timeout=30)
if "WAITS" in os.environ:
    print("on the way", flush=True)
    time.sleep(100)
first = [None] * dist.get_world_size()
dist.all_gather_object(first, dist.get_rank())
assert first == list(range(dist.get_world_size()))
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
torchs, plain = copy.deepcopy(model), copy.deepcopy(model)
wrapped = dist.nn.parallel.DistributedDataParallel(model)
wrapped_by_torch = torch.nn.parallel.DistributedDataParallel(torchs)
parameters = [*model.parameters(), *torchs.parameters(), *plain.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
sampler = dist.data.DistributedSampler(range(SAMPLES))
loader = DataLoader(range(SAMPLES), batch_size=4, sampler=sampler)
seen = {"sum": torch.zeros(SAMPLES)}
state = dist.resilience.State(
    model=wrapped, optimizer=optimizer, torchs=wrapped_by_torch, plain=plain, seen=seen
)


def train(batch):
    optimizer.zero_grad()
    batches = [torch.zeros_like(batch) for _ in range(dist.get_world_size())]
    dist.all_gather(batches, batch)
    for net, mine in (wrapped, [batch]), (wrapped_by_torch, [batch]), (plain, batches):
        (sum(net(each.float().unsqueeze(1) / SAMPLES).square().mean() for each in mine) / len(mine)).backward()
    count = torch.zeros(SAMPLES).index_add(0, batch, torch.ones(len(batch)))
    dist.all_reduce(count)
    seen["sum"] = seen["sum"] + count
    optimizer.step()


for epoch in state.epochs(2):
    sampler.set_epoch(epoch)
    if epoch == 0:
        for step in state.steps(1000000):
            with step:
                train(torch.tensor([0]))
                time.sleep(0.01)
            if step.index == 3 and dist.get_rank() == 0:
                print("up", flush=True)
            if state.lost and not alone:
                alone = True
                print("alone", flush=True)
            if JOINED:
                break
        seen["sum"] = torch.zeros(SAMPLES)
    for step in state.steps(loader):
        with step:
            train(step.batch)
weights = sum(float(p.detach().double().sum()) for p in model.parameters())
once = bool((seen["sum"] == 2).all())
for other in (model, torchs):  # the same steps, computed by one process
    torch.testing.assert_close(other.state_dict(), plain.state_dict())
print(f"end {dist.get_rank()} {dist.get_world_size()} {weights!r} {state.joined} {state.lost} {once}", flush=True)
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def _ends(out: str) -> list[str]:
    return [line.partition("end ")[2] for line in out.splitlines() if "end " in line]


def test_rank_of_another_host_is_replaced(job: Jobs) -> None:
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
def test_training_continues_after_the_loss_of_a_host(job: Jobs, lost: int) -> None:
    program = PROGRAM.replace("DIES", "False").replace("PAUSE", "0.1")
    process = job.start(2, "-H", "node0:2,node1:2", "--elastic", "2", job.write(program), torch=True)
    read_until(process, 1)
    with job.gone(lost):
        done = finish(process)
    assert done.code == 0, done.err
    ends = _ends(done.out)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    assert ends[0].startswith("2 ")


def test_spare_host_takes_over_the_shards_of_a_lost_host(job: Jobs) -> None:
    words = ["-H", "node0:2,node1:2,node2:2", "--elastic", "3", "--spares", "1"]
    calm = job.run(0, *words, job.write(SHARDED.replace("PAUSE", "0")), torch=True)
    assert calm.code == 0, calm.err
    process = job.start(0, *words, job.write(SHARDED.replace("PAUSE", "0.1")), torch=True)
    read_until(process, 4)
    for pid in job.on(1, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert "ranks 2-3 are started on node2" in done.err
    assert len(set(_ends(calm.out))) == 1
    assert _ends(done.out) == [end.removesuffix("0") + "2" for end in _ends(calm.out)]


def test_host_that_starts_later_joins_the_training(job: Jobs) -> None:
    """The first attempt of the host is killed before its ranks have joined."""
    script = job.write(GROWS.replace("JOINED", "state.joined == 2"))
    words = ["-N", "1:2", "--nproc-per-node", "2", "--master-addr", "node0:15999", "--elastic", "2:4"]
    words += ["--rdzv-conf", "last_call_timeout=1", script]
    leader = job.start(0, "--node-rank", "0", *words, torch=True)
    read_until(leader, 1)
    lost = job.start(1, "--node-rank", "1", *words, torch=True, WAITS="1")
    assert sorted(read_until(lost, 2)) == ["[node1:2] on the way", "[node1:3] on the way"]
    lost.kill()
    lost.wait()
    later = job.start(1, "--node-rank", "1", *words, torch=True)
    done = [finish(leader), finish(later)]
    assert [each.code for each in done] == [0, 0], done[0].err
    assert done[0].err.count("node1 has joined; ranks 2-3 join the other ranks") == 2, done[0].err
    ends = _ends(done[0].out) + _ends(done[1].out)
    assert sorted(end.split()[0] for end in ends) == ["0", "1", "2", "3"]
    assert len({end.partition(" ")[2] for end in ends}) == 1
    assert ends[0].split()[1] == "4"
    assert ends[0].split()[3:] == ["2", "0", "True"]


@pytest.mark.parametrize("how", ["its agent is killed", "it is unplugged"])
def test_lost_host_rejoins_the_training(job: Jobs, how: str) -> None:
    """Check that its ranks have their previous numbers and that its previous processes are not part of the job."""
    script = job.write(GROWS.replace("JOINED", "state.joined == 2"))
    process = job.start(0, "-H", "node0:1,node1:2", "--elastic", "1", script, torch=True)
    read_until(process, 1)
    if how == "it is unplugged":
        job.hosts.cut(1)
        assert read_until(process, 1) == ["[node0:0] alone"]
        job.hosts.plug(1)
    else:
        for pid in job.on(1, "agents.serve"):
            os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert not job.on(1, "agents.serve")
    assert "ranks 1-2 terminated with it; the other ranks continue (1 of at least 1)" in done.err
    assert "node1 has joined; ranks 1-2 join the other ranks" in done.err
    ends = _ends(done.out)
    assert sorted(end.split()[0] for end in ends) == ["0", "1", "2"]
    assert len({end.partition(" ")[2] for end in ends}) == 1
    assert ends[0].split()[1] == "3"
    assert ends[0].split()[3:] == ["2", "2", "True"]


HOLD = """
def hold():
    '''In the middle of the epoch, until a pod is lost.'''
    if dist.get_rank() == 0 and seen["sum"].sum() >= 24 and not os.path.exists("killed"):
        print("dealt", flush=True)
        while not os.path.exists("killed"):
            time.sleep(0.01)

"""


def test_restarted_pod_rejoins_under_its_index_and_a_lost_pod_does_not(job: Jobs) -> None:
    """The command of the manifest in the environment of an Indexed Job's pods. A killed pod loses all its processes."""
    program = GROWS.replace("JOINED", "state.joined == 1").replace("train(step.batch)", "hold(), train(step.batch)")
    job.write(HOLD + program, "train.py")
    words = ("--to", "k8s", "-N", "3", "--elastic", "2", "--image", "a", "--name", "first", "train.py")
    made = subprocess.run(
        [sys.executable, "-m", "allranks", "submit", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    secret, _, manifest = yaml.safe_load_all(made.stdout)
    command = manifest["spec"]["template"]["spec"]["containers"][0]["command"]
    environ = {"ALLRANKS_SECRET": secret["stringData"]["ALLRANKS_SECRET"]}

    def start(index: int) -> subprocess.Popen[bytes]:
        pod = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"first-{index}", **environ}
        run = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command[2:]]
        return job.start(index, *run, torch=True, **pod)

    def kill(index: int) -> None:
        for pid in job.on(index, ""):
            os.kill(pid, signal.SIGKILL)

    before = [host.names.read_text() for host in job.hosts.hosts]
    for host, text in zip(job.hosts.hosts, before, strict=True):
        host.names.write_text(f"{text}{job.hosts.hosts[0].address} first-0.first\n")
    try:
        leader, *_ = [start(index) for index in range(3)]
        assert read_until(leader, 1) == ["[node0:0] up"]
        kill(1)
        assert read_until(leader, 1) == ["[node0:0] alone"]
        again = start(1)
        assert read_until(leader, 1) == ["[node0:0] dealt"]
        kill(2)
        (job.folder / "killed").touch()
        done = [finish(leader), finish(again)]
    finally:
        for host, text in zip(job.hosts.hosts, before, strict=True):
            host.names.write_text(text)
    assert [each.code for each in done] == [0, 0], done
    assert "rank 1 terminated with it; the other ranks continue (2 of at least 2)" in done[0].err
    assert "node1 has joined; rank 1 joins the other ranks" in done[0].err
    assert "rank 2 terminated with it; the other ranks continue (2 of at least 2)" in done[0].err
    ends = _ends(done[0].out) + _ends(done[1].out)
    assert [end.split()[:2] for end in sorted(ends)] == [["0", "2"], ["1", "2"]]
    assert len({end.partition(" ")[2] for end in ends}) == 1
    assert ends[0].split()[3:] == ["1", "2", "True"]
