"""Fixtures: test hosts, and ssh and SLURM on them."""

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from support import cluster, sshd
from support import slurm as slurms


def _absent(reason: str) -> NoReturn:
    if os.environ.get("ALLRANKS_TEST_HOSTS") == "required":
        pytest.fail(f"tests of several hosts cannot run: {reason}")
    pytest.skip(f"not available on this machine: {reason}")


def _hosts(count: int) -> Iterator[cluster.Cluster]:
    if reason := cluster.trouble():
        _absent(f"hosts: {reason}")
    with cluster.cluster(count) as made:
        yield made


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[cluster.Cluster]:
    yield from _hosts(3)


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[cluster.Cluster]:
    yield from _hosts(4)


@pytest.fixture(scope="session")
def nine_hosts() -> Iterator[cluster.Cluster]:
    yield from _hosts(9)


@pytest.fixture(scope="session")
def ssh(three_hosts: cluster.Cluster) -> Iterator[sshd.Ssh]:
    if reason := sshd.trouble():
        _absent(f"sshd: {reason}")
    with sshd.sshd(three_hosts) as made:
        yield made


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurms.Slurm]:
    if reason := slurms.trouble():
        _absent(f"SLURM: {reason}")
    for hosts in _hosts(2):
        with slurms.slurm(hosts) as made:
            yield made
