"""Overlapping memory: operands may share memory with results; results that share memory are refused."""

import os
from collections.abc import Callable

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks
from support.overlaps import call_overlapping

SEEDS = range(int(os.environ.get("OVERLAP_SEEDS", "2")))
CALLS = 60


@pytest.mark.parametrize(
    ("engine", "ranks", "kind"),
    [("native", 3, "private"), ("native", 4, "shared"), ("tcp", 3, "private"), ("gloo", 3, "private")],
)
def test_random_calls_with_overlapping_memory_give_correct_results(engine: str, ranks: int, kind: str) -> None:
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
        refused(dist.all_reduce_multigpu, parts(100))
        refused(dist.broadcast_multigpu, parts(100), 0)
        refused(dist.all_gather_multigpu, [parts(50_000) * 2] * size, [mine] * size)
        refused(dist.reduce_scatter_multigpu, parts(49_999), [[mine] * size * size] * size)
        wide = torch.zeros(50_000, size)
        dist.all_gather([wide[:, r] for r in range(size)], mine * rank)  # interleaved without overlap
        assert (wide == torch.arange(size)).all()
        dist.destroy_process_group()

    run_ranks(2, body, init=False)


def test_torch_multi_tensor_calls_with_overlapping_results_are_refused() -> None:
    """Call methods of torch's group, torch's functions, and torch's coalescing manager."""

    def body() -> None:
        td = torch.distributed
        pg, size = td.group.WORLD, td.get_world_size()
        memory, mine = torch.zeros(100), torch.ones(4)
        near = [memory[:8], memory[7:15]]
        gathered = [[memory[:4], memory[4:8]], [memory[4:8], memory[:4]]]

        def gather_together() -> None:
            with td._coalescing_manager():
                for output in near:
                    td.all_gather_into_tensor(output, mine)

        def scatter_together() -> None:
            with td._coalescing_manager():
                for output in near:
                    td.reduce_scatter_tensor(output, torch.ones(8 * size))

        for call in (
            lambda: pg.allreduce(near),
            lambda: pg.allreduce_coalesced(near),
            lambda: td.all_reduce_coalesced(near),
            lambda: pg.broadcast(near),
            lambda: pg.allgather([[memory[:4]] * size * 2] * 2, [mine, mine]),
            lambda: pg.allgather_coalesced(gathered, [mine, mine]),
            lambda: pg.allgather_into_tensor_coalesced(near, [mine, mine]),
            lambda: pg.reduce_scatter_tensor_coalesced(near, [torch.ones(8 * size)] * 2),
            gather_together,
            scatter_together,
        ):
            with pytest.raises(ValueError, match="share memory"):
                call()
            assert not memory.any()
        td.all_reduce_coalesced([memory[:8], memory[8:16]])  # adjacent without overlap
        td.barrier()

    run_ranks(2, body)
