"""Runs the real command in real processes. Ranks that need no torch find an empty one, so that forking is cheap."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "ALLRANKS_STORE", "NO_COLOR")


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
class Launcher:
    """Starts ``allranks run`` in a folder of its own, and finds all that it left behind."""

    folder: Path
    program: tuple[str, ...] = ("allranks", "run")
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def write(self, script: str, name: str = "script.py") -> Path:
        """Puts a script into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(script))
        return path

    def environ(self, real_torch: bool = False) -> dict[str, str]:
        """The environment of the command, marked with the token."""
        path = [str(SOURCE)]
        if not real_torch:
            fake = self.folder / "fake"
            fake.mkdir(exist_ok=True)
            (fake / "torch.py").touch()
            path.insert(0, str(fake))
        clean = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
        return clean | {"PYTHONPATH": os.pathsep.join(path), "TOKEN": self.token}

    def command(self, *words: str) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", *self.program, *words]

    def start(
        self, *words: str, real_torch: bool = False, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts the command with the given words."""
        process = subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environ(real_torch) | (environ or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, real_torch: bool = False, environ: dict[str, str] | None = None) -> Done:
        """Runs the command to its end."""
        process = self.start(*words, real_torch=real_torch, environ=environ)
        out, err = process.communicate(timeout=60)
        return Done(process.returncode, out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape"))

    def script(
        self,
        script: str,
        *options: str,
        args: tuple[str, ...] = (),
        real_torch: bool = False,
        environ: dict[str, str] | None = None,
    ) -> Done:
        """Runs a script's text."""
        return self.run(*options, str(self.write(script)), *args, real_torch=real_torch, environ=environ)

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


def wait_for(what: Callable[[], object], timeout_s: float = 20, fail: bool = True) -> None:
    """Waits until something is true."""
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            assert not fail, "did not happen in time"
            return
        time.sleep(0.01)
