"""``allranks run --elastic`` on several hosts: ranks restart on their host, and jobs survive the loss of a host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Jobs, finish, jobs, read_until
from support.slot_watch import SLOT_WATCH
from support.sshd import Ssh

KILLED = """
import socket
say("start", start, socket.gethostname(), os.environ["MASTER_ADDR"])
if rank == 2 and start == 0:
    die()
wait_for(2, 1, "running")
"""
HOST_LOST = """
say("up")
wait_for(2, 0, "gone")
wait_for(3, 0, "gone")
say("end")
"""


@pytest.fixture
def job(ssh: Ssh, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(ssh.hosts, ssh.environ, tmp_path) as made:
        yield made


def without_pids(text: str) -> list[str]:
    return [re.sub(r"pid \d+", "pid N", line).removeprefix("allranks run: ") for line in text.splitlines()]


def test_killed_rank_is_restarted_on_its_host(job: Jobs) -> None:
    done = job.run(2, "-H", "node0:2,node1:2", "--elastic", "3", job.write(SLOT_WATCH + KILLED))
    again = ["rank 2 (host node1, pid N) was killed by SIGKILL; restarted (1 of 3)"]
    assert (done.code, without_pids(done.err)) == (0, again)
    leader = job.hosts.hosts[0].address
    assert done.lines == [
        f"[node0:0] start 0 node0 {leader}",
        f"[node0:1] start 0 node0 {leader}",
        f"[node1:2] start 0 node1 {leader}",
        f"[node1:2] start 1 node1 {leader}",
        f"[node1:3] start 0 node1 {leader}",
    ]


@pytest.mark.parametrize("lost", [0, 1])
def test_job_survives_the_loss_of_a_host(job: Jobs, lost: int) -> None:
    """Loss of either host. The store is in the launcher, so host 0 can be lost, too."""
    body = HOST_LOST if lost else HOST_LOST.replace("for(2,", "for(0,").replace("for(3,", "for(1,")
    process = job.start(2, "-H", "node0:2,node1:2", "--elastic", "2", job.write(SLOT_WATCH + body))
    read_until(process, 4)
    name = f"node{lost}"
    with job.gone(lost):
        done = finish(process)
    ranks = (0, 1) if lost == 0 else (2, 3)
    assert done.code == 0, done.err
    assert done.out.count("end") == 2
    line = next(line for line in without_pids(done.err) if "ranks continue" in line)
    assert line.startswith(f"{name}: ")
    assert line.endswith(
        f"; ranks {ranks[0]}-{ranks[1]} terminated with it; the other ranks continue (2 of at least 2)"
    )


def test_killed_rank_is_restarted_if_each_host_runs_the_command(job: Jobs) -> None:
    words = ["-N", "2", "--nproc-per-node", "2", "--master-addr", "node0:15998", "--elastic", "3"]
    script = job.write(SLOT_WATCH + KILLED)
    processes = [job.start(node, "--node-rank", str(node), *words, script) for node in (0, 1)]
    done = [finish(process) for process in processes]
    assert [each.code for each in done] == [0, 0], done
    assert "restarted (1 of 3)" in done[0].err
    assert "start 1 node1" in done[1].out


@pytest.mark.parametrize("how", ["ssh", "the same command"])
def test_job_survives_a_host_without_network(job: Jobs, how: str) -> None:
    """The host is disconnected from the network, so no process receives a notification."""
    script = job.write(SLOT_WATCH + HOST_LOST)
    if how == "ssh":
        process, count = job.start(0, "-H", "node0:2,node1:2", "--elastic", "2", script), 4
    else:
        words = ["-N", "2", "--nproc-per-node", "2", "--master-addr", "node0:15997", "--elastic", "2", script]
        process, count = job.start(0, "--node-rank", "0", *words), 2
        job.start(1, "--node-rank", "1", *words)
    read_until(process, count)
    there = job.on(1, "python")
    job.hosts.cut(1)
    try:
        done = finish(process)
        assert done.code == 0, done.err
        assert done.out.count("end") == 2
        assert "; ranks 2-3 terminated with it; the other ranks continue (2 of at least 2)" in done.err
    finally:
        job.hosts.plug(1)
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                # without this, it exits only after the TCP timeout of its kernel, many minutes later
                os.kill(pid, signal.SIGKILL)


OUTLASTS_A_CUT = """
import os, sys, time
import torch
import allranks as dist
dist.init_process_group()
print("up", flush=True)
sums = 0
while True:
    over = torch.tensor([float(os.path.exists("over")), 1.0])
    dist.all_reduce(over)
    sums += over[1].item() == 2
    if over[0] == 2:
        break
    time.sleep(float(sys.argv[1]))
print("end", sums > 1, dist.get_world_size(), os.environ["ALLRANKS_START"], flush=True)
dist.destroy_process_group()
"""


def test_jobs_survive_a_network_outage(job: Jobs) -> None:
    """Outage of 6 s, the documented limit, in a job that sends continuously and a job with idle connections."""
    script = job.write(OUTLASTS_A_CUT)
    words = ["-N", "2", "--nproc-per-node", "1", "--master-addr", "node0:15996", "--elastic", "1", script, "3"]
    processes = [job.start(0, "-H", "node0:1,node1:1", "--elastic", "1", script, "0.01", torch=True)]
    processes += [job.start(node, "--node-rank", str(node), *words, torch=True) for node in (0, 1)]
    for process, count in zip(processes, (2, 1, 1), strict=True):
        read_until(process, count)
    job.hosts.cut(1)
    time.sleep(6)
    job.hosts.plug(1)
    (job.folder / "over").touch()
    done = [finish(process) for process in processes]
    assert [each.code for each in done] == [0, 0, 0], done
    ends = sorted(line for each in done for line in each.lines)
    assert ends == [f"[node{rank}:{rank}] end True 2 0" for rank in (0, 0, 1, 1)], done
    assert not any("again" in each.err or "gone" in each.err for each in done)


SPARE = """
import socket
say("start", start, socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"])
if start:
    say("master", os.environ["MASTER_ADDR"])
if rank == max(LOST) and start == 1:
    die()
wait_for(max(LOST), 2, "running")
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_a_lost_host_are_started_on_a_spare_host(job: Jobs, lost: int) -> None:
    ranks = (0, 1) if lost == 0 else (2, 3)
    script = job.write(SLOT_WATCH + f"LOST = {ranks}\n" + SPARE)
    words = ("-H", "node0:2,node1:2,node2:2", "--elastic", "3", "--spares", "1", script)
    process = job.start(1 - lost, *words)
    first = read_until(process, 4)
    for pid in job.on(lost, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert sorted(first) == [f"[node{r // 2}:{r}] start 0 node{r // 2} {r % 2} {r // 2}" for r in range(4)]
    again = [f"[node2:{r}] start {1 + n} node2 {r % 2} {lost}" for r in ranks for n in range(1 + (r == max(ranks)))]
    leader = job.hosts.hosts[2 if lost == 0 else 0].address
    masters = [f"[node2:{r}] master {leader}" for r in ranks for n in range(1 + (r == max(ranks)))]
    assert done.lines == sorted(again + masters)
    lines = [line for line in without_pids(done.err) if "start" in line]
    assert lines[0].endswith(f"; ranks {ranks[0]}-{ranks[1]} are started on node2")
    assert lines[1] == f"rank {ranks[1]} (host node2, pid N) was killed by SIGKILL; restarted (1 of 3)"


def test_host_with_free_slots_is_a_spare(job: Jobs) -> None:
    script = job.write(SLOT_WATCH + "LOST = (1, 1)\n" + SPARE)
    process = job.start(0, "-n", "2", "-H", "node0:1,node1:1,node2:2", "--elastic", "2", script)
    read_until(process, 2)
    for pid in job.on(1, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert "; rank 1 is started on node2" in done.err


def test_spare_host_if_each_host_runs_the_command(job: Jobs) -> None:
    script = job.write(SLOT_WATCH + "LOST = (1, 1)\n" + SPARE)
    words = ("-N", "3", "--nproc-per-node", "1", "--master-addr", "node0:15996", "--elastic", "2", "--spares", "1")
    processes = [job.start(node, "--node-rank", str(node), *words, script) for node in range(3)]
    read_until(processes[1], 1)
    processes[1].kill()
    done = [finish(process) for process in processes]
    assert (done[0].code, done[2].code) == (0, 0), done
    assert done[0].lines == ["[node0:0] start 0 node0 0 0"]
    assert done[2].lines == [
        *("[node2:1] master node0",) * 2,
        "[node2:1] start 1 node2 0 1",
        "[node2:1] start 2 node2 0 1",
    ]
    assert "rank 1 is started on node2" in done[0].err


FAILS = """
say("up")
if rank:
    tell("came")
    raise ValueError("no luck")
await_key("came")
wait_for(1, 0, "gone")
"""


def test_failure_of_a_rank_that_joined_later_is_reported(job: Jobs) -> None:
    """Check that its error has the prefix of its host and that the other ranks continue."""
    words = ["-N", "1:2", "--nproc-per-node", "1", "--master-addr", "node0:15995", "--elastic", "1:2"]
    words += ["--respawns", "0", "--rdzv-conf", "last_call_timeout=1", job.write(SLOT_WATCH + FAILS)]
    leader = job.start(0, "--node-rank", "0", *words)
    read_until(leader, 1)
    job.start(1, "--node-rank", "1", *words)
    done = finish(leader)
    assert done.code == 0, done.err
    assert "[node1:1] ValueError: no luck\n" in done.err
    assert "the other ranks continue" in done.err


RESTARTED = """
import socket
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
say("round", again, socket.gethostname())
if again == "0":
    wait_for(1, *AFTER)
    sys.exit(3)
"""


@pytest.mark.parametrize("spare", [True, False])
def test_job_restarts_after_the_loss_of_a_host(job: Jobs, spare: bool) -> None:
    """A spare host, or the lost host after its return, runs the ranks of the lost host in the next round."""
    script = job.write(SLOT_WATCH + f"AFTER = {(1, 'running') if spare else (0, 'gone')}\n" + RESTARTED)
    hosts = ["-H", "node0:1,node1:1,node2:1", "--spares", "1"] if spare else ["-H", "node0:1,node1:1"]
    words = [*hosts, "--elastic", "1", "--restarts", "1", "--respawns", "0", script]
    process = job.start(0, *words)
    read_until(process, 2)
    for pid in job.on(1, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert "[node0:0] round 1 node0" in done.lines
    assert any(re.fullmatch(r"\[node[12]:1\] round 1 node[12]", line) for line in done.lines), done.lines
    assert "restarting on node0, node" in done.err


def test_loss_of_a_spare_host_is_reported(job: Jobs) -> None:
    body = """
say("up")
await_key("end")
"""
    script = job.write(SLOT_WATCH + body)
    process = job.start(0, "-H", "node0:2,node1", "--elastic", "2", "--spares", "1", script)
    read_until(process, 2)
    for pid in job.on(1, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    assert line.startswith("allranks run: node1: ")
    assert line.endswith("; no spare host is left\n")
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 143


def test_number_of_spares_is_checked(job: Jobs) -> None:
    script = job.write("pass")
    for words, text in (
        (("-H", "node0,node1", "--elastic", "1", "--spares", "2"), "--spares 2: no host is left for ranks"),
        (
            ("-n", "2", "--elastic", "1", "--spares", "1"),
            "--spares 1 requires several hosts, but the job has only",
        ),
        (("-H", "node0,node1", "--spares", "1"), "--spares requires an elastic job.\n  Add --elastic MIN."),
    ):
        done = job.run(0, *words, script)
        assert done.code == 2
        assert text in done.err
    done = job.run(0, "-H", "node0:2,node1,node2", "--elastic", "1", "--spares", "1", "--dry-run", script)
    assert done.out.splitlines()[1:] == ["  node0  ranks 0-1", "  node1  rank 2", "  node2  none"]
