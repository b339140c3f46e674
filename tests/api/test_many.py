"""Many ranks, and many groups that are created and destroyed."""

import gc
import os

import torch

import allranks as dist
from allranks.testing import run_ranks


def test_every_verb_works_with_64_ranks() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for n in (1, 5000):  # 5000 float64 to or from each of 64 ranks: through the rings
            mine = torch.arange(n, dtype=torch.float64) + rank
            alls = torch.cat([torch.arange(n, dtype=torch.float64) + r for r in range(size)])
            total = alls.view(size, n).sum(0)
            root = 63 if n == 1 else 17

            tensor = mine.clone()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total)
            tensor = mine.clone()
            dist.reduce(tensor, root)
            assert torch.equal(tensor, total if rank == root else mine)
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, mine - rank + root)
            tensor = torch.empty_like(alls)
            dist.all_gather_into_tensor(tensor, mine)
            assert torch.equal(tensor, alls)
            outs = [torch.empty_like(mine) for _ in range(size)]
            dist.gather(mine, outs if rank == root else None, root)
            if rank == root:
                assert torch.equal(torch.cat(outs), alls)
            tensor = torch.empty_like(mine)
            dist.scatter(tensor, list(alls.chunk(size)) if rank == root else None, root)
            assert torch.equal(tensor, mine)
            dist.reduce_scatter_tensor(tensor, alls * (rank + 1))
            assert torch.equal(tensor, mine * sum(range(1, size + 1)))
            tensor = torch.empty_like(alls)
            dist.all_to_all_single(tensor, alls + 1000 * rank)
            assert torch.equal(tensor.view(size, n), mine + 1000 * torch.arange(size).view(-1, 1))
            dist.barrier()
            tensor = torch.empty_like(mine)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, (rank + 1) % size),
                    dist.P2POp(dist.irecv, tensor, (rank - 1) % size),
                ]
            )
            for work in works:
                work.wait()
            assert torch.equal(tensor, mine - rank + (rank - 1) % size)
        objects = [None] * size
        dist.all_gather_object(objects, rank)
        assert objects == list(range(size))

    run_ranks(64, body, timeout_s=300)


def test_1000_groups_leak_no_descriptors_mappings_or_memory() -> None:
    def body() -> None:
        def held() -> tuple[int, int]:
            with open("/proc/self/maps") as maps:
                return len(os.listdir("/proc/self/fd")), sum("allranks" in line for line in maps)

        def resident_kib() -> int:
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

        def make(count: int) -> None:
            for i in range(count):
                group = dist.new_group([0, 1] if i % 2 else [1, 0, 2])
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    tensor = torch.ones(3)
                    work = dist.all_reduce(tensor, group=group, async_op=i % 10 == 0)
                    if work is not None:
                        work.wait()
                    dist.destroy_process_group(group)

        make(50)
        gc.collect()
        before, before_kib = held(), resident_kib()
        make(1000)
        gc.collect()
        assert held() == before
        assert resident_kib() - before_kib < 4096

    run_ranks(3, body, timeout_s=300)
