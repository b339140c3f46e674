"""Groups after a loss: failed_ranks, abort, agree, shrink and shrink_group, with killed ranks.

Each world consists of real processes on a store that outlives them. The tests compare the results of the surviving
ranks with the expected values.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.pending import expected, last_rank_ends


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _call_until_lost(group: dist.ProcessGroup) -> None:
    for _ in range(10000):
        _total(group)


def _total(group: dist.ProcessGroup) -> float:
    """Return the sum over the ranks of the group of 10 to the power of the rank in the first world."""
    tensor = torch.tensor([10.0 ** int(os.environ["RANK"])], dtype=torch.float64)
    group.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("backend", ["native", "tcp", "gloo"])
def test_survivors_continue_after_shrink(backend: str) -> None:
    def main() -> Any:
        dist.init_process_group(backend, timeout=20)
        world = dist.group.WORLD
        assert world is not None
        _total(world)
        if dist.get_rank() == 1:
            _die()
        with pytest.raises((dist.PeerLostError, dist.TimeoutError)):
            _call_until_lost(world)
        smaller = world.shrink()
        sums = [_total(smaller) for _ in range(3)]
        with pytest.raises(dist.NotInitializedError):
            world.barrier()
        return smaller.rank(), smaller.size(), smaller.ranks, sums

    found = run_ranks(4, main, init=False, may_die=[1])
    for place, rank in enumerate((0, 2, 3)):
        assert found[rank] == (place, 3, (0, 2, 3), [1101.0] * 3)


def test_shrink_succeeds_if_rank_0_dies_and_a_rank_dies_during_the_decision() -> None:
    def main() -> Any:
        world = dist.group.WORLD
        assert world is not None
        rank = dist.get_rank()
        if rank in (0, 3):
            time.sleep(0.05 * rank)
            _die()
        with pytest.raises(dist.PeerLostError):
            _call_until_lost(world)
        if rank == 4:
            threading.Timer(random.Random(os.getpid()).random() * 0.05, _die).start()
        group = world.shrink()
        try:
            return group.ranks, _total(group)
        except dist.PeerLostError:
            group = group.shrink()
            return group.ranks, _total(group)

    for _ in range(5):
        found = run_ranks(6, main, may_die=[0, 3, 4])
        for rank in (1, 2, 5):
            assert found[rank] in [((1, 2, 5), 100110.0), ((1, 2, 4, 5), 110110.0)], found
        assert len({found[rank] for rank in (1, 2, 5)}) == 1


def test_agree_returns_the_same_value_to_all_survivors() -> None:
    def main(seed: int) -> Any:
        world = dist.group.WORLD
        assert world is not None
        rank = dist.get_rank()
        pick = random.Random(seed)
        at, delay = pick.randrange(30), pick.random() * 2e-4
        values = []
        for n in range(60):
            if rank == 1 and n == at:
                threading.Thread(target=lambda: (time.sleep(delay), _die())).start()
            values.append(world.agree(n + rank + 1))
            if world.failed_ranks():
                break
        group = world.shrink()
        return values, group.agree(7), group.ranks

    for seed in range(8):
        found = run_ranks(3, main, seed, may_die=[1])
        (first, *rest), (second, *others) = found[0], found[2]
        assert rest == others == [7, (0, 2)]
        short = min(len(first), len(second))
        assert first[:short] == second[:short]
        assert first[: short - 1] == list(range(1, short))


def test_abort_ends_pending_calls_of_all_ranks() -> None:
    def main() -> Any:
        world = dist.group.WORLD
        assert world is not None
        rank = dist.get_rank()
        work = dist.irecv(torch.empty(4), 2, tag=9) if rank == 1 else None
        if rank == 2:
            time.sleep(0.3)
            world.abort()
        else:
            with pytest.raises(dist.AbortedError, match=r"rank 2 .* has called abort") as caught:
                world.all_reduce(torch.ones(1 << 20))
            assert caught.value.rank == 2
        if work is not None:
            with pytest.raises(dist.AbortedError):
                work.wait()
        with pytest.raises(dist.AbortedError):
            world.barrier()
        group = world.shrink()
        return group.size(), _total(group)

    assert run_ranks(3, main) == [(3, 111.0)] * 3


@pytest.mark.parametrize(("how", "left"), [("abort", 3), ("death", 2)])
def test_calls_pending_in_several_threads_end_and_all_go_on(how: str, left: int) -> None:
    found = run_ranks(3, lambda: last_rank_ends(how), may_die=[2] if how == "death" else [])
    for rank in range(left):
        pending = ["raised"] * (8 if rank < 2 else 0)
        assert found[rank] == (rank, left, pending, expected(left, rank))


def test_gloo_abort_ends_pending_calls_of_the_other_ranks() -> None:
    """Abort on one rank, which closes its connections long before the timeout. All ranks then form a new group."""

    def main() -> Any:
        dist.init_process_group("gloo", timeout=300)
        world = dist.group.WORLD
        assert world is not None
        if dist.get_rank() == 2:
            time.sleep(0.3)  # the other ranks are in their calls by then
            world.abort()
        else:
            pending = dist.irecv(torch.empty(4), 2)
            with pytest.raises(dist.AllranksError):
                _total(world)
            with pytest.raises(dist.AllranksError):
                pending.wait()
            world.abort()
        for call in (world.barrier, lambda: dist.send(torch.ones(1), 1 - dist.get_rank() % 2)):
            with pytest.raises(dist.AbortedError, match=r"this rank has called abort\(\)"):
                call()
        group = world.shrink()
        return group.rank(), group.size(), _total(group)

    assert run_ranks(3, main, init=False) == [(rank, 3, 111.0) for rank in range(3)]


def test_shrink_group_replaces_the_world() -> None:
    def main() -> Any:
        rank = dist.get_rank()
        pair = dist.new_group([0, 1])
        if rank == 2:
            return None
        with pytest.raises(dist.UsageError, match="excludes itself"):
            dist.shrink_group([rank])
        made = dist.shrink_group([2], shrink_flags=dist.SHRINK_ABORT)
        assert made is dist.group.WORLD
        if rank < 2:
            with pytest.raises(dist.NotInitializedError):
                pair.barrier()
        again = dist.new_group([0, 2])
        total = _total(made)
        return dist.get_rank(), dist.get_world_size(), total, None if dist.get_rank() == 1 else _total(again)

    found = run_ranks(4, main)
    assert found == [(0, 3, 1011.0, 1001.0), (1, 3, 1011.0, None), None, (2, 3, 1011.0, 1001.0)]


def test_subgroup_shrinks_without_effect_on_other_groups() -> None:
    def main() -> Any:
        rank = dist.get_rank()
        group = dist.new_group([0, 1, 2])
        other = dist.new_group([0, 3])
        if rank == 1:
            _die()
        if rank == 3:
            return _total(other)
        with pytest.raises(dist.PeerLostError):
            _call_until_lost(group)
        group = group.shrink()
        return group.ranks, _total(group), _total(other) if rank == 0 else None

    found = run_ranks(4, main, may_die=[1])
    assert found == [((0, 2), 101.0, 1001.0), None, ((0, 2), 101.0, None), 1001.0]


def test_rank_that_misses_the_shrink_timeout_is_excluded() -> None:
    def main() -> Any:
        world = dist.group.WORLD
        assert world is not None
        if dist.get_rank() == 2:
            time.sleep(2.5)
            with pytest.raises(dist.AbortedError):
                world.barrier()
            with pytest.raises(dist.ExcludedError, match=r"rank 2 .*: ranks 0-1 continued without it, in generation 1"):
                world.shrink()
            return None
        world.abort()
        group = world.shrink(timeout=1)
        total = _total(group)
        group.agree()  # both ranks have their result before one of them exits
        time.sleep(2)
        return total

    assert run_ranks(3, main) == [11.0, 11.0, None]


def test_shrink_without_a_store_that_outlives_the_ranks_raises(tmp_path: Any) -> None:
    def main() -> None:
        rank = int(os.environ["RANK"])
        dist.init_process_group(init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        with pytest.raises(dist.UsageError, match="no store on which they can agree on a new group"):
            dist.group.WORLD.shrink()  # type: ignore[union-attr]

    run_ranks(2, main, init=False)
