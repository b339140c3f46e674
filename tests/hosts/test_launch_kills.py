"""Random processes of random jobs are killed at random moments; no process, port or file of the job may remain.

ALLRANKS_TEST_KILLS sets the number of kills (10), and ALLRANKS_TEST_KILLS_SEED sets the seed. A seed repeats the
choices, but not the exact moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, finish, jobs
from support.sshd import Ssh

KILLS = int(os.environ.get("ALLRANKS_TEST_KILLS", "10"))
SEED = int(os.environ.get("ALLRANKS_TEST_KILLS_SEED", str(random.randrange(1_000_000))))
# Ranks that start a child process and sleep.
SCRIPT = """
    import subprocess, time
    import allranks
    subprocess.Popen(["sleep", "100"])
    print("up", flush=True)
    time.sleep(100)
"""
# Parts of the victims' command lines. A forked rank has the command line of its agent or launcher.
VICTIMS = ("-m allranks run", "ssh -F", "agents.serve", "sshd: root@notty", "script.py")


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def ports(job: Jobs) -> set[str]:
    """Return the listening ports of all hosts."""
    found = set()
    for host in job.hosts.hosts:
        done = subprocess.run(host.inside("cat", "/proc/net/tcp", "/proc/net/tcp6"), capture_output=True, text=True)
        lines = [line.split() for line in done.stdout.splitlines()]
        found |= {f"{host.name} {words[1]}" for words in lines if len(words) > 3 and words[3] == "0A"}
    return found


def files() -> set[str]:
    """Return the files of jobs in folders that all hosts share."""
    names = {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*allranks*")}
    return {
        name for name in names if not name.startswith(("/tmp/allranks-hosts", "/tmp/allranks-ss", "/tmp/allranks-sl"))
    }


def start(job: Jobs, choice: random.Random, script: str) -> list[subprocess.Popen[bytes]]:
    words = ["--start", choice.choice(["fork", "spawn"]), "--grace", "1"]
    words += choice.choice([[], ["--elastic", "1"]])
    kind = choice.choice(["here", "ssh", "ssh", "ssh", "elastic", "among", "spare"])
    if kind == "here":
        return [job.start(0, "-n", "3", *words, script)]
    if kind == "ssh":
        return [job.start(2, "-H", "node0:2,node1", *words, script)]
    if kind == "spare":
        spare = ["--elastic", "1", "--spares", "1"]
        return [job.start(2, "-H", "node0:2,node1,node2", *spare, *words, script)]
    if kind == "elastic":
        return [job.start(0, "-N", "2:3", "-H", "node0,node1", "--join-timeout", "1", *words, script)]
    common = ["-N", "2", "--master-addr", "node0:15999", "--join-timeout", "10", *words, script]
    return [job.start(node, "--node-rank", str(node), *common) for node in (0, 1)]


def test_killed_job_leaves_no_process_port_or_file(job: Jobs) -> None:
    choice = random.Random(SEED)
    script = job.write(SCRIPT)
    listening, lying = ports(job), files()
    for number in range(KILLS):
        where = f"kill {number} of seed {SEED}"
        commands = start(job, choice, script)
        time.sleep(choice.choice([0.05, 0.2, 0.5, 1.0, 1.5]) * choice.random() + 0.05)
        words = choice.choice(VICTIMS)
        candidates = sorted(pid for pid, line in job.new_processes().items() if words in line)
        victim = choice.choice(candidates) if candidates else commands[0].pid
        line = job.new_processes().get(victim, "gone")
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            line = "gone"
        until = time.monotonic() + 4
        while any(command.poll() is None for command in commands) and time.monotonic() < until:
            time.sleep(0.02)
        for command in commands:
            if command.poll() is None:  # the victim was a guard, or a rank that the job does not need
                command.send_signal(signal.SIGTERM)
        codes = [finish(command, 30).code for command in commands]
        left = job.left()
        assert not left, f"{where}: {victim} ({line}) of {[c.args[6:] for c in commands]}, {codes}: {left}"  # type: ignore[index]
        assert 0 not in codes, f"{where}: {victim} ({line}), {codes}"
        assert ports(job) == listening, where
        lost = files() - lying
        until = time.monotonic() + 30
        while lost & files():  # files of concurrent tests disappear when these tests finish
            assert time.monotonic() < until, f"{where}: {lost}"
            time.sleep(0.05)
