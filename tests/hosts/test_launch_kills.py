"""Random parts of random jobs are killed at random moments; nothing may be left of the job: process, port or file.

ALLRANKS_TEST_KILLS says how many (10), ALLRANKS_TEST_KILLS_SEED which; a seed replays its choices, not its moments.
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
# Ranks with a child of their own, that meet, and work.
SCRIPT = """
    import subprocess, time
    import allranks
    subprocess.Popen(["sleep", "100"])
    print("up", flush=True)
    time.sleep(100)
"""
# What a victim's command line has. A rank that was forked looks like its agent or launcher.
VICTIMS = ("-m allranks run", "ssh -F", "agents.serve", "sshd: root@notty", "script.py")


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def ports(job: Jobs) -> set[str]:
    """What is listened on, on any of the hosts."""
    found = set()
    for host in job.hosts.hosts:
        done = subprocess.run(host.inside("cat", "/proc/net/tcp", "/proc/net/tcp6"), capture_output=True, text=True)
        lines = [line.split() for line in done.stdout.splitlines()]
        found |= {f"{host.name} {words[1]}" for words in lines if len(words) > 3 and words[3] == "0A"}
    return found


def files() -> set[str]:
    """What jobs may leave in folders that all share."""
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


def test_nothing_is_left(job: Jobs) -> None:
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
            if command.poll() is None:  # what was killed was of no matter (a guard), or a rank that is not missed
                command.send_signal(signal.SIGTERM)
        codes = [finish(command, 30).code for command in commands]
        left = job.left()
        assert not left, f"{where}: {victim} ({line}) of {[c.args[6:] for c in commands]}, {codes}: {left}"  # type: ignore[index]
        assert 0 not in codes, f"{where}: {victim} ({line}), {codes}"
        assert ports(job) == listening, where
        lost = files() - lying
        until = time.monotonic() + 30
        while lost & files():  # what tests beside this one had at that moment goes by itself
            assert time.monotonic() < until, f"{where}: {lost}"
            time.sleep(0.05)
