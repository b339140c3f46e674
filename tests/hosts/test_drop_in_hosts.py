"""Commands of torchrun and torch.distributed.launch as users type them, on hosts whose own name is 127.0.1.1."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.jobs import Done, Jobs, finish, jobs
from support.slurm import Slurm

GLOO = """
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    os.write(1, f"{os.environ['LOCAL_RANK']} of {dist.get_rank()}: {total.item():.0f}\\n".encode())
"""

# A script in the style of torch 1, without torch.
HELLO = """
    import argparse
    import os

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    assert args.local_rank == int(os.environ["LOCAL_RANK"])
    where = "http://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    print(f"[{where}] hello from {args.backend} process {os.environ['RANK']}/{os.environ['WORLD_SIZE']}")
"""

HELPER = """
    hosts=(`scontrol show hostnames`)
    master_addr=${hosts[0]}
    key=${SLURM_JOB_ID: -4}
    master_port=$((15000 + key))

    PYTHON -m allranks.launch --master_addr $master_addr \\
                              --master_port $master_port \\
                              --nnodes $SLURM_NNODES \\
                              --node_rank $SLURM_NODEID \\
                              --nproc_per_node 2 \\
                              helloworld.py
"""


@pytest.fixture
def made(three_hosts: Cluster, tmp_path: Path) -> Iterator[Jobs]:

    with jobs(three_hosts, os.environ, tmp_path) as made:
        yield made


def together(made: Jobs, hosts: list[int], command: str, *lines: str, torch: bool = False) -> list[Done]:
    """Run one command line on each host simultaneously."""
    started = [
        made.start_any(host, sys.executable, "-m", *command.split(), *line.split(), torch=torch)
        for host, line in zip(hosts, lines, strict=True)
    ]
    return [finish(process) for process in started]


def said(dones: list[Done]) -> list[str]:
    """Return the stdout lines of the ranks without prefixes, sorted."""
    assert all(done.code == 0 for done in dones), dones
    return sorted(re.sub(r"^\[.*?\] ", "", line, count=1) for done in dones for line in done.out.splitlines())


def test_torchrun_with_a_master_address(made: Jobs, three_hosts: Cluster) -> None:
    """Comparison: torchrun's own ranks fail with gloo here (connect [127.0.1.1]: Connection refused)."""
    made.write(GLOO, "start.py")
    first = three_hosts.hosts[0].address
    line = f"--nproc_per_node=2 --master_addr {first} --master_port 15432 --nnodes 2 --node_rank {{}} start.py"
    dones = together(made, [0, 1], "allranks torchrun", line.format(0), line.format(1), torch=True)
    assert said(dones) == ["0 of 0: 10", "0 of 2: 10", "1 of 1: 10", "1 of 3: 10"]
    assert [sorted(re.findall(r"of (\d)", done.out)) for done in dones] == [["0", "1"], ["2", "3"]]


def test_torchrun_with_c10d(made: Jobs, three_hosts: Cluster) -> None:
    """Endpoint by address, for which torchrun's own agents would all wait for each other."""
    made.write("import os; print(os.environ['GROUP_RANK'], os.environ['RANK'], os.environ['TORCHELASTIC_RUN_ID'])")
    line = f"--nnodes 3 --rdzv-backend c10d --rdzv-endpoint {three_hosts.hosts[1].address} --rdzv-id a script.py"
    dones = together(made, [0, 1, 2], "allranks torchrun", line, line, line)
    assert said(dones) == ["0 0 a", "1 1 a", "2 2 a"]
    assert dones[1].out.split()[-3:] == ["0", "0", "a"]


def test_launch_on_one_machine_and_on_two(made: Jobs) -> None:
    made.write(HELLO, "helloworld.py")
    lines = [f"--nnodes 2 --nproc_per_node 4 --node_rank {node} helloworld.py --backend=gloo" for node in (0, 1)]
    hello = [f"hello from gloo process {rank}/8" for rank in range(8)]
    here = [f"[http://127.0.0.1:29500] {text}" for text in hello]
    assert said(together(made, [0, 0], "allranks.launch", *lines)) == here
    there = [f"[http://node0:29500] {text}" for text in hello]
    lines = [f"--master_addr node0 {line}" for line in lines]
    assert said(together(made, [0, 1], "allranks.launch", *lines)) == there


def test_launch_commands_under_slurm(slurm: Slurm, tmp_path: Path) -> None:

    with jobs(slurm.hosts, {**os.environ, **slurm.environ}, tmp_path) as made:
        made.write(HELLO, "helloworld.py")
        made.write(HELPER.replace("PYTHON", sys.executable), "slurm_multinode_helper.sh")
        words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "bash", "slurm_multinode_helper.sh"]
        done = finish(made.start_any(0, *words))
        alone = [*words[:3], sys.executable, "-m", "allranks.launch", "--nproc_per_node", "2", "helloworld.py"]
        single = finish(made.start_any(0, *(word.replace("nodes=2", "nodes=1") for word in alone)))
    hello = "[http://127.0.0.1:29500] hello from nccl process"
    assert said([single]) == [f"{hello} 0/2", f"{hello} 1/2"]
    ports = set(re.findall(r"\[http://node0:(\d+)\]", done.out))
    assert len(ports) == 1
    assert 15000 <= int(ports.pop()) < 25000
    assert sorted(re.findall(r"hello from nccl process \S+", done.out)) == [
        f"hello from nccl process {rank}/4" for rank in range(4)
    ], done


def test_missing_master_address_is_reported(made: Jobs) -> None:
    made.write("")
    line = "--nnodes 2 --node_rank 1 --rdzv-conf timeout=1 script.py"
    (done,) = together(made, [1], "allranks torchrun", line)
    assert done.code == 2
    assert done.err.startswith("allranks torchrun: error: found no launcher at 127.0.0.1:29500")
    assert "This is the address of this host. If host 0 is another host, pass --master-addr." in done.err
