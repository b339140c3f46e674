"""Two workers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allranks.remote.master import Master
from allranks.remote.start import init_master_worker


@pytest.fixture(scope="session")
def mw() -> Iterator[Master]:
    with init_master_worker(workers=2, timeout=60) as made:
        yield made
