"""Fixture that runs the command ``allranks`` in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import warm

Command = Callable[..., "subprocess.CompletedProcess[str]"]
_OTHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE", "ALLRANKS_TRACE")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that runs ``allranks`` with arguments and additional environment variables."""

    def run(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in _OTHERS}
        return warm.run(
            [sys.executable, "-m", "allranks", *map(str, words)],
            cwd=tmp_path,
            env=clean | environ,
            timeout=100,
        )

    return run
