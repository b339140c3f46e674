"""Master-worker mode on several hosts: workers that the master starts by ssh, and those of ``allranks run``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import SOURCE, Jobs, finish, jobs, read_until
from sshd import Ssh

REMOTE = Path(__file__).parents[1] / "remote"
PATHS = {"PYTHONPATH": f"{SOURCE}:{REMOTE}"}

MASTER = """
    import os, sys, time
    import torch
    from allranks.remote.meet import gather_workers

    workers = gather_workers(hosts=(sys.argv[1:] or [None])[0], serve="stand_in:serve", timeout_s=60)
    lines = workers.lines
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
    workers.respawn(3)
    assert group("new", 0, 2, 3) == ["[5.0, 5.0]"] * 2
    lines[1].socket.sendall(b"sleep")
    print("here", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


@pytest.mark.parametrize("way", ["hosts", "mode"])
def test_workers_of_other_hosts(job: Jobs, way: str) -> None:
    """Groups between any of them, another worker in a lost one's place, and the end of all by the master's."""
    script = job.write(MASTER)
    if way == "hosts":
        process = job.start_any(0, sys.executable, script, "node0:1,node1:1,node2:1", torch=True, **PATHS)
        expected = "[(1, 'node0', 'AF_UNIX'), (2, 'node1', 'AF_INET'), (3, 'node2', 'AF_INET')]"
    else:
        process = job.start(0, "--mode", "master", "-H", "node0:2,node1:2", script, torch=True, **PATHS)
        expected = "[(1, 'node0', 'AF_UNIX'), (2, 'node1', 'AF_INET'), (3, 'node1', 'AF_INET')]"
    said = [line.removeprefix("[node0:0] ") for line in read_until(process, 2)]
    assert said == [expected, "here"], finish(process).err
    process.send_signal(signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL
