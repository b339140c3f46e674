"""Levels: if many ranks share a host, they synchronize in groups, with unchanged result bits and errors."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import allranks as dist
from allranks._engines.native.engine import NativeEngine
from allranks._engines.native.tuning import read_topology
from allranks.testing import RankError, run_ranks

RANKS = 7
COUNTS = [1, 20, 23, 700, 40_000]


def _given(rank: int, count: int) -> torch.Tensor:
    return torch.linspace(0.1, 1.7, count) ** (1 + rank)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_topology_variable_determines_the_groups(tmp_path: Path) -> None:
    """Form the same groups of nonadjacent ranks on every rank. Sums have the bits of a sum in rank order."""
    one, other = sorted(os.sched_getaffinity(0))[:2]

    def main() -> list[list[int]]:
        rank = int(os.environ["RANK"])
        os.sched_setaffinity(0, {(one, other)[rank % 2]})
        dist.init_process_group()
        dist.barrier()
        for count in COUNTS:
            tensor, expected = _given(rank, count), _given(0, count)
            for r in range(1, RANKS):
                expected += _given(r, count)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected)
            dist.broadcast(tensor, 5)
            assert torch.equal(tensor, expected)
        engine = dist.group.WORLD._engine
        assert isinstance(engine, NativeEngine)
        return engine.comm.near()

    env = {**tuned(tmp_path, levels_from=3, crowded_levels_from=3), "ALLRANKS_TOPOLOGY": f"{one} / {other}"}
    for near in run_ranks(RANKS, main, env=env, init=False):
        assert near == [[0, 2, 4, 6], [1, 3, 5]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-3/3-5", "CPU 3 occurs twice"),
        ("0-3/", "'' is not a CPU or a range of CPUs"),
        ("0-3;4-7", "'0-3;4-7' is not a CPU or a range of CPUs"),
        ("5-4", "'5-4' is not within 0-1023"),
        ("0/1024", "'1024' is not within 0-1023"),
    ],
)
def test_invalid_topology_is_refused(text: str, said: str) -> None:
    with pytest.raises(dist.ConfigError, match=re.escape(said)):
        read_topology({"ALLRANKS_TOPOLOGY": text})


@pytest.fixture
def levels(tmp_path: Path) -> dict[str, str]:
    """Environment that forms groups of two or three ranks, also on this machine."""
    return tuned(tmp_path, levels_from=3, crowded_levels_from=3, group=3)


def tuned(folder: Path, **table: int) -> dict[str, str]:
    path = folder / "tuning.json"
    path.write_text(json.dumps({"tuning": table}))
    return {"ALLRANKS_TUNING": str(path)}


def _all_verbs() -> list[torch.Tensor]:
    me, n = dist.get_rank(), dist.get_world_size()
    found: list[torch.Tensor] = []
    dist.barrier()  # levels exist from the second call
    for count in COUNTS:
        x = torch.linspace(0.1, 1.7, count) ** (1 + me)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            y = x.clone()
            dist.all_reduce(y, op)
            found.append(y)
        for root in (0, n - 1, n // 2):
            y = x.clone()
            dist.reduce(y, root)
            found.append(y if me == root else torch.zeros(1))
            y = x.clone()
            dist.broadcast(y, root)
            found.append(y)
            into = [torch.empty(count) for _ in range(n)] if me == root else None
            dist.gather(x, into, dst=root)
            found += into or []
            y = torch.empty(count)
            dist.scatter(y, [x * r for r in range(n)] if me == root else None, src=root)
            found.append(y)
        into = [torch.empty(count) for _ in range(n)]
        dist.all_gather(into, x)
        found += into
        y = torch.empty(count)
        dist.reduce_scatter(y, [x * r for r in range(n)])
        found.append(y)
        y = torch.empty(n * count)
        dist.all_to_all_single(y, x.repeat(n))
        found.append(y)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    found.append(y)
    return found


def test_every_verb_has_the_same_bits_with_and_without_levels(levels: dict[str, str]) -> None:
    flat, grouped = run_ranks(RANKS, _all_verbs), run_ranks(RANKS, _all_verbs, env=levels)
    for mine, others in zip(flat, grouped, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


@pytest.mark.parametrize("lost", [0, 2, 3, 6])  # leaders and other ranks
def test_killed_rank_is_named_with_levels(lost: int, levels: dict[str, str]) -> None:
    def main() -> str:
        x = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(x)
        if dist.get_rank() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError) as error:
            dist.all_reduce(x)
        return str(error.value)

    for rank, said in enumerate(run_ranks(RANKS, main, env=levels, may_die=[lost])):
        if rank != lost:
            assert said is not None
            assert re.search(rf"rank {lost}\b", said), said


def test_mismatch_names_the_rank_with_levels(levels: dict[str, str]) -> None:
    def main() -> str:
        for _ in range(3):
            dist.barrier()
        with pytest.raises(dist.MismatchError) as error:
            dist.all_reduce(torch.ones(4 if dist.get_rank() == 5 else 3))
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == RANKS
        return str(error.value)

    for said in run_ranks(RANKS, main, env={**levels, "ALLRANKS_DEBUG": "DETAIL"}):
        assert said is not None
        assert "rank 5" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "has no table 'tuning'"),
        ('{"tuning": {"group": 99}}', "group=99. Expected a whole number in 2..16"),
        ('{"tuning": {"levles": 3}}', "'levles' is not known. Expected some of levels_from"),
        (None, "cannot be read: No such file"),
    ],
)
def test_invalid_tuning_table_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RankError, match=re.escape(said)):
        run_ranks(2, dist.barrier, env={"ALLRANKS_TUNING": str(path)})
