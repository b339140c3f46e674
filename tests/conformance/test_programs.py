"""Random programs that run under torch.distributed on gloo and under allranks, in the same processes: equal values."""

import random
import socket
import warnings
from typing import Any

import pytest
import torch

import allranks
from allranks.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bfloat16]
VERBS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "ring",
    "all_gather_object",
    "broadcast_object_list",
]
OPS = ["SUM", "MIN", "MAX", "PRODUCT"]


def tensor(rng: random.Random, rank: int, dtype: torch.dtype, shape: list[int], turned: bool) -> torch.Tensor:
    """Small integers, exact in every dtype and order; the same shape on all ranks."""
    seed = rng.randrange(1 << 30)
    values = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed + rank)).to(dtype)
    return values.mT.contiguous().mT if turned and values.dim() >= 2 else values


def step(dist: Any, rng: random.Random, group: Any, rank: int, size: int) -> list[torch.Tensor]:
    """One call, drawn from ``rng``, which is in the same state on every rank and under both libraries."""
    verb, dtype = rng.choice(VERBS), rng.choice(DTYPES)
    shape = [
        rng.choice([0, 1, 3, 7]) if rng.random() < 0.2 else rng.choice([1, 2, 5, 40])
        for _ in range(rng.randrange(1, 4))
    ]
    root, asynchronous = rng.randrange(size), rng.random() < 0.5
    op = getattr(dist.ReduceOp, rng.choice(OPS))
    # gloo wants contiguous tensors; what it returns for them is what ours must for others.
    turned = rng.random() < 0.3 and dist is allranks

    def make() -> torch.Tensor:
        return tensor(rng, rank, dtype, shape, turned)

    mine = make()
    pieces = [make() for _ in range(size)]
    outs = [torch.zeros_like(p) for p in pieces]
    work = None
    if verb == "all_reduce":
        work, result = dist.all_reduce(mine, op, group=group, async_op=asynchronous), [mine]
    elif verb == "reduce":
        work = dist.reduce(mine, group_dst=root, op=op, group=group, async_op=asynchronous)
        result = [mine] if rank == root else []
    elif verb == "broadcast":
        work, result = dist.broadcast(mine, group_src=root, group=group, async_op=asynchronous), [mine]
    elif verb == "all_gather":
        work, result = dist.all_gather(outs, mine, group=group, async_op=asynchronous), outs
    elif verb == "all_gather_into_tensor":
        whole = torch.zeros([size * shape[0], *shape[1:]], dtype=dtype)
        work, result = dist.all_gather_into_tensor(whole, mine, group=group, async_op=asynchronous), [whole]
    elif verb == "gather":
        here = outs if rank == root else None
        work = dist.gather(mine, here, group_dst=root, group=group, async_op=asynchronous)
        result = here or []
    elif verb == "scatter":
        work = dist.scatter(mine, pieces if rank == root else None, group_src=root, group=group, async_op=asynchronous)
        result = [mine]
    elif verb == "reduce_scatter":
        work, result = dist.reduce_scatter(mine, pieces, op, group=group, async_op=asynchronous), [mine]
    elif verb == "reduce_scatter_tensor":
        whole = torch.cat(pieces)
        work, result = dist.reduce_scatter_tensor(mine, whole, op, group=group, async_op=asynchronous), [mine]
    elif verb == "all_to_all":
        work, result = dist.all_to_all(outs, pieces, group=group, async_op=asynchronous), outs
    elif verb == "all_to_all_single":
        sizes = [[rng.randrange(3) for _ in range(size)] for _ in range(size)]
        rows = torch.arange(sum(sizes[rank]) * 2).reshape(-1, 2).to(dtype) + rank
        arriving = [sizes[r][rank] for r in range(size)]
        out = torch.zeros(sum(arriving), 2, dtype=dtype)
        work = dist.all_to_all_single(out, rows, arriving, sizes[rank], group=group, async_op=asynchronous)
        result = [out]
    elif verb == "ring":
        sending = dist.isend(mine, group_dst=(rank + 1) % size, group=group, tag=3)
        receiving = dist.irecv(outs[0], group_src=(rank - 1) % size, group=group, tag=3)
        sending.wait()
        receiving.wait()
        result = [outs[0]]
    elif verb == "all_gather_object":
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "mine": mine.tolist()}, group=group)
        result = [torch.tensor(o["mine"], dtype=dtype) for o in objects]
    else:
        objects = [rank, mine.tolist()]
        dist.broadcast_object_list(objects, group_src=root, group=group)
        result = [torch.tensor(objects[1], dtype=dtype)]
    if work is not None:
        work.wait()
    return [t.clone() for t in result]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equal_values(ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body() -> int:
        import torch.distributed as peer

        warnings.simplefilter("ignore", FutureWarning)  # torch's about its own old names
        world_rank = allranks.get_rank()
        peer.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=ranks)
        some = list(range(1, ranks))
        groups = [(None, None), (peer.new_group(some), allranks.new_group(some))]
        for seed in range(150):
            theirs, ours = groups[seed % 4 == 3]
            if seed % 4 == 3 and world_rank == 0:
                continue
            rank, size = allranks.get_rank(ours), allranks.get_world_size(ours)
            if size == 1:
                continue
            expected = step(peer, random.Random(seed), theirs, rank, size)
            actual = step(allranks, random.Random(seed), ours, rank, size)
            assert len(actual) == len(expected), seed
            for a, b in zip(actual, expected, strict=True):
                assert a.dtype == b.dtype, seed
                assert torch.equal(a, b), f"seed {seed}: {a} is not {b}"
        peer.destroy_process_group()
        return 1

    assert run_ranks(ranks, body, timeout_s=100) == [1] * ranks
