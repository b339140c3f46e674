"""all_reduce compared with torch: every dtype, op, path through the core, and several numbers of ranks."""

import numpy as np
import pytest
import torch

import allranks as dist
from allranks import _core
from allranks._call.types import ReduceOp
from allranks.testing import RankError, run_ranks

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def defined(op: ReduceOp, dtype: torch.dtype) -> bool:
    if op == ReduceOp.PREMUL_SUM:
        return False  # needs a factor
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    if dtype.is_floating_point:
        return op not in BITWISE
    return op != ReduceOp.AVG or dtype != torch.bool


# Element counts: none, one, within the cache line of a call, within one slot, and more than one slot for every dtype.
COUNTS = [0, 1, 13, 1000, 300_001]


def operand(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 7)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        values = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        values[::17] = float("nan") if rank == 1 else float("inf")
        return values
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def expected(operands: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return the reduction of the operands by torch's element-wise functions, in rank order."""
    dtype = operands[0].dtype
    # torch implements only part of the arithmetic on wide unsigned integers. NumPy wraps on overflow, as allranks does.
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        step = {
            ReduceOp.SUM: np.add,
            ReduceOp.AVG: np.add,
            ReduceOp.PROD: np.multiply,
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
            ReduceOp.BAND: np.bitwise_and,
            ReduceOp.BOR: np.bitwise_or,
            ReduceOp.BXOR: np.bitwise_xor,
        }[op]
        whole = operands[0].numpy()
        for each in operands[1:]:
            whole = step(whole, each.numpy())
        if op == ReduceOp.AVG:
            whole = whole // whole.dtype.type(len(operands))
        return torch.from_numpy(whole)
    # The core sums float16 and bfloat16 in float32 and rounds once.
    wide = [t.float() if dtype in (torch.float16, torch.bfloat16) else t for t in operands]
    steps = {
        ReduceOp.SUM: torch.logical_or if dtype == torch.bool else torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PROD: torch.logical_and if dtype == torch.bool else torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    result = wide[0]
    for other in wide[1:]:
        result = steps[op](result, other)
    if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return result.div(len(operands), rounding_mode="trunc")
    if op == ReduceOp.AVG:
        # Divide the real and imaginary parts separately: torch multiplies complex numbers by a reciprocal.
        parts = torch.view_as_real(result) if dtype.is_complex else result
        result = parts / len(operands)
        if dtype.is_complex:
            result = torch.view_as_complex(result)
    return result.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal. Any NaN equals any other NaN."""
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.view(torch.uint8) if a.numel() else a, b.view(torch.uint8) if b.numel() else b)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_reduce_equals_torch_on_every_dtype_and_op(ranks: int) -> None:
    def body() -> list[str]:
        wrong = []
        for dtype in DTYPES:
            for op in ReduceOp:
                if not defined(op, dtype):
                    continue
                for count in COUNTS:
                    operands = [operand(r, count, dtype) for r in range(dist.get_world_size())]
                    tensor = operands[dist.get_rank()].clone()
                    dist.all_reduce(tensor, op)
                    if not same_bits(tensor, expected(operands, op)):
                        wrong.append(f"{dtype} {op.name} {count}")
        return wrong

    # Hundreds of synchronizing calls: 6 s on an idle machine, more than 60 s if other tests run concurrently.
    assert run_ranks(ranks, body, timeout_s=240.0) == [[]] * ranks


def test_result_bits_are_equal_on_all_ranks_and_in_every_run() -> None:
    def body() -> bytes:
        result = []
        for count in (5, 10_000, 200_000):
            tensor = (
                torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank())) * 10.0 ** dist.get_rank()
            )
            dist.all_reduce(tensor)
            result.append(tensor.numpy().tobytes())
        return b"".join(result)

    first, second = run_ranks(3, body), run_ranks(3, body)
    assert len(set(first + second)) == 1


def test_all_reduce_writes_views_of_any_layout_in_place() -> None:
    def body() -> None:
        rank = dist.get_rank()
        base = torch.arange(24.0).reshape(2, 3, 4) + rank

        def total(view: torch.Tensor) -> torch.Tensor:
            return 2 * view - 2 * rank + 1 if rank == 0 else 2 * view - 1

        for view in (
            lambda t: t.permute(2, 0, 1),
            lambda t: t[:, ::2, 1:3],
            lambda t: t[1],
            lambda t: t.flatten()[3],
            lambda t: t.mT,
        ):
            whole = base.clone()
            part = view(whole)
            want, untouched = total(part.clone()), whole.clone()
            dist.all_reduce(part)
            assert torch.equal(part, want)
            view(untouched).copy_(want)
            assert torch.equal(whole, untouched), "memory outside the view has changed"

        image = (torch.ones(2, 3, 4, 5) * (rank + 1)).to(memory_format=torch.channels_last)
        dist.all_reduce(image)
        assert bool((image == 3).all())
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.item() == 1
        # In a lazily negated view, a flag of the tensor determines the sign of the elements, not the bytes.
        complex_ = torch.complex(torch.zeros(3), torch.ones(3) * (rank + 1))
        imag = complex_.conj().imag
        assert imag.is_neg()
        dist.all_reduce(imag)
        assert torch.equal(imag, torch.full((3,), -3.0))
        leaf = torch.ones(3, requires_grad=True)
        dist.all_reduce(leaf)
        assert torch.equal(leaf.detach(), torch.full((3,), 2.0))
        strided = torch.ones(3, 2, requires_grad=True).t()
        dist.all_reduce(strided)
        assert torch.equal(strided.detach(), torch.full((2, 3), 2.0))

    run_ranks(2, body)


def test_async() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = [torch.full((n,), float(rank + n)) for n in (1, 30, 5000, 100_000) * 5]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        blocking = torch.ones(3)
        dist.all_reduce(blocking)  # queued after the others
        assert torch.equal(blocking, torch.full((3,), float(size)))
        for work, n, tensor in reversed(list(zip(works, (1, 30, 5000, 100_000) * 5, tensors, strict=True))):
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert bool((tensor == size * n + size * (size - 1) / 2).all())
        transposed = torch.arange(6.0).reshape(2, 3).t()
        dist.all_reduce(transposed, async_op=True).wait()
        assert torch.equal(transposed, size * torch.arange(6.0).reshape(2, 3).t())
        # The program keeps neither the work nor the tensor. The core must keep both alive until the call completes.
        for _ in range(50):
            dist.all_reduce(torch.ones(50_000), async_op=True)
        dist.barrier()

    run_ranks(3, body)


def test_every_nonzero_byte_of_a_bool_tensor_is_true() -> None:
    def body() -> None:
        for op in (dist.ReduceOp.PROD, dist.ReduceOp.SUM, dist.ReduceOp.BXOR):
            tensor = torch.tensor([1 + dist.get_rank(), 0], dtype=torch.uint8).view(torch.bool)  # bytes 1 and 2
            dist.all_reduce(tensor, op)
            assert tensor.view(torch.uint8).tolist() == [op != dist.ReduceOp.BXOR, 0]

    run_ranks(2, body)


def test_deprecated_and_torch_reduce_op_names_are_accepted() -> None:
    def body() -> None:
        import torch.distributed as peer

        tensor = torch.ones(2)
        dist.all_reduce(tensor, op=dist.reduce_op.SUM)
        dist.all_reduce(tensor, op=peer.ReduceOp.SUM)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, dist.group.WORLD)
        assert torch.equal(tensor, torch.full((2,), 4.0))

    run_ranks(2, body)


def test_unsupported_tensors_and_ops_are_refused() -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match=r"AVG of torch\.bool"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
        with pytest.raises(dist.UsageError, match=r"MAX of torch\.complex64"):
            dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
        with pytest.raises(dist.UsageError, match=r"BAND of torch\.float32"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(dist.UsageError, match=r"SUM of torch\.float8_e4m3fn"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        with pytest.raises(dist.UsageError, match="on meta"):
            dist.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(dist.UsageError, match="share memory"):
            dist.all_reduce(torch.ones(1).expand(3))
        with pytest.raises(dist.UsageError, match="share memory"):
            dist.all_reduce(torch.ones(5).unfold(0, 3, 1))
        for apart in (torch.ones(4, 6)[::2, 1::2], torch.ones(6).as_strided((2, 3), (1, 2)), torch.ones(3, 2).T):
            dist.all_reduce(apart)
            assert (apart == dist.get_world_size()).all()
        with pytest.raises(dist.UsageError, match="quint8"):
            dist.all_reduce(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor, not ndarray"):
            dist.all_reduce(np.ones(2))
        with pytest.raises(TypeError, match="ReduceOp"):
            dist.all_reduce(torch.ones(2), "sum")
        with pytest.raises(dist.UsageError, match="group must be"):
            dist.all_reduce(torch.ones(2), group="world")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((2,), 2.0)), "refused calls must not count as calls"

    run_ranks(2, body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_mismatch_error_names_the_ranks_and_leaves_tensors_unchanged(asynchronous: bool) -> None:
    def body() -> None:
        rank = dist.get_rank()

        def finish(work: dist.Work | None) -> None:
            assert (work is not None) == asynchronous
            if work is not None:
                work.wait()

        def refused(call: object, *words: str) -> None:
            with pytest.raises(dist.MismatchError) as caught:
                finish(call())
            for word in words:
                assert word in str(caught.value)

        tensor = torch.ones(1000 if rank == 2 else 1024)
        refused(
            lambda: dist.all_reduce(tensor, async_op=asynchronous),
            "ranks 0-1 called all_reduce(1024 x float32, SUM)",
            "rank 2 called all_reduce(1000 x float32, SUM)",
        )
        number = torch.ones(4, dtype=torch.int32 if rank == 0 else torch.float32)
        refused(lambda: dist.all_reduce(number, async_op=asynchronous), "rank 0 called all_reduce(4 x int32")
        same = torch.ones(4)
        op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
        refused(lambda: dist.all_reduce(same, op, async_op=asynchronous), "ranks 0, 2", "rank 1", "MAX", "SUM")
        if rank == 0:
            refused(lambda: dist.barrier(async_op=asynchronous), "rank 0 called barrier")
        else:
            refused(lambda: dist.all_reduce(same, async_op=asynchronous), "rank 0 called barrier")
        root = 1 if rank == 1 else 0
        refused(lambda: dist.broadcast(same, root, async_op=asynchronous), "src=0", "src=1")
        assert bool((tensor == 1).all() and (number == 1).all() and (same == 1).all())
        dist.all_reduce(same)
        assert bool((same == 3).all()), "the group must continue to work"

    run_ranks(3, body)


def test_a_failing_rank_is_named_by_run_ranks() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 of 3") as caught:
        run_ranks(3, body)
    assert isinstance(caught.value.__cause__, KeyError)


def test_reduce_op_numbers_and_dtypes_match_the_core() -> None:
    assert {op.name: int(op) for op in ReduceOp} == _core.REDUCE_OPS
    assert all(hasattr(torch, name) for name in _core.DTYPES)


def test_premul_sum_multiplies_by_the_factor_of_each_rank() -> None:
    def body() -> None:
        rank = dist.get_rank()
        factor = rank + 0.5
        expected = sum((r + 0.5) * torch.arange(6.0) for r in range(3))
        for layout in (torch.arange(6.0), torch.arange(6.0).view(2, 3).T):
            tensor = layout.clone() if layout.dim() == 1 else torch.arange(6.0).view(2, 3).T
            dist.all_reduce(tensor, dist.premul_sum(factor))
            assert torch.equal(tensor, sum((r + 0.5) * layout for r in range(3)))
        tensor = torch.arange(6.0)
        dist.reduce(tensor, 1, dist.premul_sum(torch.tensor(factor)))
        assert torch.equal(tensor, expected if rank == 1 else torch.arange(6.0))
        out = torch.empty(2)
        work = dist.reduce_scatter_tensor(out, torch.arange(6.0), dist.premul_sum(factor), async_op=True)
        work.wait()
        assert torch.equal(out, expected[2 * rank : 2 * rank + 2])
        for op in (dist.ReduceOp.PREMUL_SUM, dist.premul_sum(2)):
            with pytest.raises(dist.UsageError, match="PREMUL_SUM"):
                dist.all_reduce(torch.ones(2, dtype=torch.bool), op)
        with pytest.raises(dist.UsageError, match="premul_sum"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.PREMUL_SUM)
        for wrong in (True, "2", torch.ones(2)):
            with pytest.raises(dist.UsageError, match="factor"):
                dist.premul_sum(wrong)

    run_ranks(3, body)
