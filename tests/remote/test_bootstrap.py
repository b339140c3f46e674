"""Start and exit of a master and its workers: real processes, which the tests kill in different ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks import ConfigError, UsageError
from allranks.remote.bootstrap.workers import gather_workers
from allranks.remote.master.start import init_master_worker
from support import warm
from support.marked import Marked, wait_for

PRELUDE = """
import os, signal, socket, time
import torch
from allranks import PeerLostError
from allranks.remote.bootstrap import workers as bootstrap

def ask(rank, text):
    workers.connections[rank - 1].socket.sendall(text.encode())

def hear(rank):
    return workers.connections[rank - 1].socket.recv(1000).decode()

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
    """Return the first part of a script, which creates a master with `count` workers."""
    return PRELUDE + f'workers = bootstrap.gather_workers(workers={count}, serve="stand_in:{serve}", timeout_s=60)\n'


class Program(Marked):
    """Run scripts, and find all processes that they leave running."""

    def start(self, script: str) -> subprocess.Popen[bytes]:
        path = self.folder / "script.py"
        path.write_text(script)
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        return self.open([sys.executable, str(path)], environ, new_session=True)

    def run(self, script: str) -> list[list[str]]:
        """Return the lines that the script writes to stdout and stderr; its exit code must be 0."""
        process = self.start(script)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        return [out.decode().splitlines(), err.decode().splitlines()]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    made.end(20)


def test_groups_survive_foreign_connections_and_lost_workers(program: Program) -> None:
    """Create groups beside other groups, foreign connections and lost workers, which are then replaced.

    No process may listen on a TCP port.
    """
    script = begin(3) + textwrap.dedent("""
        server = workers._server
        names = [server.endpoint.listener, server.endpoint.store.removeprefix("unix:@")]
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

        lost = []
        workers.on_lost = lost.append
        assert [line.rank for line in workers.connections] == [1, 2, 3]
        ours, theirs = group("ours", 0, 1), group("theirs", 0, 2)
        assert group("workers", 3, 1) == ["[4.0, 4.0]"] * 2
        cpus = len(os.sched_getaffinity(0))
        ask(1, "threads")
        assert int(hear(1)) == int(os.environ.get("OMP_NUM_THREADS") or max(1, cpus // 3))

        ask(1, "group half 1 2")  # and 2 never comes
        os.kill(workers.connections[1].pid, signal.SIGKILL)
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

        dead = workers.connections[1].pid
        line = workers.respawn(2)
        assert line is workers.connections[1] and line.pid != dead and workers.how_ended(2) == ""
        assert group("reborn", 2, 3) == ["[5.0, 5.0]"] * 2
        os.kill(workers.connections[2].pid, signal.SIGSTOP)
        workers.respawn(3)
        assert group("all", 3, 2, 1) == ["[6.0, 6.0]"] * 3

        listening = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for row in open(table).read().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A":
                    listening.add(f"socket:[{fields[9]}]")
        for pid in (os.getpid(), *(line.pid for line in workers.connections)):
            held = set()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
                except FileNotFoundError:
                    pass
            assert any(name.startswith("socket:") for name in held)
            assert not held & listening
        workers.close()
        workers.close()
        print("ended")
    """)
    assert program.run(script)[0][-1] == "ended"


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_workers_exit_with_the_master(program: Program, end: str) -> None:
    """Check that stopped and busy workers exit with the master, and that Ctrl-C interrupts only the master."""
    script = begin(3) + textwrap.dedent(f"""
        try:
            print("up", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            assert group("after", 1, 2, 3) == ["[6.0, 6.0]"] * 3
        ask(1, "sleep")
        os.kill(workers.connections[1].pid, signal.SIGSTOP)
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
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGINT)
    child = int(process.stdout.readline())
    wait_for(lambda: process.poll() is not None)
    assert process.returncode == {"kill": -signal.SIGKILL, "raise": 1}[end]
    wait_for(lambda: program.alive() == [child])
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0: expected the number of workers to start, 1 or more"),
        ({"workers": True}, "workers=True"),
        ({"workers": 2, "hosts": "node1"}, "one of init_method, workers and hosts"),
        ({"workers": 2, "init_method": "env://"}, "one of init_method, workers and hosts"),
        ({"hosts": 3}, "hosts=3: expected 'node1:2,node2'"),
        ({"hosts": "node1:0"}, "has no slot for a worker"),
        ({"hosts": []}, "hosts"),
        ({"workers": 2, "threads": 0}, "threads=0"),
        ({"threads": 2}, "threads= applies only to workers that this call starts"),
        ({"workers": 2, "timeout_s": 0.0}, "timeout must be positive"),
        ({"workers": 2, "worker_device": ""}, "worker_device=''"),
        ({"workers": 2, "world_size": 3, "rank": 0}, "world_size= and rank= apply only to existing processes"),
        ({}, "the world has a single process"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.remote.bootstrap.workers._workers", None)
    with pytest.raises((UsageError, ConfigError), match=message):
        gather_workers(**arguments)  # type: ignore[arg-type]


def test_init_master_worker_accepts_the_backend_of_thd(tmp_path: Path) -> None:
    """Call ``init_master_worker("tcp", init_method=..., world_size=..., rank=...)`` in every process."""
    script = f"""
import sys, torch, allranks
mw = allranks.init_master_worker("tcp", init_method="file://{tmp_path}/meet", world_size=2, rank=int(sys.argv[1]))
print(torch.ones(3, device="worker:1").sum().item(), flush=True)
mw.shutdown()
"""
    path = tmp_path / "thd.py"
    path.write_text(script)
    started = [
        subprocess.Popen([sys.executable, path, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    assert [each.communicate(timeout=60)[0] for each in started] == ["3.0\n", ""]
    assert [each.returncode for each in started] == [0, 0]
    with pytest.raises(UsageError, match="cannot use backend 'gloo'; expected 'tcp'"):
        init_master_worker("gloo", init_method="env://")


def test_threads_of_the_master_block_signals_and_workers_do_not() -> None:
    """Check the signal masks. Otherwise the kernel could deliver Ctrl-C to a thread that does not handle it."""
    script = """
import threading, signal
import allranks

def blocked(task):
    with open(f"/proc/{task}/status") as file:
        mask = next(line.split()[1] for line in file if line.startswith("SigBlk"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)

mw = allranks.init_master_worker(workers=1)
names = {each.name for each in threading.enumerate() if not blocked(each.native_id)}
mw.respawn(1, force=True)
# In the worker itself: its main thread blocks signals for a moment while it starts threads.
mask = mw.remote(signal.pthread_sigmask, on=1)(signal.SIG_BLOCK, ()).result()
print(names, mask)
mw.shutdown()
"""
    done = warm.run([sys.executable, "-c", script], timeout=60, check=True)
    assert done.stdout == "{'MainThread'} set()\n"


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:29533", "file:///tmp/nobody-is-there"])
def test_launcher_master_finds_its_workers_with_any_init_method(method: str, tmp_path: Path) -> None:
    path = tmp_path / "thd.py"
    path.write_text(
        f"""
import torch, allranks
mw = allranks.init_master_worker("tcp", init_method={method!r}, world_size=2, rank=0)
print(torch.ones(3, device="worker:1").sum().item(), flush=True)
mw.shutdown()
"""
    )
    command = [sys.executable, "-m", "allranks", "run", "--mode", "master", "-n", "2", path]
    ended = warm.run(command, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[0] 3.0\n"), ended.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import allranks\nallranks.init_process_group()\n",
            "The other ranks are workers of init_master_worker and join no process group",
        ),
        *(
            (
                f"import torch.distributed as dist\ndist.init_process_group({backend!r})\n",
                "environment variable MASTER_ADDR expected, but not set",
            )
            for backend in ("gloo", "allranks")
        ),
    ],
    ids=["ours", "gloo", "plugin"],
)
def test_process_group_on_a_launched_master_is_refused(program: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mistaken.py"
    path.write_text(program)
    command = [sys.executable, "-m", "allranks", "run", "--mode", "master", "-n", "3", path]
    ended = warm.run(command, timeout=60)
    assert ended.returncode == 1
    assert said in ended.stderr


def test_gather_workers_refuses_a_wrong_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.remote.bootstrap.workers._workers", None)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="already rank 1 of 2"):
        gather_workers(workers=2)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=r"RANK=2 is out of range. Expected 0\.\.1"):
        gather_workers()


def test_failed_starts_do_not_prevent_a_later_start(program: Program) -> None:
    """Request an unusable device, an unreachable host and more workers; also check the output of workers by lines."""
    script = PRELUDE + textwrap.dedent("""
        def fails(words, **arguments):
            try:
                bootstrap.gather_workers(timeout_s=60, **arguments)
            except (bootstrap.ConfigError, bootstrap.UsageError) as error:
                assert words in str(error), error
            else:
                raise SystemExit(f"nothing was wrong with {arguments}")

        fails("worker_device='nonsense' cannot be used by this worker", workers=1, worker_device="nonsense")
        fails("allranks.invalid: ssh cannot connect", hosts="allranks.invalid")
        workers = bootstrap.gather_workers(workers=2, serve="stand_in:speak", timeout_s=60)
        fails("already has workers", workers=1)
        for line in workers.connections:
            assert line.socket.recv(1) == b"!"
    """)
    out, err = program.run(script)
    assert sorted(out) == ["[1] out 1", "[2] out 2"]
    assert sorted(err) == ["[1] err 1", "[2] err 2"]
