"""The fixture that all tests of the command use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launcher_process import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """The command. After the test, no process of it may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end(2)
