"""Groups on several hosts that lose ranks, leaders or whole hosts, and hosts that return."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.cluster import Cluster
from support.pending import expected, last_rank_ends

SECRET = "a secret of the tests, long enough"
_ports = itertools.count(29900)


def on_hosts(
    hosts: Cluster,
    places: list[int],
    body: Callable[[], Any],
    may_die: list[int],
    seconds: float = 60,
    timeout_s: float = 10,
) -> Any:
    """Run rank r on host ``places[r]``, and on host 0 a store that survives all ranks.

    Args:
        seconds: limit after which the run counts as hung.
        timeout_s: timeout of the group's calls.
    """
    port, size = next(_ports), len(places)

    def main() -> Any:
        rank = int(os.environ["RANK"])
        hosts.hosts[0 if rank == size else places[rank]].enter()
        os.environ.pop("ALLRANKS_STORE")
        if rank == size:
            store = dist.TCPStore("node0", port, is_master=True, wait_for_workers=False)
            store.wait([f"over/{r}" for r in range(size) if r not in may_die], seconds)
            return None
        store = dist.TCPStore("node0", port, is_master=False)
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timeout_s)
        try:
            return body()
        finally:
            store.set(f"over/{rank}", "")
            dist.destroy_process_group()

    return run_ranks(size + 1, main, init=False, env={"ALLRANKS_SECRET": SECRET}, may_die=may_die, timeout_s=seconds)[
        :-1
    ]


def _total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.full((5000,), 10.0 ** int(os.environ["RANK"]), dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item()


def _call_until_lost() -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        _total()
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("places", "dying"),
    [([0, 0, 1, 1], [3]), ([0, 0, 1, 1], [0]), ([0, 1, 1, 2], [1, 2]), ([0, 0, 1, 2], [3]), ([0, 1], [0])],
    ids=["a rank", "a leader", "a host's ranks", "a lone rank", "one of two"],
)
def test_survivors_shrink(three_hosts: Cluster, places: list[int], dying: list[int]) -> None:
    """Check that no rank waits for the timeout, which is longer than the limit of the test."""

    def main() -> Any:
        _total()
        if dist.get_rank() in dying:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError):
            _call_until_lost()
        group = dist.shrink_group([])
        return dist.get_rank(), [_total() for _ in range(3)], group.ranks

    found = on_hosts(three_hosts, places, main, dying, timeout_s=300)
    left = [rank for rank in range(len(places)) if rank not in dying]
    total = float(sum(10**rank for rank in left))
    for number, rank in enumerate(left):
        assert found[rank] == (number, [total] * 3, tuple(range(len(left))))


@pytest.mark.parametrize(("how", "left"), [("abort", 4), ("death", 3)])
def test_calls_pending_in_several_threads_end_and_all_go_on(three_hosts: Cluster, how: str, left: int) -> None:
    dying = [3] if how == "death" else []
    found = on_hosts(three_hosts, [0, 0, 1, 1], lambda: last_rank_ends(how), dying, timeout_s=300)
    for rank in range(left):
        pending = ["raised"] * (8 if rank < 3 else 0)
        assert found[rank] == (rank, left, pending, expected(left, rank))


def test_killed_rank_during_agree_and_shrink_of_a_subgroup(three_hosts: Cluster) -> None:
    def main() -> Any:
        rank, world, group = dist.get_rank(), dist.group.WORLD, dist.new_group([1, 2, 3])
        assert world is not None
        values = []
        while not world.failed_ranks():
            if rank == 2 and len(values) == 20:
                threading.Timer(0.002, os.kill, [os.getpid(), signal.SIGKILL]).start()
            values.append(world.agree(len(values) + rank + 1))
        smaller = world.shrink()
        total = None
        if rank:
            with pytest.raises(dist.PeerLostError):
                group.barrier()
            group = group.shrink()
            total = group.ranks, _total(group)
        return values, smaller.agree(7), _total(smaller), total

    found = on_hosts(three_hosts, [0, 0, 1, 2], main, [2], timeout_s=300)
    left = [found[rank] for rank in (0, 1, 3)]
    short = min(len(values) for values, *_ in left)
    assert {tuple(values[:short]) for values, *_ in left} == {tuple(left[0][0][:short])}
    assert left[0][0][: short - 1] == list(range(1, short))
    assert [rest for _, *rest in left] == [
        [7, 1011.0, None],
        [7, 1011.0, ((1, 3), 1010.0)],
        [7, 1011.0, ((1, 3), 1010.0)],
    ]


def test_unplugged_host_is_excluded_permanently(three_hosts: Cluster, tmp_path: Path) -> None:
    ready, over = tmp_path / "ready", tmp_path / "over"

    def main() -> Any:
        _total()
        rank = dist.get_rank()
        if rank == 2:
            ready.touch()
            with pytest.raises((dist.PeerLostError, dist.TimeoutError)):
                _call_until_lost()
            while not over.exists():
                time.sleep(0.05)
            with pytest.raises((dist.ExcludedError, dist.StoreLostError)):
                dist.group.WORLD.shrink()  # type: ignore[union-attr]
            return "out"
        with pytest.raises((dist.PeerLostError, dist.TimeoutError)):
            _call_until_lost()
        dist.shrink_group([])
        totals = [_total()]
        (tmp_path / f"shrunk{rank}").touch()
        while not over.exists():
            time.sleep(0.05)
        return [*totals, _total()]

    def unplug() -> None:
        while not ready.exists():
            time.sleep(0.05)
        three_hosts.cut(1)
        until = time.monotonic() + 40
        while time.monotonic() < until and not all((tmp_path / f"shrunk{rank}").exists() for rank in (0, 1)):
            time.sleep(0.05)
        three_hosts.plug(1)
        over.touch()

    thread = threading.Thread(target=unplug)
    thread.start()
    try:
        found = on_hosts(three_hosts, [0, 0, 1], main, [], timeout_s=30)
    finally:
        thread.join()
    assert found == [[11.0, 11.0], [11.0, 11.0], "out"]


def test_state_continues_after_losses_on_several_hosts(three_hosts: Cluster) -> None:
    def main() -> Any:
        weight = torch.zeros(1000)
        state = dist.resilience.State(weight=weight)
        first = dist.get_rank()
        for step in state.steps(40):
            with step:
                if (first == 3 and step.index == 11) or (first == 0 and step.index == 25):
                    os.kill(os.getpid(), signal.SIGKILL)
                gradient = torch.full((1000,), float(step.index))
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
                step.commit()
                weight += gradient
        return dist.get_world_size(), weight[0].item(), weight[-1].item()

    found = on_hosts(three_hosts, [0, 0, 1, 2], main, [0, 3])
    assert found[1] == found[2] == (2, 780.0, 780.0)
