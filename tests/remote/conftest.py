"""Two workers for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, "/tmp/sp")


@pytest.fixture(scope="session")
def mw() -> Iterator[object]:
    import toy

    master = toy.start(2)
    yield master
    master.close()
