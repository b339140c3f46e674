"""``allranks run -H ...``: one command starts ranks on several hosts through a real sshd."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, finish, jobs, read_until
from support.prompt import COMMAND_S
from support.sshd import Ssh

SAY_WHERE = """
    import json, os, socket, sys
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    place = {name: os.environ.get(name) for name in names}
    more = {"host": socket.gethostname(), "folder": os.getcwd(), "prefix": sys.prefix, "x": os.environ.get("X_GIVEN")}
    print(json.dumps(place | more | {"path": os.environ["PATH"].split(":")[0], "argv": sys.argv[1:]}))
"""
WAIT = """
    import time
    print("up", flush=True)
    time.sleep(100)
"""
FAIL_AT_2 = """
    import os, sys, time
    print("up", flush=True)
    if os.environ["RANK"] == "2":
        time.sleep(0.3)
        raise ValueError("boom of rank 2")
    time.sleep(100)
"""
FIRST_ROUND_FAILS = """
    import os, pathlib, signal, socket, time
    round, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    print(f"round {round} {rank} {os.environ['WORLD_SIZE']} {socket.gethostname()}", flush=True)
    said = pathlib.Path(__file__).with_name("said")
    if rank == "0":
        said.touch()
    elif round == 0:
        while not said.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(round == 0 and 100)
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def test_ranks_receive_rank_variables_folder_and_arguments(job: Jobs) -> None:
    done = job.run(
        *(2, "-v", "-n", "3", "-H", "node0:2,node1:2", "-x", "X_GIVEN=a b", job.write(SAY_WHERE), "it's", "two words"),
    )
    assert done.code == 0, done.err
    said = {int(line["RANK"]): line for line in (json.loads(text.partition("] ")[2]) for text in done.lines)}
    told = [line.partition(" s: ")[2] for line in done.err.splitlines()]
    assert told[:2] == ["detected no scheduler and no other launcher", "hosts: node0:2, node1:2, by ssh"]
    for words in (
        "starting ssh ",
        "node1 connected: python ",
        "the store is at tcp:10.77.0.1:",
        "node1 starts rank 2",
    ):
        assert any(line.startswith(words) for line in told), done.err
    assert sorted(line[:6] for line in told if line.endswith("exited with code 0")) == ["rank 0", "rank 1", "rank 2"]
    assert [said[rank]["host"] for rank in range(3)] == ["node0", "node0", "node1"]
    assert [said[rank]["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [said[rank]["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]
    assert [said[rank]["GROUP_RANK"] for rank in range(3)] == ["0", "0", "1"]
    for line in said.values():
        assert (line["WORLD_SIZE"], line["MASTER_ADDR"], line["GLOO_SOCKET_IFNAME"]) == ("3", "10.77.0.1", "eth0")
        # the same virtual environment and folder
        assert (line["folder"], line["prefix"]) == (str(job.folder), sys.prefix)
        assert line["path"] == os.path.dirname(sys.executable)
        assert (line["x"], line["argv"]) == ("a b", ["it's", "two words"])


@pytest.mark.parametrize("module", ["allranks", "torch.distributed"])
def test_ranks_form_a_group(job: Jobs, module: str) -> None:
    """Groups of allranks and of torch's gloo. Each host resolves its own name to 127.0.1.1."""
    script = f"""
        import torch, {module} as dist
        dist.init_process_group({'"gloo"' if module != "allranks" else ""})
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        print(int(tensor), dist.get_rank())
        dist.destroy_process_group()
    """
    done = job.run(0, "-n", "3", "-H", "node0:1,node1:2", job.write(script), torch=True)
    assert (done.code, done.lines) == (0, ["[node0:0] 3 0", "[node1:1] 3 1", "[node1:2] 3 2"]), done.err


def test_a_failure_stops_all_hosts_and_is_named(job: Jobs) -> None:
    process = job.start(2, "-n", "3", "-H", "node0,node1,node2", "--grace", "60", job.write(FAIL_AT_2))
    read_until(process, 3)
    began = time.monotonic()
    done = finish(process)
    assert time.monotonic() - began < COMMAND_S  # the target is 2 s
    assert done.code == 1
    assert "allranks run: rank 2 (host node2, pid " in done.err
    assert "exited with code 1" in done.err
    assert "ValueError: boom of rank 2" in done.err


def test_a_killed_rank_is_named_by_its_signal(job: Jobs) -> None:
    script = job.write(WAIT + "\n    # rank")
    process = job.start(0, "-n", "2", "-H", "node0,node1", "--start", "spawn", script)
    read_until(process, 2)
    (victim,) = job.on(1, "ranks.rank")
    os.kill(victim, signal.SIGKILL)
    done = finish(process)
    assert done.code == 137
    assert f"rank 1 (host node1, pid {victim}) was killed by SIGKILL" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_hosts(job: Jobs, number: int) -> None:
    process = job.start(2, "-n", "2", "-H", "node0,node1", job.write(WAIT))
    read_until(process, 2)
    process.send_signal(number)
    done = finish(process)
    assert done.code == 128 + number
    if number == signal.SIGINT:
        assert "at script.py:4" in done.err  # the other rank can still be in print


@pytest.mark.parametrize("victim", ["launcher", "ssh", "agent", "sshd"])
def test_killed_part_of_a_job_leaves_no_processes(job: Jobs, victim: str) -> None:
    process = job.start(2, "-n", "2", "-H", "node0,node1", job.write(WAIT))
    read_until(process, 2)
    words = {"launcher": "-m allranks run", "ssh": "ssh -F", "agent": "agents.serve", "sshd": "sshd: root@notty"}
    pids = job.on(2 if victim in ("launcher", "ssh") else 1, words[victim])
    os.kill(max(pids) if victim != "agent" else min(pids), signal.SIGKILL)
    done = finish(process)
    if victim != "launcher":
        assert done.code == 255
        assert "its agent has terminated (ssh: " in done.err
    assert not job.left()


def test_all_unreachable_hosts_are_reported_together(job: Jobs) -> None:
    script = job.write("print('must not run')")
    done = job.run(0, "-n", "3", "-H", "node0,nowhere1,nowhere2", script)
    assert (done.code, done.out) == (2, "")
    assert "nowhere1: ssh cannot connect: " in done.err
    assert "nowhere2: ssh cannot connect: " in done.err


def test_refused_ssh_key_is_reported(job: Jobs, ssh: Ssh) -> None:
    key = job.folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config = job.folder / "config"
    config.write_text(ssh.config.read_text().replace(f"IdentityFile {ssh.folder}/id", f"IdentityFile {key}"))
    client = shutil.which("ssh")  # not the ssh of the fixture, which adds its own configuration
    done = job.run(0, "-H", "node1", "--ssh", f"{client} -F {config}", job.write(WAIT))
    assert (done.code, done.out) == (2, "")
    assert "node1: " in done.err
    assert "Permission denied" in done.err


def test_missing_script_or_interpreter_on_another_host_is_reported(job: Jobs) -> None:
    """The other host first lacks the folder of the script, then the interpreter."""
    folder = job.folder / "here"
    folder.mkdir()
    (folder / "script.py").write_text("print('must not run')")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder / "venv"], check=True)
    host = job.hosts.hosts[1]
    subprocess.run(host.inside("mkdir", "-p", "/tmp/empty-of-the-tests"), check=True)
    subprocess.run(host.inside("mount", "--bind", "/tmp/empty-of-the-tests", str(folder)), check=True)
    try:
        done = job.run(0, "-H", "node0,node1", "--chdir", str(job.folder), str(folder / "script.py"))
        assert (done.code, done.out) == (2, "")
        assert f"node1: cannot find script '{folder}/script.py'" in done.err
        site = folder / "venv" / "lib"
        packages = next(site.glob("python*")) / "site-packages"
        (packages / "more.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
        python = str(folder / "venv" / "bin" / "python")
        done = finish(job.start_any(0, python, "-m", "allranks", "run", "-H", "node0,node1", job.write("")))
        assert (done.code, done.out) == (2, "")
        assert f"node1: cannot run the interpreter {python}" in done.err
    finally:
        subprocess.run(host.inside("umount", str(folder)), check=True)
        os.rmdir("/tmp/empty-of-the-tests")


def test_failed_job_is_restarted(job: Jobs) -> None:
    done = job.run(0, "-n", "2", "-H", "node0,node1", "--restarts", "1", job.write(FIRST_ROUND_FAILS))
    assert done.code == 0, done.err
    assert done.lines == [
        "[node0:0] round 0 0 2 node0",
        "[node0:0] round 1 0 2 node0",
        "[node1:1] round 0 1 2 node1",
        "[node1:1] round 1 1 2 node1",
    ]
    assert "rank 1 (host node1, pid " in done.err
    assert "restarting on node0, node1" in done.err


def test_elastic_job_continues_with_fewer_hosts_and_readmits_a_host(job: Jobs) -> None:
    script = """
        import os, sys, time
        round = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("round", round, os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
        time.sleep(100 if round != "2" else 0)
    """
    process = job.start(2, "-N", "1:2", "-H", "node0,node1", "--grace", "2", job.write(script))
    assert sorted(read_until(process, 2)) == ["[node0:0] round 0 0 2", "[node1:1] round 0 1 2"]
    os.kill(min(job.on(1, "agents.serve")), signal.SIGKILL)
    assert read_until(process, 1) == ["[node0:0] round 1 0 1"]
    done = finish(process)
    assert done.code == 0, done.err
    assert done.lines == ["[node0:0] round 2 0 2", "[node1:1] round 2 1 2"]
    assert "allranks run: node1 has joined" in done.err


def test_host_without_network_is_detected(job: Jobs) -> None:
    """The host is disconnected from the network, so no process receives a notification."""
    quick = "ssh -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    process = job.start(0, "-n", "2", "-H", "node0,node1", "--ssh", quick, job.write(WAIT))
    read_until(process, 2)
    agents = job.on(1, "agents.serve")
    job.hosts.cut(1)
    try:
        done = finish(process)
        assert done.code == 255
        assert "node1: its agent has terminated" in done.err
    finally:
        job.hosts.plug(1)
        for pid in agents:
            # without this, it exits only after the TCP timeout of its kernel, many minutes later
            os.kill(pid, signal.SIGKILL)


def test_elastic_job_starts_without_an_unreachable_host(job: Jobs) -> None:
    done = job.run(0, "-N", "1:2", "-H", "node0,nowhere", job.write("import os; print(os.environ['WORLD_SIZE'])"))
    assert (done.code, done.lines) == (0, ["[node0:0] 1"]), done.err
    assert "nowhere: ssh cannot connect" in done.err
    assert "continuing without it" in done.err


def test_elastic_job_starts_without_a_host_that_cannot_start_its_ranks(job: Jobs) -> None:
    """The folder of the script is empty on that host."""
    folder = job.folder / "here"
    folder.mkdir()
    (folder / "script.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    host = job.hosts.hosts[1]
    subprocess.run(host.inside("mount", "-t", "tmpfs", "none", str(folder)), check=True)
    try:
        done = job.run(0, "-N", "1:2", "-H", "node0,node1", "--chdir", str(job.folder), str(folder / "script.py"))
    finally:
        subprocess.run(host.inside("umount", str(folder)), check=True)
    assert (done.code, done.lines) == (0, ["[node0:0] 1"]), done.err
    assert "node1: cannot find script" in done.err


def test_too_many_ranks_for_the_minimum_of_hosts_are_refused(job: Jobs) -> None:
    done = job.run(0, "-N", "1:2", "-n", "4", "-H", "node0:2,node1:2", job.write(""))
    assert done.code == 2
    assert "with 1 remaining host (-N): 4 ranks do not fit: node0 has 2 slots" in done.err


def test_output_of_a_login_shell_is_reported(job: Jobs) -> None:
    """Without a check, the launcher would parse the banner as the length of a message and wait for the message."""
    talking = job.folder / "talking"
    talking.write_text('#!/bin/sh\necho Welcome to this host\nexec ssh "$@"\n')
    talking.chmod(0o755)
    done = job.run(0, "-H", "node1", "--ssh", str(talking), job.write(""))
    assert done.code == 2
    assert "node1: " in done.err
    assert "Welcome to this host" in done.err
    assert ".bashrc" in done.err


@pytest.mark.parametrize("why", ["signal", "failure"])
def test_frozen_agent_does_not_delay_the_exit(job: Jobs, why: str) -> None:
    """The test shortens the limits, which are 13 s in total."""
    quick = """
        import sys
        from allranks.launch import cli
        from allranks.launch.agents import agent_pool
        from allranks.launch.policy import round
        agent_pool._FINISH_S = round.KILLED_S = 0.5
        sys.exit(cli.main())
    """
    script = """
        import os, sys, time
        print("up", flush=True)
        while os.environ["RANK"] == "1" or not os.path.exists("fail"):
            time.sleep(0.05)
        sys.exit(3)
    """
    words = (job.write(quick, "quick.py"), "-H", "node0,node1", "--grace", "0.5", job.write(script))
    process = job.start_any(0, sys.executable, *words)
    read_until(process, 2)
    agents = job.on(1, "agents.serve")
    agent = min(agents)
    os.kill(agent, signal.SIGSTOP)
    try:
        if why == "signal":
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
        else:
            (job.folder / "fail").touch()
        done = finish(process, 30)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert done.code == (130 if why == "signal" else 3)
    assert "allranks run: node1: its agent did not reply within 0.5 s" in done.err
    assert not job.left()


LATE = """
import time, torch, allranks as dist
dist.init_process_group()
for _ in range(50):
    time.sleep(0.02 * (dist.get_rank() == 1))
    dist.all_reduce(torch.ones(10))
"""


def test_stats_table_contains_the_calls_of_all_hosts(job: Jobs) -> None:
    done = job.run(0, "-n", "2", "-H", "node0,node1", "--stats", job.write(LATE), torch=True)
    assert done.code == 0, done.err
    assert re.search(r"^allranks run: 2 ranks, [\d.]+ s, \d+% of it in calls$", done.err, re.M), done.err
    assert re.search(r"^  all_reduce +100 ", done.err, re.M), done.err
    assert re.search(r"warning: rank 1 \(node1\) arrived last in \d+ of \d+ calls of group 'world'", done.err), done.err
