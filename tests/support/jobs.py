"""Run ``allranks run`` on the test hosts, and find the processes that it leaves behind."""

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
from support.launcher_process import Done

SOURCE = Path(__file__).parents[2] / "src"
SECRET = "a secret of the tests, long enough"


@dataclass
class Jobs:
    """Starter of ``allranks run`` in a temporary folder.

    Scripts that do not need torch import an empty module instead.
    """

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
        """Write a script into the folder and return its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(script))
        return str(path)

    def start(self, host: int, *words: str, torch: bool = False, **environ: str) -> subprocess.Popen[bytes]:
        """Start ``allranks run`` on a host."""
        return self.start_any(host, sys.executable, "-m", "allranks", "run", *words, torch=torch, **environ)

    def start_any(self, host: int, *command: str, torch: bool = False, **environ: str) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
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
        """Run ``allranks run`` until it exits."""
        return finish(self.start(host, *words, torch=torch, **environ))

    def processes(self) -> dict[int, str]:
        """Return the processes on the hosts, except the processes that hold the namespaces."""
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
            except OSError:  # the process exited during the scan
                continue
        return found

    def new_processes(self) -> dict[int, str]:
        """Return the processes started since this object was created, except a restarted slurmd (``Slurm.lost``)."""
        came = {pid: words for pid, words in self.processes().items() if pid not in self._before}
        return {pid: words for pid, words in came.items() if not words.startswith("slurmd ")}

    def on(self, host: int, words: str) -> list[int]:
        """Return the processes of a host whose command line contains these words."""
        network = os.readlink(f"/proc/{self.hosts.hosts[host].holder}/ns/net")
        found = []
        for pid, line in self.new_processes().items():
            with contextlib.suppress(OSError):
                if words in line and os.readlink(f"/proc/{pid}/ns/net") == network:
                    found.append(pid)
        return found

    @contextlib.contextmanager
    def gone(self, host: int) -> Iterator[None]:
        """Kill the agent of a host, and disconnect the host inside the block so that the agent cannot return."""
        pids = self.on(host, "agents.serve")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:  # The agent's connection closes when the process exits.
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
        """Return the processes that still run after up to ``patience_s`` seconds."""
        until = time.monotonic() + patience_s
        while (left := self.new_processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return left


@contextlib.contextmanager
def jobs(hosts: Cluster, environ: Mapping[str, str], folder: Path, patience_s: float = 15.0) -> Iterator[Jobs]:
    """Yield a starter of jobs on hosts. Fail if a process still runs ``patience_s`` seconds after the block."""
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
    """Wait until a command exits."""
    out, err = process.communicate(timeout=timeout_s)
    return Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def read_until(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """Return the first ``count`` lines of a command's stdout."""
    assert process.stdout is not None
    return [process.stdout.readline().decode().rstrip("\n") for _ in range(count)]


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
