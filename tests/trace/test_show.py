"""``allranks trace show`` and ``allranks top``: queries of a running job from another process."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks._cluster import network
from allranks._trace import inspection, jobs, kernel
from allranks.launch.agents.inquiries import Inquiries
from support import warm
from support.launcher_process import Launcher
from support.marked import wait_for

HUNG = """
import time, torch
from pathlib import Path
import allranks as dist
def load():
    Path("there").touch()
    time.sleep(1000)
dist.init_process_group()
for step in range(3):
    time.sleep(0.06)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1 and step == 1:
        load()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end(2)


@pytest.fixture
def job(launcher: Launcher) -> Iterator[subprocess.Popen[bytes]]:
    launcher.write(HUNG, "hung.py")
    process = launcher.start("-n", "2", "hung.py", real_torch=True)
    wait_for((launcher.folder / "there").exists)
    time.sleep(0.3)
    yield process
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=30)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "allranks", *words], timeout=60)


def test_show_and_top_print_waits_of_running_job(job: subprocess.Popen[bytes]) -> None:
    done = command("trace", "show", "--calls", "2", str(job.pid))
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\b\d+(\.\d+)? (s|ms)\b", "N s", re.sub("rank . arrived last", "rank X arrived last", done.stdout))
    pids = [
        str(state["pid"]) for state in json.loads(command("trace", "show", "--json", str(job.pid)).stdout)["states"]
    ]
    lines = [re.sub(" +", " ", re.sub(rf" ({'|'.join(pids)}) ", " PID ", line)) for line in text.splitlines()]
    assert lines[:5] == [
        f"job {job.pid}: python hung.py; 2 ranks, for N s",
        "",
        "rank pid process in for waits for",
        "0 PID sleeping all_reduce #3 (hung.py:11, shape (4,)) N s rank 1",
        "1 PID sleeping hung.py:7 in load N s",
    ]
    assert lines[6].startswith(
        "rank 0 has waited N s in all_reduce #3 (hung.py:11, shape (4,)) for rank 1, which is at"
    )
    assert lines[8:11] == [
        "rank 0:",
        " all_reduce #2 N s, rank X arrived last, hung.py:11, shape (4,)",
        " all_reduce #3 for N s, hung.py:11, shape (4,)",
    ]
    data = json.loads(command("trace", "show", "--json", str(job.pid)).stdout)
    assert [state["rank"] for state in data["states"]] == [0, 1]
    assert data["places"] == {"1": "hung.py:7 in load"}

    done = command("top", "-n", "1", "-d", "0.5", str(job.pid))
    assert re.sub(" +", " ", done.stdout.splitlines()[3]).startswith(f" 0 {pids[0]} 0 0.0 100% ")
    looks = command("top", "-n", "2", "-d", "0.2", "--json", str(job.pid)).stdout.splitlines()
    assert [set(json.loads(line)) for line in looks] == [{"before", "now"}] * 2


def test_top_exits_when_its_job_ends(job: subprocess.Popen[bytes]) -> None:
    words = [sys.executable, "-m", "allranks", "top", "-d", "0.2", str(job.pid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert top.stdout.readline().startswith(f"job {job.pid}: ")
        os.kill(job.pid, signal.SIGINT)
        _, errors = top.communicate(timeout=60)
    assert (top.returncode, errors) == (0, f"allranks top: job {job.pid} has ended\n")


def test_stopped_or_exited_launcher_is_reported(job: subprocess.Popen[bytes]) -> None:
    found = next(each for each in jobs.find() if each.pid == job.pid)
    os.kill(job.pid, signal.SIGSTOP)
    with pytest.raises(jobs.NoAnswer, match=r"has not answered within 0\.5 s"):
        jobs.ask(found, jobs.Question(), timeout_s=0.5)
    os.kill(job.pid, signal.SIGCONT)
    assert len(jobs.ask(found, jobs.Question()).states) == 2
    os.kill(job.pid, signal.SIGINT)
    job.wait(30)
    with pytest.raises(jobs.NoAnswer, match=rf"job {job.pid} has ended"):
        jobs.ask(found, jobs.Question())
    assert job.pid not in [each.pid for each in jobs.find()]  # the address is not a file, so nothing remains


def test_unknown_job_error_lists_running_jobs(job: subprocess.Popen[bytes]) -> None:
    done = command("trace", "show", "1")
    assert done.returncode == 2
    assert "no job here has the launcher 1; running jobs:\n" in done.stderr
    assert f"\n  {job.pid}: python hung.py, 2 ranks\n" in done.stderr
    assert command("trace").returncode == command("trace", "shwo").returncode == 2


def test_address_in_use_by_another_process_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can bind any name in the abstract namespace, and containers can share the namespace."""
    assert jobs.own_address(0) != jobs.own_address(0)
    taken = jobs.own_address(0)
    monkeypatch.setattr("allranks.launch.agents.inquiries.own_address", lambda number: taken)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(taken)
        inquiries = Inquiries()
        assert inquiries.take() == []
        assert select.select([inquiries.fd], [], [], 0)[0] == []
        inquiries.close()


def test_idle_and_invalid_clients_do_not_block_inquiries() -> None:
    inquiries = Inquiries()
    address = next(each.address for each in jobs.find() if each.pid == os.getpid())
    silent, wrong = (socket.socket(socket.AF_UNIX) for _ in range(2))
    for connection in (silent, wrong):
        connection.connect(address)
    wrong.sendall(b"{}garbage\n")
    assert inquiries.take() == []
    assert wrong.recv(1) == b""
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for connection in crowd:
        connection.settimeout(1)
        connection.connect(address)
        inquiries.take()
    assert crowd[-1].recv(1) == b""  # over the limit of connections
    crowd[0].sendall(b'{"recent": 3}\n')
    assert inquiries.take() == [jobs.Question(3)]
    inquiries.answer(b"{}\n")
    assert crowd[0].recv(10) == b"{}\n"
    inquiries.close()
    assert silent.recv(1) == b""
    for connection in (silent, wrong, *crowd):
        connection.close()
    assert os.getpid() not in [each.pid for each in jobs.find()]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user requires root")
def test_another_user_gets_no_answer() -> None:
    inquiries = Inquiries()
    address = next(each.address for each in jobs.find() if each.pid == os.getpid())
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.connect(sys.argv[1].replace('@', chr(0))); s.sendall(b'{}'); print(s.recv(100))"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", script, address.replace("\0", "@")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 20
    while stranger.poll() is None and time.monotonic() < until:
        assert inquiries.take() == []
        time.sleep(0.02)
    out, err = stranger.communicate()
    assert out == "b''\n" or "Error" in err
    inquiries.close()


def test_socket_names_that_are_not_text_do_not_disturb_the_search_for_jobs() -> None:
    """Other programs may bind abstract sockets with any bytes as their name."""
    inquiries = Inquiries()
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(b"\0\x83\xc4 allranks-job")
            assert os.getpid() in {job.pid for job in jobs.find()}
    finally:
        inquiries.close()


def test_process_names_that_are_not_text_do_not_disturb_their_inspection() -> None:
    program = "import sys\nopen('/proc/self/comm', 'wb').write(b'\\x83) \\xc4')\nprint('named', flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"\x83) \xc4\n"
        assert kernel.process_state(process.pid) in ("running", "sleeping")
        assert inspection.usage(process.pid, []).resident > 0
        assert network._start_time(str(process.pid)).isdigit()
        process.communicate(b"\n")
