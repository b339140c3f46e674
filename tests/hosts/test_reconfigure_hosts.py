"""Reconfiguration of groups on several hosts: the stores of the handles listen on TCP ports and require the secret."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.cluster import Cluster
from support.handles import pass_on, wait_for

SECRET = "a secret of the tests, long enough"


def on_hosts(hosts: Cluster, places: list[int], body: Callable[[Any], Any], **others: Any) -> list[Any]:
    """Run ``body`` on rank r of host ``places[r]``, each rank in its own world."""

    def enter_and_run() -> Any:
        hosts.hosts[places[int(os.environ["RANK"])]].enter()
        os.environ.pop("LOCAL_WORLD_SIZE")  # set by run_ranks, which assumes that all ranks are on one host
        dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), timeout=30)
        try:
            return body(dist.group.WORLD)
        finally:
            dist.destroy_process_group()

    env = {"ALLRANKS_SECRET": SECRET, **others.pop("env", {})}
    return run_ranks(len(places), enter_and_run, init=False, env=env, timeout_s=90, **others)


def me() -> int:
    return int(os.environ["RANK"])


def place() -> tuple[int, int, float]:
    tensor = torch.tensor([2.0 ** me()])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


@pytest.mark.parametrize("places", [[0, 1], [0, 0, 1], [0, 1, 2, 1]], ids=str)
def test_reconfigure_merges_shrinks_and_reports_a_killed_process(
    three_hosts: Cluster, tmp_path: Path, places: list[int]
) -> None:
    size = len(places)

    def body(group: Any) -> float:
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), size)
        group.reconfigure(1, handles)
        assert place() == (me(), size, 2**size - 1)
        group.reconfigure(2, set(handles))
        everyone = place()
        assert everyone[1:] == (size, 2**size - 1)
        group.reconfigure(3, handles[::-1])
        assert place() == (size - 1 - me(), size, 2**size - 1)
        if me() == size - 1:
            pass_on(tmp_path, "pid", str(os.getpid()), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        pid = wait_for(tmp_path / f"pid.{size - 1}")
        began = time.monotonic()
        with pytest.raises(dist.JoinError, match=rf"rank {size - 1} .*pid {pid}\) is gone"):
            group.reconfigure(4, handles, timeout=20)
        seconds = time.monotonic() - began
        group.reconfigure(5, handles[:-1])
        assert place() == (me(), size - 1, 2 ** (size - 1) - 1)
        return seconds

    found = on_hosts(three_hosts, places, body, may_die=(size - 1,))
    assert max(found[:-1]) < 10


def test_unplugged_host_is_reported_at_the_timeout(three_hosts: Cluster, tmp_path: Path) -> None:
    numbers = itertools.count(1)

    def body(group: Any) -> None:
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 3)
        group.reconfigure(next(numbers), handles)
        if me() == 2:
            three_hosts.cut(2)
            pass_on(tmp_path, "unplugged", "", 0)
            wait_for(tmp_path / "seen.0")
            three_hosts.plug(2)
            pass_on(tmp_path, "plugged", "", 0)
            next(numbers), next(numbers)
        else:
            wait_for(tmp_path / "unplugged.2")
            with pytest.raises(dist.JoinError, match=r"(?s)rank 2"):
                group.reconfigure(next(numbers), handles, timeout=3)
            group.reconfigure(next(numbers), handles[:2])
            assert place() == (me(), 2, 3)
            pass_on(tmp_path, "seen", "", 0)
            wait_for(tmp_path / "plugged.2")
        group.reconfigure(next(numbers), handles)
        assert place() == (me(), 3, 7)

    on_hosts(three_hosts, [0, 1, 2], body)


def test_different_secret_is_refused(three_hosts: Cluster, tmp_path: Path) -> None:
    def body(group: Any) -> None:
        if me() == 1:
            os.environ["ALLRANKS_SECRET"] = "another secret, long enough as well"
        handles = pass_on(tmp_path, "all", group.reconfigure_handle(), 2)
        if me() == 1:
            with pytest.raises(dist.SecretError):
                group.reconfigure(1, handles, timeout=3)
        else:
            with pytest.raises(dist.AllranksError):
                group.reconfigure(1, handles, timeout=3)

    on_hosts(three_hosts, [0, 1], body)
