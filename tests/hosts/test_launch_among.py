"""The same ``allranks run`` on each host: host 0 has the launcher, and each host prints the output of its own ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.jobs import Done, Jobs, finish, jobs, read_until
from support.prompt import COMMAND_S

WAIT = """
    import os, time
    print("up", os.environ["RANK"], flush=True)
    time.sleep(100)
"""
ARGUMENTS = ("--nproc-per-node", "2", "--nnodes", "2", "--master_addr", "10.77.0.1", "--master_port", "15432")


@pytest.fixture
def job(three_hosts: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(three_hosts, os.environ, tmp_path) as made:
        yield made


def start_both(job: Jobs, *words: str, arguments: tuple[str, ...] = ARGUMENTS, torch: bool = False) -> list[Done]:
    return [finish(process) for process in started(job, *words, arguments=arguments, torch=torch)]


def started(
    job: Jobs, *words: str, arguments: tuple[str, ...] = ARGUMENTS, torch: bool = False
) -> list[subprocess.Popen[bytes]]:
    return [job.start(node, *arguments, "--node_rank", str(node), *words, torch=torch) for node in (0, 1)]


@pytest.mark.parametrize("module", ["allranks", "torch.distributed"])
def test_ranks_form_a_group_and_each_host_prints_its_own_ranks(job: Jobs, module: str) -> None:
    """torch's gloo listens at the given address and port, although each host resolves its own name to loopback."""
    script = f"""
        import os, torch, {module} as dist
        dist.init_process_group({'"gloo"' if module != "allranks" else ""})
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        print(int(tensor), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        dist.destroy_process_group()
    """
    done = start_both(job, job.write(script), torch=True)
    assert [d.code for d in done] == [0, 0], done
    assert done[0].lines == [f"[node0:{rank}] 4 10.77.0.1 15432" for rank in (0, 1)]
    assert done[1].lines == [f"[node1:{rank}] 4 10.77.0.1 15432" for rank in (2, 3)]


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_ends_the_command_on_each_host_with_its_code(job: Jobs, failing: int) -> None:
    script = f"""
        import os, sys, time
        print("up", flush=True)
        if os.environ["RANK"] == "{failing}":
            time.sleep(0.3)
            sys.exit(7)
        time.sleep(100)
    """
    processes = started(job, "--grace", "60", job.write(script))
    for process in processes:
        read_until(process, 2)
    began = time.monotonic()
    done = [finish(process) for process in processes]
    assert time.monotonic() - began < COMMAND_S  # the target is 2 s
    for d in done:
        assert d.code == 7
        assert f"rank {failing} (host node{failing // 2}, pid " in d.err
        assert "exited with code 7" in d.err


@pytest.mark.parametrize("where", [0, 1])
def test_ctrl_c_on_any_host_stops_all(job: Jobs, where: int) -> None:
    processes = started(job, job.write(WAIT))
    for process in processes:
        read_until(process, 2)
    processes[where].send_signal(signal.SIGINT)
    assert [finish(process).code for process in processes] == [130, 130]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_host_that_waits_for_others_can_be_stopped(job: Jobs, number: int) -> None:
    arguments = ("-N", "3", "--master-addr", "10.77.0.1:15432", "--join-timeout", "30", job.write(WAIT))
    leader, process = (job.start(node, "--node-rank", str(node), *arguments) for node in (0, 1))
    await_connection(job, 1)
    process.send_signal(number)
    assert finish(process, 15).code == (130 if number == signal.SIGINT else -number)
    done = finish(leader)
    assert done.code == 2
    assert "node1: lost the connection to its agent" in done.err


def test_signal_to_the_command_of_another_host_reaches_its_ranks(job: Jobs) -> None:
    """All signals except SIGHUP, which nohup blocks. The job continues."""
    script = """
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda number, frame: print("got", os.environ["RANK"], flush=True))
        print("up", flush=True)
        while True:
            time.sleep(0.1)
    """
    words = ("nohup", sys.executable, "-m", "allranks", "run", *ARGUMENTS, "--node-rank")
    leader, process = (job.start_any(node, *words, str(node), job.write(script)) for node in (0, 1))
    for each in (leader, process):
        read_until(each, 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    assert sorted(read_until(process, 2)) == ["[node1:2] got 2", "[node1:3] got 3"]
    process.send_signal(signal.SIGTERM)
    assert [finish(each).code for each in (leader, process)] == [143, 143]


def test_hidden_output_of_the_failed_rank_is_printed_on_each_host(job: Jobs) -> None:
    arguments = ("--show", "none", "--", "bash", "-c", "echo words of $RANK >&2; [ $RANK != 3 ] || exit 3; sleep 100")
    done = [finish(process) for process in started(job, *arguments)]
    for d in done:
        assert d.code == 3
        assert re.search(r"rank 3 \(host node1, pid \d+\) exited with code 3\nwords of 3\n", d.err)
        assert "words of 0" not in d.err


def test_an_agent_tries_the_addresses_of_its_own_network_first(job: Jobs) -> None:
    """The launcher's other addresses drop packets and send no error."""
    script = """
        import select
        from allranks._net.secret import load_secret
        from allranks._net.listener import Listener
        door = Listener(["0.0.0.0"], 0, load_secret())
        print(door.port, flush=True)
        select.select([door.wake], [], [])
        print("came", flush=True)
    """
    leader = job.start_any(0, sys.executable, job.write(script))
    (port,) = read_until(leader, 1)
    node = job.hosts.hosts[1]
    far = [f"10.78.0.{number}" for number in range(1, 9)]
    node.set_up("route", "add", "10.78.0.0/16", "dev", "eth0")
    try:
        began = time.monotonic()
        dialled = f"{','.join(far)},10.77.0.1:{port}"
        agent = job.start_any(1, sys.executable, "-m", "allranks.launch.agents.serve", "--dial", dialled)
        assert read_until(leader, 1) == ["came"]
        assert time.monotonic() - began < 20  # each unreachable address takes 3 s
        finish(leader)
        assert finish(agent).code == 1
    finally:
        node.set_up("route", "delete", "10.78.0.0/16")


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_command_of_one_host_ends_the_command_of_the_other(job: Jobs, victim: int) -> None:
    processes = started(job, job.write(WAIT))
    for process in processes:
        read_until(process, 2)
    processes[victim].kill()
    done = finish(processes[1 - victim])
    assert done.code in (2, 255)
    assert (
        "connection to host 0 (10.77.0.1:15432)" if victim == 0 else "node1: lost the connection to its agent"
    ) in done.err
    assert not job.left()


def test_each_host_has_its_own_number_of_ranks_and_script(job: Jobs) -> None:
    """The command of each host sets its number of ranks and the local path of the script."""
    job.write("import os; print('first', os.environ['RANK'], os.environ['WORLD_SIZE'])", "first.py")
    job.write("import os; print('second', os.environ['RANK'], os.environ['WORLD_SIZE'])", "second.py")
    common = ("-N", "2", "--master-addr", "node0:15432")
    processes = [
        job.start(0, *common, "--node-rank", "0", "--nproc-per-node", "1", "first.py"),
        job.start(1, *common, "--node-rank", "1", "--nproc-per-node", "3", "second.py"),
    ]
    done = [finish(process) for process in processes]
    assert [d.code for d in done] == [0, 0], done
    assert done[0].lines == ["[node0:0] first 0 4"]
    assert done[1].lines == ["[node1:1] second 1 4", "[node1:2] second 2 4", "[node1:3] second 3 4"]


def test_duplicate_node_rank_is_refused(job: Jobs) -> None:
    processes = [job.start(node, *ARGUMENTS, "--node-rank", "1", job.write("")) for node in (1, 2)]
    processes.append(
        job.start(0, *ARGUMENTS[:3], "3", *ARGUMENTS[4:], "--node-rank", "0", "--join-timeout", "4", "script.py")
    )
    done = [finish(process) for process in processes]
    assert [d.code for d in done] == [2, 2, 2]
    assert any("the job already has a host 1 (--node-rank)" in d.err for d in done[:2])
    assert "no answer in time from " in done[2].err


def test_different_secret_is_refused(job: Jobs) -> None:
    script = job.write("")
    first = job.start(0, *ARGUMENTS, "--node-rank", "0", "--join-timeout", "3", script)
    second = job.start(1, *ARGUMENTS, "--node-rank", "1", script, ALLRANKS_SECRET="quite another secret of the tests")
    done = [finish(process) for process in (first, second)]
    assert [d.code for d in done] == [2, 2]
    assert "its secret differs from this process's" in done[1].err
    assert "its secret differs from this process's" in done[0].err


def test_missing_launcher_is_reported(job: Jobs) -> None:
    done = job.run(1, *ARGUMENTS, "--node-rank", "1", "--join-timeout", "1", job.write(""))
    assert done.code == 2
    assert "found no launcher at 10.77.0.1:15432 (last: 10.77.0.1:15432: connection refused" in done.err


def test_a_host_joins_a_running_elastic_job_and_leaves_it(job: Jobs) -> None:
    script = """
        import os, sys, time
        print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"], flush=True)
        time.sleep(100 if os.environ["TORCHELASTIC_RESTART_COUNT"] != "3" else 0)
    """
    common = ("-N", "1:2", "--master-addr", "10.77.0.1:15432", "--grace", "2", job.write(script))
    leader = job.start(0, "--node-rank", "0", *common)
    first = job.start(1, "--node-rank", "1", *common)
    assert read_until(leader, 1) == ["[node0:0] round 0 2"]
    first.kill()
    assert read_until(leader, 1) == ["[node0:0] round 1 1"]
    second = job.start(2, "--node-rank", "1", *common)
    assert read_until(leader, 1) == ["[node0:0] round 2 2"]
    read_until(second, 1)
    second.kill()
    assert finish(leader).lines == ["[node0:0] round 3 1"]


def test_refused_host_does_not_disturb_a_running_job(job: Jobs) -> None:
    script = """
        import os, time
        print("round", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        time.sleep(4)
    """
    common = ("-N", "1:3", "--master-addr", "10.77.0.1:15432", job.write(script))
    leader = job.start(0, "--node-rank", "0", "--rdzv-id", "one", "--rdzv-conf", "last_call_timeout=0", *common)
    assert read_until(leader, 1) == ["[node0:0] round 0"]
    refused = finish(job.start(1, "--node-rank", "1", "--rdzv-id", "two", *common))
    assert refused.code == 2
    assert "host 0 runs 'one', but this host requests 'two'" in refused.err
    done = finish(leader)
    assert (done.code, done.lines) == (0, [])


def test_fewer_ranks_than_hosts_are_refused(job: Jobs) -> None:
    arguments = ("-n", "1", *ARGUMENTS[2:])
    done = start_both(job, job.write("print('must not run')"), arguments=arguments)
    assert [(d.code, d.out) for d in done] == [(2, ""), (2, "")]
    for d in done:
        assert "-n 1 leaves some of the 2 hosts without ranks" in d.err


def test_ctrl_c_while_waiting_for_hosts_stops_all_commands(job: Jobs) -> None:
    arguments = ("-N", "3", "--master-addr", "10.77.0.1:15432")
    leader, other = started(job, job.write(""), arguments=arguments)
    await_connection(job, 1)
    leader.send_signal(signal.SIGINT)
    assert [finish(process).code for process in (leader, other)] == [130, 130]


def test_silent_connections_do_not_block_the_job(job: Jobs) -> None:
    """Four hundred connections that send no data."""
    script = job.write("print('ran')")
    leader = job.start(0, *ARGUMENTS, "--node-rank", "0", script)
    knock = """
import socket, sys, time
until, held = time.monotonic() + 20, []
while len(held) < 400 and time.monotonic() < until:
    try:
        held.append(socket.create_connection(("10.77.0.1", 15432), 1))
    except OSError:
        time.sleep(0.05)
print(len(held), flush=True)
sys.stdin.read()
"""
    strangers = subprocess.Popen(
        job.hosts.hosts[2].inside("python3", "-c", knock), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert strangers.stdout is not None
    assert strangers.stdout.readline() == "400\n"
    other = job.start(1, *ARGUMENTS, "--node-rank", "1", script)
    done = [finish(process, 30) for process in (other, leader)]
    strangers.communicate()
    assert [(d.code, len(d.lines)) for d in done] == [(0, 2), (0, 2)], done


def await_connection(job: Jobs, node: int) -> None:
    """Wait until a process on this host is connected to host 0's port and has sent its first message."""
    table, port = ("cat", "/proc/net/tcp"), f":{15432:04X} 01 "  # ESTABLISHED
    until = time.monotonic() + 30
    while port not in subprocess.run(job.hosts.hosts[node].inside(*table), capture_output=True, text=True).stdout:
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.3)


def test_ranks_form_a_group_without_a_secret_of_the_user(job: Jobs) -> None:
    script = """
        import torch, allranks
        allranks.init_process_group()
        allranks.barrier()
        print("met")
    """
    path = job.write(script)
    processes = [
        job.start(node, *ARGUMENTS, "--node_rank", str(node), path, torch=True, ALLRANKS_INSECURE="1")
        for node in (0, 1)
    ]
    done = [finish(process) for process in processes]
    assert [(d.code, len(d.lines)) for d in done] == [(0, 2), (0, 2)], done
