"""Verbs with one chunk per rank, compared with torch indexing."""

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

DTYPES = [
    torch.float32,
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
]
# Elements per rank: none, one, within the cache line of a call, within one slot, and in several transfers.
COUNTS = [0, 1, 7, 1000, 70_001]


def piece(source: int, target: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 3 + source * 5 + target * 2) % 7).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gathering_verbs_collect_the_chunk_of_each_rank(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES:
            for count in COUNTS:
                mine = piece(me, 0, count, dtype)
                want = [piece(r, 0, count, dtype) for r in range(size)]
                outs = [torch.zeros_like(mine) for _ in range(size)]
                dist.all_gather(outs, mine)
                assert all(map(equal, outs, want))
                for gather in (dist.all_gather_single, dist.all_gather_into_tensor):
                    whole = torch.zeros(size * count, dtype=dtype)
                    gather(whole, mine)
                    assert equal(whole, torch.cat(want))
                stacked = torch.zeros(size, count, dtype=dtype)
                stacked[me] = mine
                dist.all_gather_single(stacked, stacked[me])  # in place
                assert equal(stacked, torch.stack(want))
                for root in range(size):
                    outs = [torch.zeros_like(mine) for _ in range(size)]
                    dist.gather(mine, outs if me == root else None, dst=root)
                    assert me != root or all(map(equal, outs, want))
                    for gather in (dist.gather_single, dist.gather_into_tensor):
                        stacked = torch.zeros(size, count, dtype=dtype) if me == root else None
                        work = gather(mine, stacked, dst=root, async_op=True)
                        work.wait()
                        assert stacked is None or equal(stacked, torch.stack(want))
        with pytest.raises(dist.UsageError, match="Expected a contiguous tensor"):
            dist.gather_single(torch.ones(2), torch.ones(2 * size + 1), dst=me)

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scattering_verbs_give_each_rank_its_chunk(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES:
            for count in COUNTS:
                ins = [piece(me, r, count, dtype) for r in range(size)]
                for root in range(size):
                    out = torch.zeros(count, dtype=dtype)
                    dist.scatter(out, ins if me == root else None, src=root)
                    assert equal(out, piece(root, me, count, dtype))
                if dtype in (torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu):
                    continue
                want = sum(piece(r, me, count, dtype) for r in range(size))
                out = torch.zeros(count, dtype=dtype)
                dist.reduce_scatter(out, ins)
                assert equal(out, want)
                for scatter in (dist.reduce_scatter_single, dist.reduce_scatter_tensor):
                    out = torch.zeros(count, dtype=dtype)
                    scatter(out, torch.cat(ins))
                    assert equal(out, want)

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reduce_writes_only_the_tensor_of_the_root(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for count in COUNTS:
            for root in range(size):
                tensor = piece(me, 0, count, torch.float64)
                dist.reduce(tensor, root, dist.ReduceOp.MAX)
                want = torch.stack([piece(r, 0, count, torch.float64) for r in range(size)]).amax(0)
                assert equal(tensor, want if me == root else piece(me, 0, count, torch.float64))

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_to_all(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES:
            for count in COUNTS:
                ins = [piece(me, r, count, dtype) for r in range(size)]
                want = [piece(r, me, count, dtype) for r in range(size)]
                outs = [torch.zeros_like(t) for t in ins]
                dist.all_to_all(outs, ins)
                assert all(map(equal, outs, want))
                out = torch.zeros(size * count, dtype=dtype)
                dist.all_to_all_single(out, torch.cat(ins))
                assert equal(out, torch.cat(want))

                def uneven(source: int, target: int, count: int = count) -> int:
                    return count * ((source + 2 * target) % 3)

                ins = [piece(me, r, uneven(me, r), dtype) for r in range(size)]
                want = [piece(r, me, uneven(r, me), dtype) for r in range(size)]
                outs = [torch.zeros_like(t) for t in want]
                dist.all_to_all(outs, ins)
                assert all(map(equal, outs, want))
                out = torch.zeros(sum(map(len, want)), dtype=dtype)
                dist.all_to_all_single(out, torch.cat(ins), list(map(len, want)), list(map(len, ins)))
                assert equal(out, torch.cat(want))
        rows = torch.arange(size * 4.0).reshape(size * 2, 2) + 100 * me
        out = torch.zeros_like(rows)
        dist.all_to_all_single(out, rows)
        assert torch.equal(out, torch.cat([torch.arange(4.0).reshape(2, 2) + 4 * me + 100 * r for r in range(size)]))

    run_ranks(ranks, body)


def test_asynchronous_verbs_accept_noncontiguous_tensors() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        grid = (torch.arange(6.0).reshape(2, 3) + 10 * me).t()  # not contiguous
        outs = [torch.zeros(2, 3).t() for _ in range(size)]
        works = [dist.all_gather(outs, grid, async_op=True)]
        whole = torch.zeros(2, 3, size).permute(2, 1, 0)
        works.append(dist.all_gather_single(whole, grid, async_op=True))
        mine = torch.zeros(3, 2)
        works.append(dist.scatter(mine, [grid + r for r in range(size)] if me == 1 else None, src=1, async_op=True))
        total = torch.zeros(2, 3).t()
        works.append(dist.reduce_scatter(total, [grid] * size, async_op=True))
        crossed = [torch.zeros(2, 3).t() for _ in range(size)]
        works.append(dist.all_to_all(crossed, [grid + r for r in range(size)], async_op=True))
        reduced = grid.clone()
        works.append(dist.reduce(reduced, 0, async_op=True))
        for work in reversed(works):
            assert work.wait()
        base = torch.arange(6.0).reshape(2, 3).t()
        for r in range(size):
            assert torch.equal(outs[r], base + 10 * r)
            assert torch.equal(whole[r], base + 10 * r)
            assert torch.equal(crossed[r], base + 10 * r + me)
        assert torch.equal(mine, base + 10 + me)
        assert torch.equal(total, size * base + 10 * sum(range(size)))
        assert torch.equal(works[0].result()[1], base + 10)
        future = dist.all_gather(outs, grid, async_op=True).get_future()
        assert torch.equal(future.wait()[0], base)

    run_ranks(3, body)


def test_coalesced_verbs_transfer_every_tensor() -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        tensors = [torch.full((n,), float(me)) for n in (1, 5, 40_000)]
        dist.all_reduce_coalesced(tensors)
        assert all(bool((t == 3).all()) for t in tensors)
        mine = [torch.full((n,), me) for n in (2, 3)]
        lists = [[torch.zeros(n, dtype=torch.int64) for n in (2, 3)] for _ in range(size)]
        work = dist.all_gather_coalesced(lists, mine, async_op=True)
        assert work.wait()
        assert work.is_success()
        assert [[int(t[0]) for t in row] for row in lists] == [[r, r] for r in range(size)]

    run_ranks(3, body)


def test_all_gather_accepts_chunks_of_different_sizes() -> None:
    def body() -> None:
        me = dist.get_rank()
        for sizes in ((1, 2, 0), (50_000, 3, 70_000)):
            for asynchronous in (False, True):
                outs = [torch.zeros(n) for n in sizes]
                work = dist.all_gather(outs, torch.full((sizes[me],), me + 1.0), async_op=asynchronous)
                if work is not None:
                    work.wait()
                assert all((out == r + 1).all() for r, out in enumerate(outs))
        outs = [torch.zeros(n) for n in ((1, 2, 3) if me == 0 else (1, 2, 4))]
        with pytest.raises(dist.MismatchError, match="rank 2 sends 16 bytes to rank 0, which expects 12"):
            dist.all_gather(outs, torch.zeros((1, 2, 4)[me]))
        if me == 1:
            with pytest.raises(dist.UsageError, match="the output for this rank"):
                dist.all_gather(outs, torch.zeros(5))
        dist.barrier()

    run_ranks(3, body)


def test_multigpu_verbs_treat_each_tensor_as_a_rank() -> None:
    def body() -> None:
        me = dist.get_rank()
        for asynchronous in (False, True):
            for op, expected in ((dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.AVG, 1.5)):
                ours = [torch.full((2,), 2.0 * me), torch.full((2,), 2.0 * me + 1)]
                work = dist.all_reduce_multigpu(ours, op, async_op=asynchronous)
                if work is not None:
                    assert work.wait()
                assert all((tensor == expected).all() for tensor in ours)
        ours = [torch.full((2,), 2.0 * me), torch.full((2,), 2.0 * me + 1)]
        dist.reduce_multigpu(ours, 1, dst_tensor=1)
        assert [t[0].item() for t in ours] == ([0, 1] if me == 0 else [2, 6])
        ours = [torch.full((2,), 2.0 * me), torch.full((2,), 2.0 * me + 1)]
        dist.broadcast_multigpu(ours, 1, src_tensor=1)
        assert [t[0].item() for t in ours] == [3, 3]
        ours = [torch.full((2,), 2.0 * me), torch.full((2,), 2.0 * me + 1)]
        lists = [[torch.zeros(2) for _ in range(4)] for _ in range(2)]
        dist.all_gather_multigpu(lists, ours)
        assert [[t[0].item() for t in row] for row in lists] == [[0, 1, 2, 3]] * 2
        inputs = [[torch.full((2,), 10.0 * k + me) for k in range(4)] for _ in range(2)]
        dist.reduce_scatter_multigpu(ours, inputs)
        assert [t[0].item() for t in ours] == [40.0 * (2 * me) + 2, 40.0 * (2 * me + 1) + 2]
        for call, words in (
            (lambda: dist.all_reduce_multigpu([]), "empty"),
            (lambda: dist.all_reduce_multigpu([torch.ones(1), torch.ones(2)]), "one shape"),
            (lambda: dist.broadcast_multigpu(ours, 0, src_tensor=2), "no tensor 2"),
            (lambda: dist.all_gather_multigpu([[]], ours), "2 output lists of 4"),
            (lambda: dist.all_reduce_multigpu(ours, dist.ReduceOp.PREMUL_SUM), "factor"),
        ):
            with pytest.raises(ValueError, match=words):
                call()

    run_ranks(2, body)


def test_multigpu_lists_of_different_lengths_are_a_mismatch() -> None:
    def body() -> None:
        for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            for shape in ((), (3,), (1, 3)):
                for lengths in ((1, 2), (2, 3), (70, 71)):
                    ours = [torch.ones(shape) for _ in range(lengths[dist.get_rank()])]
                    with pytest.raises(dist.MismatchError, match="different shapes"):
                        dist.all_reduce_multigpu(ours, op)
                    with pytest.raises(dist.MismatchError, match="different shapes"):
                        dist.reduce_multigpu(ours, 0, op)
                    assert all(bool((tensor == 1).all()) for tensor in ours)
                ours = [torch.ones(shape) for _ in range(70)]
                dist.all_reduce_multigpu(ours, op)
                assert ours[69].shape == shape
        one_long, two_short = [torch.ones(1, 3)], [torch.ones(3)] * 2
        with pytest.raises(dist.MismatchError):
            dist.all_reduce_multigpu(two_short if dist.get_rank() else one_long)

    run_ranks(2, body)


def test_multigpu_arithmetic_equals_all_reduce() -> None:
    def body() -> None:
        for dtype in (torch.float16, torch.bfloat16):
            # Sums overflow float16, but not float32.
            largest = torch.finfo(torch.float16).max if dtype is torch.float16 else 2.0**100
            ours = [torch.full((2,), largest, dtype=dtype), torch.full((2,), largest, dtype=dtype)]
            dist.all_reduce_multigpu(ours, dist.ReduceOp.AVG)
            assert all(bool((tensor == largest).all()) for tensor in ours)
            outputs = [torch.zeros(2, dtype=dtype)]
            dist.reduce_scatter_multigpu(outputs, [[torch.full((2,), largest, dtype=dtype)] * 2], dist.ReduceOp.AVG)
            assert bool((outputs[0] == largest).all())
            ours = [torch.ones(1, dtype=dtype) for _ in range(600)]
            dist.all_reduce_multigpu(ours)
            assert ours[0].item() == 1200
        me = dist.get_rank()
        for dtype in (torch.int64, torch.uint8):  # sums of 7, 513 (1 in a byte) and 9
            mine = [torch.tensor([1, 128, 4], dtype=dtype), torch.tensor([3 - me, 129 - me, me], dtype=dtype)]
            right = torch.tensor([1, 0 if dtype == torch.uint8 else 128, 2], dtype=dtype)
            given = [tensor.clone() for tensor in mine]
            dist.all_reduce_multigpu(given, dist.ReduceOp.AVG)
            assert all(torch.equal(tensor, right) for tensor in given)
            given = [tensor.clone() for tensor in mine]
            dist.reduce_multigpu(given, 1, dist.ReduceOp.AVG)
            assert torch.equal(given[0], right if me else mine[0])
            outputs = [torch.zeros(3, dtype=dtype) for _ in mine]
            dist.reduce_scatter_multigpu(outputs, [[tensor] * 4 for tensor in mine], dist.ReduceOp.AVG)
            assert all(torch.equal(output, right) for output in outputs)
        with pytest.raises(dist.UsageError, match=r"does not support AVG of torch\.bool"):
            dist.all_reduce_multigpu([torch.ones(1, dtype=torch.bool)] * 2, dist.ReduceOp.AVG)
        whole = [torch.tensor([1, 3]), torch.tensor([1, 3])]
        for op, words in ((dist.premul_sum(0.5), r"premul_sum: a factor of 0.5 on torch.int64 tensors"),):
            for call in (dist.all_reduce_multigpu, lambda x, op: dist.reduce_multigpu(x, 0, op)):
                with pytest.raises(dist.UsageError, match=words):
                    call(whole, op)
        with pytest.raises(dist.UsageError, match=r"does not support BAND of torch\.float32"):
            dist.all_reduce_multigpu([torch.ones(1)] * 2, dist.ReduceOp.BAND)
        assert [t.tolist() for t in whole] == [[1, 3], [1, 3]]
        dist.all_reduce_multigpu(whole, dist.premul_sum(torch.tensor([[2]])))
        assert [t.tolist() for t in whole] == [[8, 24], [8, 24]]

    run_ranks(2, body)


def test_multigpu_works_return_the_tensors_of_the_caller() -> None:
    def body() -> None:
        me = dist.get_rank()
        ours = [torch.full((2,), 1.0 + me), torch.full((2,), 1.0 + me)]

        def results(work: dist.Work | None) -> list[torch.Tensor]:
            assert work is not None
            (future,) = [work.get_future().wait()]
            assert list(map(id, future)) == list(map(id, work.result()))
            return work.result()

        def same(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
            return list(map(id, tensors)) == list(map(id, expected))

        assert same(results(dist.all_reduce_multigpu(ours, async_op=True)), ours)
        assert ours[1].tolist() == [6, 6]
        assert same(results(dist.broadcast_multigpu(ours, 0, async_op=True)), ours)
        assert same(results(dist.reduce_multigpu(ours, 1, async_op=True, dst_tensor=1)), ours[1:] if me else [])
        lists = [[torch.zeros(2) for _ in range(4)] for _ in range(2)]
        assert same(results(dist.all_gather_multigpu(lists, ours, async_op=True)), lists[0] + lists[1])
        inputs = [[torch.ones(2) for _ in range(4)] for _ in range(2)]
        assert same(results(dist.reduce_scatter_multigpu(ours, inputs, async_op=True)), ours)
        assert ours[0].tolist() == [4, 4]

    run_ranks(2, body)


def test_wrong_arguments() -> None:
    def body() -> None:
        me = dist.get_rank()
        one, two = torch.ones(1), torch.ones(2)
        integer = torch.ones(1, dtype=torch.int64)
        for call, words in (
            (lambda: dist.all_gather([one], one), "a list of 2 tensors"),
            (lambda: dist.all_gather([two, two], one), "for rank 0"),
            (lambda: dist.all_gather([one, integer], one), "for rank 1"),
            (lambda: dist.all_gather_single(torch.ones(3), one), "2 x 1 elements"),
            (lambda: dist.reduce_scatter(one, [one]), "a list of 2 tensors"),
            (lambda: dist.reduce_scatter_single(one, torch.ones(3)), "2 x 1 elements"),
            (lambda: dist.all_to_all([one], [one, one]), "2 output tensors"),
            (lambda: dist.all_to_all([one, one], [one, integer]), "the same dtype"),
            (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "equal parts"),
            (lambda: dist.all_to_all_single(two, two, [1, 2], [1, 1]), "sum up to 2"),
            (lambda: dist.gather(one, [one, one], dst=1 - me), "must not be passed"),
            (lambda: dist.gather(one, None, dst=me), "must be passed"),
            (lambda: dist.scatter(one, None, src=me), "must be passed"),
            (lambda: dist.reduce(one), "dst or group_dst"),
            (lambda: dist.reduce(one, 5), "expected 0 to 1"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.raises(TypeError, match="tensor_list: expected a list"):
            dist.all_gather(one, one)
        dist.barrier()

    run_ranks(2, body)


def test_mismatches() -> None:
    def body() -> None:
        me = dist.get_rank()
        size = 4 if me == 2 else 3
        one = torch.ones(size)
        with pytest.raises(dist.MismatchError, match=r"rank 2 called all_gather\(4 x float32\)"):
            dist.all_gather([torch.ones(size) for _ in range(3)], one)
        with pytest.raises(dist.MismatchError, match=r"rank 0 called reduce\(1 x float32, SUM, dst=1\)"):
            dist.reduce(torch.ones(1), 1 if me == 0 else 2)
        with pytest.raises(dist.MismatchError, match="rank 0 sends 4 bytes to rank 1, which expects 8"):
            dist.all_to_all(
                [torch.ones(2 if (me, r) == (1, 0) else 1) for r in range(3)], [torch.ones(1) for _ in range(3)]
            )
        dist.barrier()

    run_ranks(3, body)


def test_packed_4_bit_tensors_are_transferred() -> None:
    """Transfer pairs of 4-bit numbers. torch cannot copy this dtype, so allranks copies strided tensors as bytes."""

    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        kind = torch.float4_e2m1fn_x2
        for mine in (torch.full((6, 4), me, dtype=torch.uint8), torch.full((4, 6), me, dtype=torch.uint8).t()):
            outs = [torch.full_like(mine, 9).view(kind) for _ in range(size)]
            dist.all_gather(outs, mine.view(kind))
            for source, out in enumerate(outs):
                assert out.view(torch.uint8).eq(source).all()
            shared = mine.clone().view(kind)
            dist.broadcast(shared, 1)
            assert shared.view(torch.uint8).eq(1).all()
            if me == 0:
                dist.send(mine.view(kind), 1)
            elif me == 1:
                dist.recv(shared, 0)
                assert shared.view(torch.uint8).eq(0).all()
        with pytest.raises(dist.UsageError, match=r"SUM of torch\.float4_e2m1fn_x2"):
            dist.all_reduce(torch.zeros(2, dtype=kind))

    run_ranks(2, body)
