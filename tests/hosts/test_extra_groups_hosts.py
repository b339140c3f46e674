"""Groups of trainers and rollout workers of two worlds, on two hosts (`support.extra_groups`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import distributed

from allranks.testing import run_ranks
from support.cluster import Cluster, Host
from support.extra_groups import LIMIT, choose, free_ports, init_process_group, results, stateless_group, total

SECRET = {"ALLRANKS_SECRET": "a secret of the tests, long enough"}


def _transfer(hosts: list[Host], backend: str, default: str) -> Callable[[], list[Any]]:
    """Return a program of two trainers on the first host and two rollout workers on the second."""
    ports = free_ports(5)

    def url(host: int, port: int) -> str:
        return f"tcp://{hosts[host].address}:{ports[port]}"

    def body() -> list[Any]:
        rank, name = int(os.environ["RANK"]), choose(backend)
        place = rank // 2
        hosts[place].enter()
        for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # set by run_ranks, which assumes one host
            os.environ.pop(variable)
        found = []
        if default:
            distributed.init_process_group(
                choose(default), init_method=url(place, place), rank=rank % 2, world_size=2, timeout=LIMIT
            )
        first = init_process_group(name, url(0, 2), "weights", rank, 4)
        second = init_process_group(name, url(1, 3), "other weights", 3 - rank, 4)
        found += [results(first), results(second)]
        distributed.destroy_process_group(first)
        found.append(results(second))
        distributed.destroy_process_group(second)
        third = stateless_group(url(0, 4), rank, 4)
        found.append(total(third, rank + 1.0))
        third.shutdown()
        if default:
            found.append(total(None, rank + 1.0))
            distributed.destroy_process_group()
        assert name == "gloo" or type(first).__name__ == "TorchGroup"
        return found

    return body


@pytest.fixture(scope="module")
def on_gloo(three_hosts: Cluster) -> Callable[[bool], list[Any]]:
    @cache
    def run(has_default: bool) -> list[Any]:
        body = _transfer(three_hosts.hosts, "gloo", "gloo" if has_default else "")
        return run_ranks(4, body, init=False, env=SECRET)

    return run


@pytest.mark.parametrize("default", ["", "gloo", "allranks"])
@pytest.mark.parametrize("backend", ["allranks", "instead of gloo"])
def test_groups_of_two_worlds_on_two_hosts_give_the_results_of_gloo(
    three_hosts: Cluster, on_gloo: Callable[[bool], list[Any]], backend: str, default: str
) -> None:
    if default == "gloo" and backend != "allranks":
        default = backend
    body = _transfer(three_hosts.hosts, backend, default)
    assert run_ranks(4, body, init=False, env=SECRET) == on_gloo(bool(default))
