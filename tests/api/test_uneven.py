"""Collectives whose tensors have another size on each rank."""

import re

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
# Elements of rank 0, in steps of which the other ranks have more: none, small, and in several transfers.
SIZES = [(0, 0), (0, 1), (3, 0), (5, 7), (1000, 300), (90_001, 90_000)]


def part(source: int, target: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 3 + source * 5 + target * 2) % 7).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_receives_the_tensors_of_all_sizes(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for dtype in DTYPES:
            for least, step in SIZES:
                counts = [least + step * rank for rank in range(size)]
                mine, root = part(me, 0, counts[me], dtype), size - 1
                want = [part(rank, 0, counts[rank], dtype) for rank in range(size)]

                outs = [torch.zeros_like(each) for each in want]
                dist.all_gather_v(outs, mine)
                assert all(map(equal, outs, want))

                outs = [torch.zeros_like(each) for each in want]
                work = dist.all_gather_v(outs, mine, async_op=True)
                assert all(map(equal, work.result(), want))

                outs = [torch.zeros_like(each) for each in want]
                dist.gather_v(mine, outs if me == root else None, dst=root)
                assert all(map(equal, outs, want)) or me != root

                given = [part(root, rank, counts[rank], dtype) for rank in range(size)]
                out = torch.zeros_like(mine)
                dist.scatter_v(out, given if me == root else None, src=root)
                assert equal(out, given[me])

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reduced_parts_have_the_sum_of_all_inputs_which_stay_unchanged(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()
        for dtype in (torch.float64, torch.int32):
            for op, combine in ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.MAX, torch.amax)):
                for least, step in SIZES:
                    counts = [least + step * rank for rank in range(size)]
                    given = [
                        [part(source, rank, counts[rank], dtype) for rank in range(size)] for source in range(size)
                    ]
                    want = combine(torch.stack([row[me] for row in given]), dim=0).to(dtype)
                    inputs = [each.clone() for each in given[me]]
                    for async_op in (False, True):
                        out = torch.zeros_like(want)
                        work = dist.reduce_scatter_v(out, inputs, op, async_op=async_op)
                        assert work is None or work.wait()
                        assert torch.equal(out, want)
                    assert all(map(equal, inputs, given[me]))

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_pair_exchanges_tensors_of_its_own_dtype_and_shape(ranks: int) -> None:
    def body() -> None:
        me, size = dist.get_rank(), dist.get_world_size()

        def sent(source: int, target: int) -> torch.Tensor:
            dtype = DTYPES[(source + 2 * target) % len(DTYPES)]
            return part(source, target, 6 * (1 + source + target), dtype).view(2, -1)

        for async_op in (False, True):
            want = [sent(rank, me) for rank in range(size)]
            outs = [torch.zeros_like(each) for each in want]
            outs[0] = torch.zeros(want[0].shape[1], 2, dtype=want[0].dtype).T  # not contiguous
            given = [sent(me, rank) for rank in range(size)]
            given[-1] = given[-1].T.contiguous().T
            work = dist.all_to_all_w(outs, given, async_op=async_op)
            assert work is None or work.wait()
            assert all(map(equal, outs, want))

    run_ranks(ranks, body)


def test_groups_number_their_own_ranks() -> None:
    def body() -> None:
        group = dist.new_group([2, 1], sort_ranks=False)
        if dist.get_rank() == 0:
            return
        mine = torch.full((dist.get_rank(),), float(dist.get_rank()))
        outs = [torch.empty(2), torch.empty(1)]
        dist.all_gather_v(outs, mine, group=group)
        assert [out.tolist() for out in outs] == [[2.0, 2.0], [1.0]]
        if dist.get_rank() == 1:
            dist.gather_v(mine, outs, dst=1, group=group)
        else:
            dist.gather_v(mine, dst=1, group=group)

    run_ranks(3, body)


def message_of(call) -> str:
    with pytest.raises(dist.MismatchError) as caught:
        call()
    return str(caught.value)


def test_different_sizes_are_an_error_on_every_rank() -> None:
    def body() -> None:
        me = dist.get_rank()
        own = torch.ones(2 + me)
        wrong = [torch.empty(2), torch.empty(3), torch.empty(5 if me == 0 else 4)]

        text = message_of(lambda: dist.all_gather_v(wrong, own))
        assert "all_gather_v" in text
        assert "rank 2 sends 16 bytes to rank 0, which expects 20" in text

        big = [torch.empty(200_000 + (me == 0 and rank == 1)) for rank in range(3)]
        text = message_of(lambda: dist.all_gather_v(big, torch.ones(200_000)))
        assert "all_gather_v" in text

        text = message_of(lambda: dist.gather_v(own, wrong if me == 0 else None))
        assert "gather_v" in text
        assert "rank 2 sends 16 bytes to rank 0, which expects 20" in text

        text = message_of(
            lambda: dist.scatter_v(torch.empty(1 + me), [torch.ones(n) for n in (1, 2, 4)] if me == 0 else None)
        )
        assert "rank 0 sends 16 bytes to rank 2, which expects 12" in text

        inputs = [torch.ones(1), torch.ones(2), torch.ones(4 if me == 0 else 3)]
        text = message_of(lambda: dist.reduce_scatter_v(torch.empty(1 + me), inputs))
        assert "reduce_scatter_v" in text
        assert __file__ in text

        outs = [torch.empty(1, dtype=torch.int32 if (me, rank) == (0, 2) else torch.float32) for rank in range(3)]
        for async_op in (False, True):
            text = message_of(
                lambda a=async_op: (w := dist.all_to_all_w(outs, [torch.ones(1)] * 3, async_op=a)) and w.wait()
            )
            assert re.search(r"all_to_all_w.*rank 2 sends torch.float32 to rank 0, which expects torch.int32", text)

    run_ranks(3, body)


def test_invalid_arguments_are_refused_before_the_call() -> None:
    def body() -> None:
        me = dist.get_rank()
        one = torch.ones(1)
        for call, text in [
            (lambda: dist.all_gather_v([one], one), "tensor_list must have 2 tensors"),
            (lambda: dist.all_gather_v([one, torch.ones(1).int()], one), "same dtype"),
            (lambda: dist.all_gather_v([torch.ones(2), torch.ones(2)], one), "2 elements, but its input has 1"),
            (lambda: dist.reduce_scatter_v(one, [torch.ones(2)] * 2), "1 elements, but its input has 2"),
            (lambda: dist.gather_v(one, None if me == 0 else [one, one]), "gather_list must"),
            (lambda: dist.scatter_v(one, None if me == 0 else [one, one]), "scatter_list must"),
            (lambda: dist.gather_v(one, [one, one], dst=7), "dst=7 is not a rank"),
            (lambda: dist.all_to_all_w([one, one], [one, one]), "share memory|overlap"),
        ]:
            with pytest.raises(dist.UsageError, match=text):
                call()
        with pytest.raises(TypeError, match="expected a list of tensors"):
            dist.all_gather_v(one, one)  # type: ignore[arg-type]
        dist.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_other_engines_have_these_collectives(backend: str) -> None:
    def body() -> None:
        me = dist.get_rank()
        outs = [torch.empty(1), torch.empty(50_000), torch.empty(3)]
        mine = torch.full_like(outs[me], me)
        dist.all_gather_v(outs, mine)
        assert [set(out.tolist()) for out in outs] == [{0.0}, {1.0}, {2.0}]
        dist.reduce_scatter_v(mine, outs)
        assert set(mine.tolist()) == {3.0 * me}
        wide = [torch.empty(2, dtype=[torch.int8, torch.float64, torch.int64][rank]) for rank in range(3)]
        dist.all_to_all_w(wide, [torch.full((2,), me + 1).to(wide[me].dtype)] * 3)
        assert [out.tolist() for out in wide] == [[1, 1], [2.0, 2.0], [3, 3]]
        got = torch.empty(me + 1)
        dist.scatter_v(got, [torch.ones(n + 1) * n for n in range(3)] if me == 2 else None, src=2)
        assert set(got.tolist()) == {float(me)}

    run_ranks(3, body, env={"ALLRANKS_BACKEND": backend})
