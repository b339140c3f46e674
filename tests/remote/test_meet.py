"""How a master and its workers come together, and how they end: real processes, killed in every way."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks import ConfigError, UsageError
from allranks.remote.meet import gather_workers

PRELUDE = """
import os, signal, socket, time
import torch
from allranks import PeerLostError
from allranks.remote import meet

def ask(rank, text):
    workers.lines[rank - 1].socket.sendall(text.encode())

def hear(rank):
    return workers.lines[rank - 1].socket.recv(1000).decode()

def group(name, *ranks):
    command = f"group {name} {' '.join(map(str, ranks))}"
    for rank in ranks:
        if rank:
            ask(rank, command)
    if 0 not in ranks:
        return [hear(rank) for rank in ranks]
    made = workers.make_group(name, ranks, 30.0)
    tensor = torch.zeros(2)
    made.all_reduce(tensor)
    for rank in ranks:
        if rank:
            assert hear(rank) == str(tensor.tolist())
    return made

"""


def begin(count: int, serve: str = "serve") -> str:
    """A script's first part: a master with so many workers."""
    return PRELUDE + f'workers = meet.gather_workers(workers={count}, serve="stand_in:{serve}", timeout_s=60)\n'


class Program:
    """Runs scripts, and finds all processes that they leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(script)
        environ = os.environ | {"TOKEN": self.token, "PYTHONPATH": str(Path(__file__).parent)}
        process = subprocess.Popen(
            [sys.executable, str(path)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, script: str) -> str:
        """What it prints; it must end well."""
        process = self.start(script)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        return out

    def alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and self.token.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:  # it ended while we looked
                    continue
        return found


def wait_for(what: Callable[[], object], timeout_s: float = 20.0) -> bool:
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    gone = wait_for(lambda: not made.alive())
    for pid in made.alive():
        os.kill(pid, signal.SIGKILL)
    assert gone


def test_groups_are_independent(program: Program) -> None:
    """And the dead are told apart, mourned and replaced."""
    script = begin(3) + textwrap.dedent("""
        lost = []
        workers.on_lost = lost.append
        assert [line.rank for line in workers.lines] == [1, 2, 3]
        ours, theirs = group("ours", 0, 1), group("theirs", 0, 2)
        assert group("workers", 3, 1) == ["[4.0, 4.0]"] * 2
        cpus = len(os.sched_getaffinity(0))
        ask(1, "threads")
        assert int(hear(1)) == int(os.environ.get("OMP_NUM_THREADS") or max(1, cpus // 3))

        ask(1, "group half 1 2")  # and 2 never comes
        os.kill(workers.lines[1].pid, signal.SIGKILL)
        assert hear(1) == "PeerLostError"
        assert workers.how_ended(2) == "killed by signal 9 (SIGKILL)"
        assert workers.how_ended(1) == ""
        assert lost == [2]
        try:
            theirs.all_reduce(torch.zeros(2))
            raise SystemExit("went on with the dead")
        except PeerLostError as error:
            assert error.rank == 1
        ask(1, "group again 0 1")
        again = workers.make_group("again", [0, 1], 30.0)
        again.all_reduce(torch.zeros(2))
        hear(1)

        dead = workers.lines[1].pid
        line = workers.respawn(2)
        assert line is workers.lines[1] and line.pid != dead and workers.how_ended(2) == ""
        assert group("reborn", 2, 3) == ["[5.0, 5.0]"] * 2
        os.kill(workers.lines[2].pid, signal.SIGSTOP)
        workers.respawn(3)
        assert group("all", 3, 2, 1) == ["[6.0, 6.0]"] * 3
        workers.close()
        workers.close()
        print("ended")
    """)
    assert program.run(script).splitlines()[-1] == "ended"


def test_strangers(program: Program) -> None:
    """Nobody listens on TCP; what comes to the unix sockets and says nothing, or nonsense, disturbs nobody."""
    script = begin(2) + textwrap.dedent("""
        house = workers._house
        names = [house.spot.door, house.spot.store.removeprefix("unix:@")]
        rude = []
        for name in names:
            for said in [b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\0\\0\\0\\5abcde", b"\\xff" * 5000] * 20:
                sock = socket.socket(socket.AF_UNIX)
                sock.setblocking(False)
                try:
                    sock.connect("\\0" + name)
                    sock.send(said)
                except OSError:
                    pass
                rude.append(sock)
        assert group("calm", 0, 1, 2).size() == 3
        os.kill(workers.lines[0].pid, signal.SIGKILL)
        workers.respawn(1)
        assert group("calmer", 1, 2) == ["[3.0, 3.0]"] * 2

        listening = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for row in open(table).read().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A":
                    listening.add(f"socket:[{fields[9]}]")
        for pid in (os.getpid(), *(line.pid for line in workers.lines)):
            held = set()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
                except FileNotFoundError:
                    pass
            assert any(name.startswith("socket:") for name in held)
            assert not held & listening
        print("calm")
    """)
    assert program.run(script).splitlines()[-1] == "calm"


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_all_end_with_the_master(program: Program, end: str) -> None:
    """Also workers that are stopped, or busy; and not before: Ctrl-C is the master's alone."""
    script = begin(3) + textwrap.dedent(f"""
        try:
            print("up", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            assert group("after", 1, 2, 3) == ["[6.0, 6.0]"] * 3
        ask(1, "sleep")
        os.kill(workers.lines[1].pid, signal.SIGSTOP)
        if (child := os.fork()) == 0:
            time.sleep(1000)  # and holds all that is not closed in a child
        print(child, flush=True)
        if {end!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if {end!r} == "raise":
            raise ValueError("of the master's")
    """)
    process = program.start(script)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    child = int(process.stdout.readline())
    assert wait_for(lambda: process.poll() is not None)
    assert process.returncode == {"kill": -signal.SIGKILL, "raise": 1}[end]
    assert wait_for(lambda: program.alive() == [child])
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0: expected how many to start, 1 or more"),
        ({"workers": True}, "workers=True"),
        ({"workers": 2, "hosts": "node1"}, "one of init_method, workers and hosts"),
        ({"workers": 2, "init_method": "env://"}, "one of init_method, workers and hosts"),
        ({"workers": 2, "threads": 0}, "threads=0"),
        ({"threads": 2}, "threads= is for workers that it starts"),
        ({"workers": 2, "timeout_s": 0.0}, "timeout must be positive"),
        ({"workers": 2, "worker_device": ""}, "worker_device=''"),
        ({}, "this process is alone"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.remote.meet._workers", None)
    with pytest.raises((UsageError, ConfigError), match=message):
        gather_workers(**arguments)  # type: ignore[arg-type]


def test_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.remote.meet._workers", None)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="rank 1 of 2 already"):
        gather_workers(workers=2)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=r"RANK=2 is out of range. Expected 0\.\.1"):
        gather_workers()


def test_what_cannot_be_had(program: Program) -> None:
    """A device, a host, more workers; nothing is left of any attempt. And what workers write comes line by line."""
    script = PRELUDE + textwrap.dedent("""
        def fails(words, **arguments):
            try:
                meet.gather_workers(timeout_s=60, **arguments)
            except (meet.ConfigError, meet.UsageError) as error:
                assert words in str(error), error
            else:
                raise SystemExit(f"nothing was wrong with {arguments}")

        fails("worker_device='nonsense' cannot be used there", workers=1, worker_device="nonsense")
        fails("allranks.invalid: ssh cannot connect", hosts="allranks.invalid")
        workers = meet.gather_workers(workers=2, serve="stand_in:speak", timeout_s=60)
        fails("has workers already", workers=1)
        for line in workers.lines:
            assert line.socket.recv(1) == b"!"
    """)
    process = program.start(script)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[1] out 1", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[1] err 1", "[2] err 2"]
