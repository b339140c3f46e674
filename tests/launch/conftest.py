"""The fixture that all tests of the command use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_process import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """The command. After the test, no process of it may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    left = launcher.wait_gone(2)
    for pid in left:
        os.kill(pid, 9)
    assert not left
