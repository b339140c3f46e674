"""Master-worker mode on several hosts: workers that the master starts by ssh, and workers of ``allranks run``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import SOURCE, Jobs, finish, jobs, read_until
from support.slurm import Slurm
from support.sshd import Ssh

SUPPORT = Path(__file__).parents[1] / "support"
PATHS = {"PYTHONPATH": f"{SOURCE}:{SUPPORT}"}
STAY = {"STAY_S": "1000"}

MASTER = """
    import os, signal, sys, time
    import torch
    from allranks.remote.bootstrap.workers import gather_workers

    workers = gather_workers(hosts=(sys.argv[1:] or [None])[0], serve="stand_in:serve", timeout_s=60)
    lines = workers.connections
    print([(line.rank, line.host, line.socket.family.name) for line in lines])

    def group(name, *ranks):
        for rank in ranks:
            if rank:
                lines[rank - 1].socket.sendall(f"group {name} {' '.join(map(str, ranks))}".encode())
        if 0 in ranks:
            workers.make_group(name, ranks, 30.0).all_reduce(torch.zeros(2))
        return [lines[rank - 1].socket.recv(100).decode() for rank in ranks if rank]

    assert group("uploads", 0, 3) == ["[3.0, 3.0]"]
    assert group("copies", 1, 3) == ["[4.0, 4.0]"] * 2
    assert group("all", 0, 1, 2, 3) == ["[6.0, 6.0]"] * 3
    for how in ("SIGKILL", "SIGTERM"):  # on another host, of which the launcher knows
        os.kill(lines[2].pid, getattr(signal, how))
        assert how in workers.how_ended(3), workers.how_ended(3)
        workers.respawn(3)
    assert group("new", 0, 2, 3) == ["[5.0, 5.0]"] * 2
    lines[1].socket.sendall(b"sleep")
    print("here", flush=True)
    time.sleep(float(os.environ.get("STAY_S", 0)))
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


@pytest.mark.parametrize("way", ["hosts", "mode"])
def test_workers_on_other_hosts(job: Jobs, way: str) -> None:
    """Groups between any workers, replacement of a lost worker, and exit of all workers after the master."""
    script = job.write(MASTER)
    if way == "hosts":
        process = job.start_any(0, sys.executable, script, "node0:1,node1:1,node2:1", torch=True, **PATHS, **STAY)
        expected = "[(1, 'node0', 'AF_UNIX'), (2, 'node1', 'AF_INET'), (3, 'node2', 'AF_INET')]"
    else:
        process = job.start(0, "--mode", "master", "-H", "node0:2,node1:2", script, torch=True, **PATHS, **STAY)
        expected = "[(1, 'node0', 'AF_UNIX'), (2, 'node1', 'AF_INET'), (3, 'node1', 'AF_INET')]"
    said = [line.removeprefix("[node0:0] ") for line in read_until(process, 2)]
    assert said == [expected, "here"], finish(process).err
    process.send_signal(signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL


def test_workers_under_slurm(slurm: Slurm, tmp_path: Path) -> None:
    """srun starts an agent on each node."""
    with jobs(slurm.hosts, slurm.environ, tmp_path, patience_s=20) as job:
        run = (sys.executable, "-m", "allranks", "run", "--nproc-per-node", "2", "--mode", "master")
        command = ("srun", "-N2", "--ntasks-per-node=1", *run, job.write(MASTER))
        done = finish(job.start_any(0, *command, torch=True, **PATHS))
    assert done.code == 0, done.err
    expected = "[(1, 'node0', 'AF_UNIX'), (2, 'node1', 'AF_INET'), (3, 'node1', 'AF_INET')]"
    assert done.lines == [f"[node0:0] {expected}", "[node0:0] here"]


TRAINING = """
    import os, signal
    import torch
    import allranks as ar

    mw = ar.init_master_worker(hosts="node0:1,node1:1,node2:1", timeout=60)
    print([line.host for line in mw.connections.by_rank.values()])

    def train(first, second):
        torch.manual_seed(1)
        a, b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        a, b = a.to(first), b.to(second)
        optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=0.1)
        x = torch.arange(32.0).reshape(4, 8).to(first)
        for _ in range(3):
            loss = b(a(x).relu().to(second)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    assert train("worker:1", "worker:3") == train("cpu", "cpu")

    large = torch.randn(1 << 20)
    assert torch.equal(large.to("worker:2").to("worker:3").cpu(), large)

    group = mw.group([1, 2, 3])
    parts = group.scatter(torch.arange(6.0))
    ar.all_reduce_(parts)
    assert group.gather(parts).tolist() == [6.0, 9.0] * 3
    print(mw.remote(os.uname, on=3)().result().nodename, mw.remote(os.uname, on=1)().result().nodename)

    mw.remote(os.kill, on=2)(mw.remote(os.getpid, on=2)().result(), signal.SIGKILL)
    try:
        torch.ones(1, device="worker:2").item()
    except ar.WorkerLost as error:
        print(str(error).partition(" (")[0], "killed" in str(error))
    assert torch.ones(1, device="worker:3").item() == 1
    mw.respawn(2)
    assert large.to("worker:2").to("worker:3").sum().item() == large.sum().item()

    mw.on_lost("respawn")
    x, y = torch.ones(1 << 20, device="worker:1"), torch.ones(4, device="worker:3")
    both = mw.group([1, 3]).scatter(torch.zeros(2))
    kept = ar.keep(x, y, both)
    kept.refresh()
    for rank in (3, 1):
        x.add_(1), y.add_(1), both.add_(1)
        snapshot = kept.refresh()
        mw.synchronize()
        x.zero_()
        mw.remote(os.kill, on=rank)(mw.remote(os.getpid, on=rank)().result(), signal.SIGKILL)
        try:
            while True:
                mw.synchronize()
        except ar.WorkerReplaced as error:
            print(error.rank, error.snapshot == snapshot, x.min().item(), x.max().item(), y.tolist())
            print(both.shard(1).tolist(), both.shard(3).tolist())
    mw.shutdown()
    print("done")
"""


def test_training_on_several_hosts(job: Jobs) -> None:
    """Results bit-identical to a local run, copies between hosts, a replaced worker, and kept tensors."""
    done = finish(job.start_any(0, sys.executable, job.write(TRAINING), torch=True, **PATHS))
    assert done.out.splitlines() == [
        "['node0', 'node1', 'node2']",
        "node2 node0",
        "worker 2 True",
        "3 True 2.0 2.0 [2.0, 2.0, 2.0, 2.0]",
        "[1.0] [1.0]",
        "1 True 3.0 3.0 [3.0, 3.0, 3.0, 3.0]",
        "[2.0] [2.0]",
        "done",
    ], done.err
    assert done.code == 0
