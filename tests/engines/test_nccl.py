"""nccl, with a rank for each GPU that is here: one, mostly."""

import pytest
import torch

import allranks as dist
from allranks._engines.c10d import DTYPES, reduces
from allranks.testing import run_ranks

GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0

pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU, and a torch that was built with nccl")


@pytest.mark.parametrize("backend", ["nccl", None, "cpu:gloo,cuda:nccl"])
def test_every_verb(backend: str | None) -> None:
    def body() -> None:
        import os

        device = torch.device("cuda", int(os.environ["RANK"]))
        dist.init_process_group(backend, timeout=60, device_id=device)
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES:
            for op in dist.ReduceOp:
                if op is not dist.ReduceOp.PREMUL_SUM and reduces("nccl", dtype, op):
                    tensor = torch.ones(size, device=device).to(dtype)
                    dist.all_reduce(tensor, op)
                    total = size if op is dist.ReduceOp.SUM and dtype is not torch.bool else 1
                    assert tensor.tolist() == torch.full((size,), total).to(dtype).tolist()
        everyone = [float(i) for i in range(size)]
        mine = torch.tensor([float(rank)], device=device)
        rows = [torch.zeros(1, device=device) for _ in range(size)]
        dist.all_gather(rows, mine)
        assert torch.cat(rows).tolist() == everyone
        whole = torch.zeros(size, device=device)
        dist.all_gather_into_tensor(whole, mine, async_op=True).wait()
        assert whole.tolist() == everyone
        dist.all_to_all_single(whole.zero_(), mine.repeat(size))
        assert whole.tolist() == everyone
        dist.reduce_scatter_tensor(mine, whole)
        assert mine.item() == size * rank
        dist.broadcast(mine.fill_(rank), size - 1)
        assert mine.item() == size - 1
        dist.reduce(mine, 0)
        gathered = [torch.zeros(1, device=device) for _ in range(size)] if rank == 0 else None
        dist.gather(mine.fill_(rank), gathered)
        assert gathered is None or torch.cat(gathered).tolist() == everyone
        dist.scatter(mine, gathered)
        assert mine.item() == rank
        if size > 1:
            sending = dist.isend(mine, (rank + 1) % size)
            dist.recv(whole[:1], (rank - 1) % size)
            sending.wait()
            assert whole[0].item() == (rank - 1) % size
            with pytest.raises(dist.UsageError, match="from a given rank only"):
                dist.recv(mine)
        dist.barrier()
        half = dist.new_group(backend="nccl")
        dist.all_reduce(mine, group=half)
        assert mine.item() == sum(everyone)
        if backend != "nccl":
            cpu = torch.ones(1)
            dist.all_reduce(cpu)
            assert cpu.item() == size
        dist.destroy_process_group()

    run_ranks(GPUS, body, init=False)
