"""Fixture shared by all tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launcher_process import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Command-line runner. After the test, none of its processes may remain."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end(2)
