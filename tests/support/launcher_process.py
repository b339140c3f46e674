"""Run the real command in real processes.

Ranks that do not need torch import an empty module, so that forks are fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from support.marked import Marked

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
        """The sorted lines of stdout. The ranks do not synchronize, so their order varies."""
        return sorted(self.out.splitlines())


@dataclass
class Launcher(Marked):
    """Starter of ``allranks run`` in a temporary folder; finds all processes that the command leaves behind."""

    program: tuple[str, ...] = ("allranks", "run")

    def write(self, script: str, name: str = "script.py") -> Path:
        """Write a script into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(script))
        return path

    def environ(self, real_torch: bool = False) -> dict[str, str]:
        """Return the environment of the command, marked with the token."""
        path = [str(SOURCE)]
        if not real_torch:
            fake = self.folder / "fake"
            fake.mkdir(exist_ok=True)
            (fake / "torch.py").touch()
            path.insert(0, str(fake))
        clean = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
        return clean | {"PYTHONPATH": os.pathsep.join(path), "TOKEN": self.token}

    def command(self, *words: str) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-m", *self.program, *words]

    def start(
        self, *words: str, real_torch: bool = False, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the command with the given arguments."""
        return self.open(self.command(*words), self.environ(real_torch) | (environ or {}))

    def run(self, *words: str, real_torch: bool = False, environ: dict[str, str] | None = None) -> Done:
        """Run the command until it exits."""
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
        """Run a script, passed as text."""
        return self.run(*options, str(self.write(script)), *args, real_torch=real_torch, environ=environ)
