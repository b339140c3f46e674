"""Operands and results that share memory: the right numbers, by a copy where need be; results that do are refused."""

import os
from collections.abc import Callable

import pytest
import torch
from overlaps import call_overlapping

import allranks as dist
from allranks.testing import run_ranks

SEEDS = range(int(os.environ.get("OVERLAP_SEEDS", "2")))
CALLS = 60


@pytest.mark.parametrize(
    ("engine", "ranks", "kind"),
    [("native", 3, "private"), ("native", 4, "shared"), ("tcp", 3, "private"), ("gloo", 3, "private")],
)
def test_made_up_calls(engine: str, ranks: int, kind: str) -> None:
    def body() -> None:
        dist.init_process_group(engine)
        for seed in SEEDS:
            call_overlapping(seed, CALLS, kind)
        dist.destroy_process_group()

    run_ranks(ranks, body, init=False, timeout_s=120)


@pytest.mark.parametrize("engine", ["native", "tcp", "gloo"])
def test_results_that_share_memory_are_refused(engine: str) -> None:
    def body() -> None:
        dist.init_process_group(engine)
        rank, size = dist.get_rank(), dist.get_world_size()
        memory, mine = torch.zeros(300_000), torch.ones(50_000)

        def refused(verb: Callable[..., object], *args: object, **options: object) -> None:
            with pytest.raises(dist.UsageError, match="share memory"):
                verb(*args, **options)
            assert not memory.any()

        def parts(step: int) -> list[torch.Tensor]:
            return [memory[step * i : step * i + 50_000] for i in range(size)]

        for later in (False, True):
            for shared in (
                [memory[:50_000]] * size,
                parts(49_999),
                parts(1)[::-1],
                [memory[:50_000], memory[9:50_009]],
            ):
                refused(dist.all_gather, shared, mine, async_op=later)
                refused(dist.all_to_all, shared, [mine] * size, async_op=later)
                if rank == 1:
                    refused(dist.gather, mine, shared, 1, async_op=later)
            for spread in (memory[:1].expand(size * 50_000), memory[:150_000].as_strided((size, 50_000), (1, 1))):
                refused(dist.all_gather_single, spread, mine, async_op=later)
                refused(dist.all_reduce, spread, async_op=later)
                refused(dist.reduce_scatter, spread, [spread] * size, async_op=later)
        refused(dist.all_reduce_coalesced, parts(100))
        refused(dist.all_gather_coalesced, [parts(50_000)] * size, [mine] * size)
        wide = torch.zeros(50_000, size)
        dist.all_gather([wide[:, r] for r in range(size)], mine * rank)  # interleaved, but apart
        assert (wide == torch.arange(size)).all()
        dist.destroy_process_group()

    run_ranks(2, body, init=False)
