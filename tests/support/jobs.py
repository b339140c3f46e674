"""Runs ``allranks run`` on the test hosts, and finds what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.cluster import Cluster

SOURCE = Path(__file__).parents[2] / "src"
SECRET = "a secret of the tests, long enough"


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of stdout, sorted: ranks do not wait for each other."""
        return sorted(self.out.splitlines())


@dataclass
class Jobs:
    """Starts ``allranks run`` in a folder of its own. Scripts that need no torch find an empty one."""

    hosts: Cluster
    environ: Mapping[str, str]
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = self.processes()
        fake = self.folder / "fake"
        fake.mkdir()
        (fake / "torch.py").touch()

    def write(self, script: str, name: str = "script.py") -> str:
        """Puts a script into the folder. Returns its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(script))
        return str(path)

    def start(self, host: int, *words: str, torch: bool = False, **environ: str) -> subprocess.Popen[bytes]:
        """Starts ``allranks run`` on a host."""
        return self.start_any(host, sys.executable, "-m", "allranks", "run", *words, torch=torch, **environ)

    def start_any(self, host: int, *command: str, torch: bool = False, **environ: str) -> subprocess.Popen[bytes]:
        """Starts a command on a host."""
        path = [str(SOURCE)] if torch else [str(self.folder / "fake"), str(SOURCE)]
        inside = self.hosts.hosts[host].inside(*command)
        process = subprocess.Popen(
            [*inside[: -len(command) - 1], f"--wd={self.folder}", *inside[-len(command) - 1 :]],
            env={**self.environ, "PYTHONPATH": os.pathsep.join(path), "ALLRANKS_SECRET": SECRET, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_heed_signals,
        )
        self.started.append(process)
        return process

    def run(self, host: int, *words: str, torch: bool = False, **environ: str) -> Done:
        """Runs ``allranks run`` to its end."""
        return finish(self.start(host, *words, torch=torch, **environ))

    def processes(self) -> dict[int, str]:
        """What runs on the hosts, but for their daemons."""
        found = {}
        networks = {os.readlink(f"/proc/{host.holder}/ns/net"): host for host in self.hosts.hosts}
        holders = {host.holder for host in self.hosts.hosts}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in holders:
                continue
            try:
                if os.readlink(entry / "ns" / "net") in networks:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(entry.name)] = words
            except OSError:  # it ended while we looked
                continue
        return found

    def new_processes(self) -> dict[int, str]:
        """What has come since this was made, but for a daemon that was started again (``Slurm.lost``)."""
        came = {pid: words for pid, words in self.processes().items() if pid not in self._before}
        return {pid: words for pid, words in came.items() if not words.startswith("slurmd ")}

    def on(self, host: int, words: str) -> list[int]:
        """Processes of a host whose command line has these words."""
        network = os.readlink(f"/proc/{self.hosts.hosts[host].holder}/ns/net")
        found = []
        for pid, line in self.new_processes().items():
            with contextlib.suppress(OSError):
                if words in line and os.readlink(f"/proc/{pid}/ns/net") == network:
                    found.append(pid)
        return found

    @contextlib.contextmanager
    def gone(self, host: int) -> Iterator[None]:
        """A host whose agent is killed, and that does not come back meanwhile."""
        pids = self.on(host, "agents.serve")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:  # its connection ends with it
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                    time.sleep(0.01)
        time.sleep(0.2)
        self.hosts.cut(host)
        try:
            yield
        finally:
            self.hosts.plug(host)

    def left(self, patience_s: float = 15.0) -> dict[int, str]:
        """What is still there after a while."""
        until = time.monotonic() + patience_s
        while (left := self.new_processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return left


@contextlib.contextmanager
def jobs(hosts: Cluster, environ: Mapping[str, str], folder: Path, patience_s: float = 15.0) -> Iterator[Jobs]:
    """What starts jobs on hosts. In the end, after ``patience_s``, no process may be left."""
    made = Jobs(hosts, environ, folder)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    left = made.left(patience_s)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def finish(process: subprocess.Popen[bytes], timeout_s: float = 90.0) -> Done:
    """Waits for the end of a command."""
    out, err = process.communicate(timeout=timeout_s)
    return Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def read_until(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """The first lines of a command's stdout."""
    assert process.stdout is not None
    return [process.stdout.readline().decode().rstrip("\n") for _ in range(count)]


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
