"""empty_shared: every verb gives the result of private tensors, and the memory is returned."""

import gc

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

COUNT = 70_000  # float32 elements: more than two slots, and not a multiple of a slot


def operand(rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def shared(values: torch.Tensor) -> torch.Tensor:
    return dist.empty_shared(values.shape, values.dtype).copy_(values)


def counted() -> int:
    return dist.stats().shared


def every_verb(make: object) -> dict[str, torch.Tensor]:
    """Return the result of each verb. ``make`` creates the operands from values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results: dict[str, torch.Tensor] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.premul_sum(rank + 2)):
        tensor = make(operand(rank))
        dist.all_reduce(tensor, op)
        results[f"all_reduce {op}"] = tensor.clone()
    for root in range(size):
        tensor = make(operand(rank))
        dist.reduce(tensor, root)
        results[f"reduce {root}"] = tensor.clone()
        tensor = make(operand(rank))
        dist.broadcast(tensor, root)
        results[f"broadcast {root}"] = tensor.clone()
        out = make(torch.zeros(COUNT))
        pieces = make(operand(rank, size * COUNT)).chunk(size)
        dist.scatter(out, list(pieces) if rank == root else None, root)
        results[f"scatter {root}"] = out.clone()
        outs = [torch.empty(COUNT) for _ in range(size)]
        dist.gather(make(operand(rank)), outs if rank == root else None, root)
        if rank == root:
            results[f"gather {root}"] = torch.cat(outs)
    out = make(torch.zeros(size * COUNT))
    dist.all_gather_into_tensor(out, make(operand(rank)))
    results["all_gather"] = out.clone()
    out = make(torch.zeros(COUNT))
    dist.reduce_scatter_tensor(out, make(operand(rank, size * COUNT)))
    results["reduce_scatter"] = out.clone()
    out = make(torch.zeros(size * COUNT))
    dist.all_to_all_single(out, make(operand(rank, size * COUNT)))
    results["all_to_all"] = out.clone()
    sends = [(rank + to) % size * COUNT for to in range(size)]
    gets = [(source + rank) % size * COUNT for source in range(size)]
    out = make(torch.zeros(sum(gets)))
    dist.all_to_all_single(out, make(operand(rank, sum(sends))), gets, sends)
    results["all_to_all, uneven"] = out.clone()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_every_verb_gives_equal_results_on_shared_and_private_tensors(size: int) -> None:
    def body() -> None:
        private = every_verb(torch.clone)
        assert counted() == 0
        for name, result in every_verb(shared).items():
            assert torch.equal(result, private[name]), name
        # 3 all_reduces (premul_sum uses a copy), 3 verbs per root (the tensors of scatter are in two blocks), 4 others.
        assert counted() == 3 + 3 * size + 4
        before = counted()
        # If the tensor of one rank is private, every rank treats its tensor as private.
        mixed = every_verb(shared if dist.get_rank() != 1 else lambda values: shared(values).clone())
        for name, result in mixed.items():
            assert torch.equal(result, private[name]), name
        assert counted() == before

    run_ranks(size, body)


def test_scatter_within_one_shared_block_needs_no_copy() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        block = dist.empty_shared((size + 1, COUNT))
        pieces = block[:size].copy_(operand(7, size * COUNT).view(size, COUNT))
        dist.scatter(block[size], list(pieces) if rank == 1 else None, 1)
        assert torch.equal(block[size], operand(7, size * COUNT).view(size, COUNT)[rank])
        assert counted() == 1

    run_ranks(3, body)


def test_views_of_shared_tensors_mix_with_private_tensors() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        expected = sum(operand(r) for r in range(size))
        tensor = dist.empty_shared((3, COUNT + 5))
        part = tensor.view(-1)[100 * rank : 100 * rank + COUNT]  # another offset on each rank
        tensor.fill_(7)
        dist.all_reduce(part.copy_(operand(rank)))
        assert counted() == 1
        assert torch.equal(part, expected)
        assert (tensor.view(-1)[: 100 * rank] == 7).all()
        assert (tensor.view(-1)[100 * rank + COUNT :] == 7).all()

        used = part.copy_(operand(rank)) if rank == 0 else operand(rank)  # private on the other ranks
        dist.all_reduce(used)
        assert torch.equal(used, expected)

        other = dist.empty_shared(COUNT).copy_(operand(rank))  # ranks use different blocks
        used = part.copy_(operand(rank)) if rank == 0 else other
        dist.all_reduce(used)
        assert torch.equal(used, expected)

        pair = dist.new_group([0, 1])  # not the group of the shared tensor
        if rank < 2:
            dist.all_reduce(part.copy_(operand(rank)), group=pair)
            assert torch.equal(part, operand(0) + operand(1))

        work = dist.all_reduce(part.copy_(operand(rank)), async_op=True)
        work.wait()
        assert torch.equal(part, expected)

        ours = dist.empty_shared(COUNT, group=pair) if rank < 2 else torch.empty(0)
        if rank < 2:
            dist.all_reduce(ours.copy_(operand(rank)), group=pair)
            assert torch.equal(ours, operand(0) + operand(1))

    run_ranks(3, body)


def test_empty_shared_accepts_shapes_and_dtypes() -> None:
    def body() -> None:
        assert dist.empty_shared(()).shape == ()
        assert dist.empty_shared([2, 0, 3]).shape == (2, 0, 3)
        assert dist.empty_shared(5).dtype == torch.get_default_dtype()
        for dtype in (torch.bool, torch.bfloat16, torch.complex128, torch.int64, torch.float8_e5m2):
            tensor = dist.empty_shared((2, 3), dtype)
            assert (tensor.shape, tensor.dtype) == ((2, 3), dtype)
            assert tensor.is_contiguous()
        parameter = torch.nn.Parameter(dist.empty_shared((4, 4)).zero_())
        (parameter * 2).sum().backward()
        assert (parameter.grad == 2).all()
        with pytest.raises(dist.UsageError, match="shape"):
            dist.empty_shared((2, -1))
        with pytest.raises(dist.MismatchError, match=r"rank 0: 4, rank 1: 8"):
            dist.empty_shared(1 + dist.get_rank())
        dist.barrier()

    run_ranks(2, body)


def test_shared_memory_is_unmapped_with_its_last_tensor() -> None:
    def body() -> None:
        def mapped() -> int:
            with open("/proc/self/maps") as maps:
                return sum("memfd:allranks" in line for line in maps)

        dist.all_reduce(torch.ones(1))
        before = mapped()
        for _ in range(20):
            tensor = dist.empty_shared(100_000)
            dist.all_reduce(tensor.zero_())
        assert mapped() == before + 2
        view = tensor[:10]
        del tensor
        gc.collect()
        assert mapped() == before + 2  # a view keeps the memory mapped
        view.fill_(1)
        del view
        gc.collect()
        assert mapped() == before

        kept = dist.empty_shared(10).fill_(3)
        dist.destroy_process_group()
        assert kept.sum() == 30

    run_ranks(2, body)


def test_failed_allocation_on_one_rank_is_an_error_on_every_rank() -> None:
    def body() -> None:
        import resource

        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(dist.AllranksError, match=r"could not be allocated on every rank.*(large|rank 1)"):
            dist.empty_shared(1 << 22)
        dist.barrier()

    run_ranks(2, body)


def test_empty_shared_requires_membership_in_the_group() -> None:
    with pytest.raises(dist.NotInitializedError):
        dist.empty_shared(3)

    def body() -> None:
        first = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(dist.NotInitializedError, match="not in the group"):
                dist.empty_shared(3, group=first)

    run_ranks(2, body)
