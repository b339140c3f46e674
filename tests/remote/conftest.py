"""Fixtures: a master with two workers for each test file of this directory.

The fixture stops the workers before tests of other directories start, because some of those tests count resources.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from allranks.remote.master.master import Master
from allranks.remote.master.start import init_master_worker


@pytest.fixture(scope="module")
def mw() -> Iterator[Master]:
    with init_master_worker(workers=2, timeout=60) as made:
        yield made


@pytest.fixture
def as_many_threads(mw: Master) -> Iterator[None]:
    """Use the number of threads of the workers: with another number, some kernels add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(mw.remote(torch.get_num_threads, on="worker:1")().result())
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
