"""The hosts that the tests here run on."""

import os
from collections.abc import Iterator

import cluster
import pytest


def _hosts(count: int) -> Iterator[cluster.Cluster]:
    reason = cluster.trouble()
    if reason and os.environ.get("ALLRANKS_TEST_HOSTS") == "required":
        pytest.fail(f"the tests of several hosts cannot run: {reason}")
    if reason:
        pytest.skip(f"no hosts can be made on this machine: {reason}")
    with cluster.cluster(count) as made:
        yield made


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[cluster.Cluster]:
    yield from _hosts(3)


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[cluster.Cluster]:
    yield from _hosts(4)
