"""Checkpoints on hosts with separate disks and equal paths."""

from __future__ import annotations

import itertools
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import CheckpointError, checkpoint
from allranks.testing import run_ranks
from support.cluster import Cluster

SECRET = "a secret of the tests, long enough"
_ports = itertools.count(29980)


@pytest.fixture
def disks(three_hosts: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Path at which each host has a separate, empty file system."""
    for host in three_hosts.hosts:
        subprocess.run(host.inside("mount", "-t", "tmpfs", "none", str(tmp_path)), check=True)
    try:
        yield tmp_path
    finally:
        for host in three_hosts.hosts:
            subprocess.run(host.inside("umount", str(tmp_path)), check=True)


def on_hosts(hosts: Cluster, places: list[int], body: Callable[[], Any]) -> list[Any]:
    """Run rank r on host ``places[r]``."""
    port = next(_ports)

    def main() -> Any:
        rank = int(os.environ["RANK"])
        hosts.hosts[places[rank]].enter()
        os.environ.pop("ALLRANKS_STORE")
        dist.init_process_group(
            init_method=f"tcp://node{places[0]}:{port}", rank=rank, world_size=len(places), timeout=30
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="checkpoint")
                return body()
        finally:
            dist.destroy_process_group()

    return run_ranks(len(places), main, init=False, env={"ALLRANKS_SECRET": SECRET})


def test_shares_on_separate_disks_with_equal_paths(three_hosts: Cluster, disks: Path) -> None:
    """Saves on two hosts, then loads on the same hosts and a third one with an empty disk.

    A load on one host alone is refused.
    """

    def state(rank: int, step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        shard = checkpoint.Shard(torch.full((2, 5), float(rank + step)), (2 * rank, 0), (6, 5))
        return {"x": torch.randn(1_200_000, generator=generator), "mine": torch.tensor(rank), "s": shard, "step": step}

    def saves() -> list[str]:
        rank = dist.get_rank()
        checkpoint.save(state(rank, 1), disks, step=1, keep=1)
        checkpoint.save_async(state(rank, 2), disks, step=2, keep=1).wait(60)
        return [info.path.name for info in checkpoint.list(disks)]

    (first,), (second,), (third,) = on_hosts(three_hosts, [0, 1, 1], saves)
    assert first.startswith("step-0000000002-share-1-of-2-")
    assert second == third == first.replace("share-1", "share-2")
    assert not list(disks.iterdir())

    def loads() -> None:
        last = checkpoint.latest(disks, group=dist.group.WORLD)
        assert last is not None
        found, right = checkpoint.load(last), state(dist.get_rank(), 2)
        assert torch.equal(found["x"], right["x"])
        assert torch.equal(found["s"], torch.cat([state(rank, 2)["s"].tensor for rank in range(3)]))
        assert (found["mine"], found["step"]) == (dist.get_rank(), 2)

    on_hosts(three_hosts, [2, 1, 0], loads)

    def alone() -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(disks)
        return str(caught.value)

    (words,) = on_hosts(three_hosts, [1], alone)
    assert "has only share 2 of 2 of step 2; missing: share 1 (written by rank 0 on node0)" in words
