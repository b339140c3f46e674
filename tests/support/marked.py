"""Processes of a test, identified by a token in their environment, which all their child processes inherit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Marked", "wait_for"]


@dataclass
class Marked:
    """Starter of processes in a folder; finds all processes that they leave behind."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16), kw_only=True)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)

    def open(
        self, command: Sequence[str], environ: Mapping[str, str], *, new_session: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a command."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**environ, "TOKEN": self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=new_session,
        )
        self.started.append(process)
        return process

    def alive(self) -> list[int]:
        """Return all processes that carry the token."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and self.token.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:  # the process exited during the scan
                    continue
        return found

    def wait_gone(self, timeout_s: float = 5) -> list[int]:
        """Wait until no process carries the token; return the processes that still do after the timeout."""
        wait_for(lambda: not self.alive(), timeout_s, fail=False)
        return self.alive()

    def end(self, patience_s: float) -> None:
        """Clean up after the test, and fail if a process still runs after ``patience_s`` seconds."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        left = self.wait_gone(patience_s)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def wait_for(what: Callable[[], object], timeout_s: float = 20, fail: bool = True) -> None:
    """Wait until a condition is true."""
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            assert not fail, "the condition did not become true in time"
            return
        time.sleep(0.01)
