"""Wait reports and ``allranks trace show`` in a job on two hosts, through a real sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, jobs
from support.sshd import Ssh

PROGRAM = """
    import os, signal, sys, time
    import torch
    import allranks as dist

    def load(how):
        if how == "sleep": time.sleep(1000)
        if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if how == "loop": max(iter(int, 1))
        if how == "gone": os._exit(0)
        if how == "branch": dist.recv(torch.ones(1), 0)

    dist.init_process_group(timeout=50)
    for step in range(4):
        time.sleep(0.06)
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 2 and step == 2:
            load(sys.argv[1])
    dist.barrier()
"""
CALL = "all_reduce #4 (script.py:16, shape (4,))"
WAITED = f"allranks run: ranks 0-1 have waited N s in {CALL} for rank 2 (node1), "
TELLS = {
    "sleep": WAITED + "which is at script.py:7 in load; its process is sleeping, in a timer",
    "stop": WAITED + "whose process is stopped, after all_reduce #3 (script.py:16, shape (4,))",
    "loop": WAITED + "which is at script.py:9 in load; its process is running",
    "gone": "allranks.PeerLostError: all_reduce on group 'world' (rank 0 of 3): rank 2 (node1, pid N) died.",
    "branch": f"allranks run: deadlock: ranks 0, 2 have waited for each other for N s: rank 0 in {CALL} for rank 2; "
    "rank 2 in recv from rank 0 (script.py:11, shape (1,)) for rank 0",
}


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def told(process: subprocess.Popen[bytes], start: str) -> str:
    """Return the first line of stderr that begins with this text, with N in place of numbers."""
    assert process.stderr is not None
    for raw in process.stderr:
        line = re.sub(r"pid \d+", "pid N", raw.decode().rstrip("\n"))
        line = re.sub(r"^(allranks.PeerLostError: all_reduce)(?: #\d)?( on group 'world' \(rank) \d", r"\1\2 0", line)
        line = re.sub(r"(for|waited) \d+ s\b", r"\1 N s", line)
        if line.startswith(start):
            return line
    raise AssertionError(f"no line began with {start!r}")


@pytest.mark.parametrize("how", TELLS)
def test_programs_that_hang(job: Jobs, how: str) -> None:
    script = job.write(PROGRAM)
    words = ["-n", "3", "-H", "node0:2,node1", "--notice-after", "1", "--grace", "0.5"]
    process = job.start(0, *words, script, how, torch=True)
    try:
        assert told(process, TELLS[how][:32]) == TELLS[how]
        if how == "sleep":
            shown = [show(job, host) for host in (0, 1)]
            assert shown[0]["launcher"] == shown[1]["launcher"] == process.pid
            for answer in shown:
                assert answer["hosts"] == ["node0", "node0", "node1"]
                assert [state["rank"] for state in answer["states"]] == [0, 1, 2]
                assert answer["places"] == {"2": "script.py:7 in load"}
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30)


def show(job: Jobs, host: int) -> dict[str, object]:
    words = [sys.executable, "-m", "allranks", "trace", "show", "--json"]
    done = subprocess.run(job.hosts.hosts[host].inside(*words), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_trace_show_of_many_ranks(job: Jobs) -> None:
    """24 ranks on 3 hosts without torch. They have no group, but are shown."""
    script = job.write("import time; print('up', flush=True); time.sleep(100)")
    process = job.start(0, "-n", "24", "-H", "node0:8,node1:8,node2:8", "--show", "none", script)
    try:
        for _ in range(100):
            time.sleep(0.2)
            words = [sys.executable, "-m", "allranks", "trace", "show", "--json"]
            done = subprocess.run(job.hosts.hosts[0].inside(*words), capture_output=True, text=True, timeout=30)
            answer = json.loads(done.stdout) if done.returncode == 0 else {"places": {}}
            if list(answer["places"].values()) == ["script.py:1 in <module>"] * 24:  # all ranks have reached the sleep
                break
        else:
            pytest.fail(done.stdout + done.stderr)
        assert [state["rank"] for state in answer["states"]] == list(range(24))
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
