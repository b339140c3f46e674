"""Processes of a test, known by a token that they and all that they start carry in their environment."""

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
    """Starts processes in a folder, and finds all that they leave behind."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16), kw_only=True)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)

    def open(
        self, command: Sequence[str], environ: Mapping[str, str], *, new_session: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts a command."""
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
        """All processes that carry the token."""
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

    def wait_gone(self, timeout_s: float = 5) -> list[int]:
        """Waits until no process carries the token; returns those that still do."""
        wait_for(lambda: not self.alive(), timeout_s, fail=False)
        return self.alive()

    def end(self, patience_s: float) -> None:
        """After the test: nothing may be left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        left = self.wait_gone(patience_s)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def wait_for(what: Callable[[], object], timeout_s: float = 20, fail: bool = True) -> None:
    """Waits until something is true."""
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            assert not fail, "did not happen in time"
            return
        time.sleep(0.01)
