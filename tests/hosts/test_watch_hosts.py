"""Reports of waits on torch's gloo between two hosts: a late rank, a rank that holds the GIL, a host that is cut off.

The ranks are started one by one with the variables of env://, as srun or a script does. Rank 0 serves torch's store.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster

PROGRAM = """
import os, re, signal, sys, time
import torch
import torch.distributed as dist

def load(how):
    if how == "sleep": time.sleep(60)
    if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if how == "gil": re.match("(a+)+$", "a" * 64 + "b")

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
os.write(1, b"up\\n")  # in one piece: the ranks share a file
if dist.get_rank() == 2:
    load(sys.argv[1])
if sys.argv[1] == "cut":
    time.sleep(1)
dist.all_reduce(torch.ones(4))
"""
VARIABLES = {
    "WORLD_SIZE": "3",
    "MASTER_PORT": "29555",
    "GLOO_SOCKET_IFNAME": "eth0",
    "ALLRANKS_WATCH": "1",
    "ALLRANKS_NOTICE_AFTER": "5s",
    "OMP_NUM_THREADS": "1",
}
WAITED = (
    r"allranks watch: ranks 0-1 have waited \d+ s in all_reduce #2 \(script.py:18 in <module>\) for rank 2 \(node1\), "
)


@pytest.fixture
def start(three_hosts: Cluster, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that starts three ranks, and returns the file with the output of all."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "script.py").write_text(PROGRAM)

    def start(how: str) -> Path:
        with (tmp_path / "output").open("ab") as output:
            for rank, host in enumerate((0, 0, 1)):
                place = three_hosts.hosts[host]
                environ = os.environ | VARIABLES | {"RANK": str(rank), "MASTER_ADDR": three_hosts.hosts[0].address}
                environ["ALLRANKS_WATCH_FOLDER"] = str(tmp_path)
                command = place.inside("env", "-C", str(tmp_path), sys.executable, "script.py", how)
                started.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
        return tmp_path / "output"

    yield start
    for each in started:
        each.kill()
        each.wait()


def wait_for(output: Path, pattern: str) -> str:
    """Return the first match of a pattern, which ends with a newline: a line may be incomplete."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := re.search(pattern, output.read_text(), re.MULTILINE):
            return found[0].rstrip("\n")
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} in {output.read_text()}")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sleep", "which is at script.py:7 in load; its process is sleeping, in a timer"),
        ("stop", "which does not answer, because it is stopped or a thread holds the GIL"),
        ("gil", "which does not answer, because it is stopped or a thread holds the GIL"),
    ],
)
def test_late_rank_on_another_host_is_named(start: Callable[[str], Path], how: str, said: str) -> None:
    line = wait_for(start(how), r"^allranks watch: .* waited .*\n")
    assert re.fullmatch(WAITED + re.escape(said), line), line


def test_host_that_is_cut_off_is_named(three_hosts: Cluster, start: Callable[[str], Path]) -> None:
    output = start("cut")
    wait_for(output, r"(?s)up\n.*up\n.*up\n")
    three_hosts.cut(1)
    try:
        line = wait_for(output, r"^allranks watch: .* waited .*\n")
        assert "for rank 2 (node1), which cannot be reached" in line
    finally:
        three_hosts.plug(1)
