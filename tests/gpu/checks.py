"""Checks of tensors on a device, for any device and engine. Every rank runs each function.

`run.py` runs the checks on a GPU and prints a table. `test_devices.py` runs them under pytest, without a GPU on the
stand-in (`away`). Expected values are computed from the inputs of all ranks, on the CPU and without an engine.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allranks as dist
from allranks import _core, checkpoint
from allranks._engines.c10d.engine import DTYPES, reduces
from allranks._engines.checks import CODES

SEVERAL = 3  # elements


class Hidden:
    """Holder of an output tensor that DistributedDataParallel cannot find."""

    __slots__ = ("output",)

    def put(self, output: Tensor) -> Hidden:
        self.output = output
        return self


Check = Callable[[torch.device], str | None]


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the input of a rank: small integers, so that sums are exact in every dtype."""
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + rank * 3
    return (numbers % 5 + 1).reshape(shape).to(dtype)


def same(tensor: Tensor, expected: Tensor, device: torch.device) -> None:
    """Fail if the tensor is on another device or has other values."""
    assert tensor.device.type == device.type, f"on {tensor.device}"
    assert tensor.dtype == expected.dtype
    found = tensor.cpu()
    if expected.dtype is torch.complex32:  # torch cannot compare it
        found, expected = found.to(torch.complex64), expected.to(torch.complex64)
    assert torch.equal(found, expected), f"{found}, expected {expected}"


def every_verb(device: torch.device) -> None:
    """Check every verb, blocking and asynchronous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last, ranks = size - 1, range(size)
    shape = (4, SEVERAL)

    def here(*sizes: int) -> Tensor:
        return given(rank, *sizes).to(device)

    def room(*sizes: int) -> Tensor:
        return torch.full(sizes, -1.0).to(device)

    def rooms() -> list[Tensor]:
        return [room(*shape) for _ in ranks]

    everyone = [given(r, *shape) for r in ranks]
    total = functools.reduce(torch.add, everyone)
    for later in (False, True):
        works: list[dist.Work | None] = []

        broadcast = here(*shape)
        works.append(dist.broadcast(broadcast, last, async_op=later))
        summed, highest, at_last = here(*shape), here(*shape), here(*shape)
        works.append(dist.all_reduce(summed, async_op=later))
        works.append(dist.all_reduce(highest, dist.ReduceOp.MAX, async_op=later))
        works.append(dist.reduce(at_last, last, async_op=later))
        rows, table = rooms(), room(size * shape[0], shape[1])
        works.append(dist.all_gather(rows, here(*shape), async_op=later))
        works.append(dist.all_gather_into_tensor(table, here(*shape), async_op=later))
        uneven = [room(r + 1) for r in ranks]
        works.append(dist.all_gather(uneven, here(rank + 1), async_op=later))
        gathered = rooms() if rank == last else None
        works.append(dist.gather(here(*shape), gathered, last, async_op=later))
        got = room(*shape)
        lists = [given(10 + r, *shape).to(device) for r in ranks] if rank == 0 else None
        works.append(dist.scatter(got, lists, 0, async_op=later))
        part, piece = room(*shape), room(*shape)
        works.append(dist.reduce_scatter(part, [given(rank + r, *shape).to(device) for r in ranks], async_op=later))
        works.append(dist.reduce_scatter_tensor(piece, here(size * shape[0], shape[1]), async_op=later))
        turned, exchanged = rooms(), room(size * 2, SEVERAL)
        sent = [given(rank * size + r, *shape).to(device) for r in ranks]
        works.append(dist.all_to_all(turned, sent, async_op=later))
        works.append(dist.all_to_all_single(exchanged, here(size * 2, SEVERAL), async_op=later))
        sizes = [r + 1 for r in ranks]
        cut = room(size * (rank + 1))
        works.append(dist.all_to_all_single(cut, here(sum(sizes)), [rank + 1] * size, sizes, async_op=later))
        works.append(dist.barrier(async_op=later))
        for work in works:
            assert (work is not None) == later
            if work is not None:
                work.wait()

        same(broadcast, everyone[last], device)
        same(summed, total, device)
        same(highest, functools.reduce(torch.maximum, everyone), device)
        same(at_last, total if rank == last else everyone[rank], device)
        same(torch.stack(rows), torch.stack(everyone), device)
        same(table, torch.cat(everyone), device)
        for r in ranks:
            same(uneven[r], given(r, r + 1), device)
            same(turned[r], given(r * size + rank, *shape), device)
            if gathered is not None:
                same(gathered[r], everyone[r], device)
        same(got, given(10 + rank, *shape), device)
        same(part, functools.reduce(torch.add, [given(r + rank, *shape) for r in ranks]), device)
        whole = functools.reduce(torch.add, [given(r, size * shape[0], shape[1]) for r in ranks])
        same(piece, whole.chunk(size)[rank], device)
        same(exchanged, torch.cat([given(r, size * 2, SEVERAL).chunk(size)[rank] for r in ranks]), device)
        same(cut, torch.cat([given(r, sum(sizes)).split(sizes)[rank] for r in ranks]), device)


def messages(device: torch.device) -> None:
    """Check messages around a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (SEVERAL, 100_000):
        mine, theirs = given(rank, numel).to(device), torch.zeros(numel, device=device)
        work = dist.isend(mine, after)
        assert dist.recv(theirs, before) == before
        work.wait()
        same(theirs, given(before, numel), device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, theirs.zero_(), before), dist.P2POp(dist.isend, mine, after)]
        )
        for work in works:
            work.wait()
        same(theirs, given(before, numel), device)


def from_any_rank(device: torch.device) -> None:
    """Check blocking sends, and receives on rank 0 without a source rank."""
    if dist.get_rank() == 0:
        numbers = []
        for _ in range(dist.get_world_size() - 1):
            theirs = torch.zeros(SEVERAL, device=device)
            numbers.append(dist.recv(theirs, tag=3))
            same(theirs, given(numbers[-1], SEVERAL), device)
        assert sorted(numbers) == list(range(1, dist.get_world_size()))
    else:
        dist.send(given(dist.get_rank(), SEVERAL).to(device), 0, tag=3)


def dtypes(device: torch.device) -> None:
    """Check sums of one element, of several and of none, and broadcasts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
    for dtype in (*floats, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
        for shape in ((), (7,), (2, 0, 3), (1000,)):
            tensor = given(rank, *shape, dtype=dtype).to(device)
            dist.all_reduce(tensor)
            same(tensor, functools.reduce(torch.add, [given(r, *shape, dtype=dtype) for r in range(size)]), device)
    for dtype in (torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int16, torch.complex64):
        tensor = given(rank, 5, dtype=dtype).to(device)
        dist.broadcast(tensor, size - 1)
        same(tensor.view(torch.uint8), given(size - 1, 5, dtype=dtype).view(torch.uint8), device)


def every_dtype(device: torch.device) -> str:
    """Check every collective with every dtype, and every reduction that docs/engines.md lists for the engine."""
    reduced = 0
    for dtype in CODES:
        _moves(dtype, device)
        for op in (op for op in dist.ReduceOp if op is not dist.ReduceOp.PREMUL_SUM):
            if _engine_reduces(device, dtype, op):
                reduced += 1
                _reduces(dtype, op, device)
            else:
                with pytest.raises(dist.UsageError, match=rf"does not support {op.name} of {dtype} "):
                    dist.all_reduce(_bits(0, 2, dtype).to(device).view(dtype), op)
    return f"{len(CODES)} dtypes, {reduced} reductions"


def _engine_reduces(device: torch.device, dtype: torch.dtype, op: dist.ReduceOp) -> bool:
    world = dist.group.WORLD
    assert world is not None
    assert world._engine is not None
    engines = world._engine.parts()
    name = (engines.get(device.type) or engines["cpu"]).name
    return reduces(name, dtype, op) if name in ("gloo", "nccl") else _core.reduces(CODES[dtype], op)


def _bits(number: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the bytes of elements of a dtype, different for each number. torch cannot copy every dtype itself."""
    octets = (torch.arange(numel * dtype.itemsize) * 7 + number * 31) % 251
    return (octets % 2 if dtype is torch.bool else octets).to(torch.uint8)


def _moves(dtype: torch.dtype, device: torch.device) -> None:
    """Check the collectives that only move data, bit by bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last, ranks = size - 1, range(size)

    def mine(number: int = rank) -> Tensor:
        return _bits(number, SEVERAL, dtype).to(device).view(dtype)

    def room(pieces: int = 1) -> Tensor:
        return torch.zeros(SEVERAL * pieces * dtype.itemsize, dtype=torch.uint8).to(device).view(dtype)

    def holds(tensor: Tensor, *numbers: int) -> None:
        expected = torch.cat([_bits(number, SEVERAL, dtype) for number in numbers])
        same(tensor.view(torch.uint8), expected, device)

    dist.broadcast(tensor := mine(), last)
    holds(tensor, last)
    dist.all_gather(rows := [room() for _ in ranks], mine())
    dist.all_gather_into_tensor(table := room(size), mine())
    holds(table, *ranks)
    dist.gather(mine(), gathered := [room() for _ in ranks] if rank == last else None, last)
    dist.scatter(part := room(), [mine(10 + r) for r in ranks] if rank == 0 else None, 0)
    holds(part, 10 + rank)
    dist.all_to_all(turned := [room() for _ in ranks], [mine(rank * size + r) for r in ranks])
    whole = torch.cat([_bits(rank * size + r, SEVERAL, dtype) for r in ranks])
    dist.all_to_all_single(exchanged := room(size), whole.to(device).view(dtype))
    holds(exchanged, *(r * size + rank for r in ranks))
    for r in ranks:
        holds(rows[r], r)
        holds(turned[r], r * size + rank)
        if gathered is not None:
            holds(gathered[r], r)
    if size > 1:
        work = dist.isend(mine(), (rank + 1) % size)
        dist.recv(received := room(), (rank - 1) % size)
        work.wait()
        holds(received, (rank - 1) % size)


def _reduces(dtype: torch.dtype, op: dist.ReduceOp, device: torch.device) -> None:
    """Check the reductions. The operands are 1 and 2, so that the results of up to 4 ranks are exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64

    def operand(r: int) -> Tensor:
        numbers = (torch.arange(size * 2) + r) % 2
        return numbers.to(torch.bool) if dtype is torch.bool else (numbers + 1).to(wide)

    folds = {
        "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = functools.reduce(folds.get(op.name, torch.add), [operand(r) for r in range(size)])
    if op is dist.ReduceOp.AVG:
        total = total / size if wide is not torch.int64 else total.div(size, rounding_mode="trunc")
    expected = total.to(dtype)
    mine = operand(rank).to(dtype)
    dist.all_reduce(summed := mine.to(device, copy=True), op)
    same(summed, expected, device)
    dist.reduce(at_last := mine.to(device, copy=True), size - 1, op)
    same(at_last, expected if rank == size - 1 else mine, device)
    for call, operands in (
        (dist.reduce_scatter, list(mine.to(device).chunk(size))),
        (dist.reduce_scatter_tensor, mine.to(device)),
    ):
        call(part := torch.zeros(2, dtype=dtype).to(device), operands, op)
        same(part, expected.chunk(size)[rank], device)


def layouts(device: torch.device) -> None:
    """Check tensors that are not contiguous, or are conjugate views."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = functools.reduce(torch.add, [given(r, 6, 4) for r in range(size)])
    whole = given(rank, 6, 4).to(device)
    expected = given(rank, 6, 4)
    dist.all_reduce(whole[::2, 1:3])
    expected[::2, 1:3] = total[::2, 1:3]
    same(whole, expected, device)
    turned = given(rank, 6, 4).to(device).T
    dist.broadcast(turned, size - 1)
    same(turned, given(size - 1, 6, 4).T, device)
    rows = torch.zeros(4, size * 2, device=device)
    dist.all_gather_into_tensor(rows.T, given(rank, 2, 4).to(device))
    same(rows.T, torch.cat([given(r, 2, 4) for r in range(size)]), device)
    numbers = torch.complex(given(rank, 3), given(rank + 1, 3)).to(device)
    dist.all_reduce(numbers.conj())
    both = [torch.complex(given(r, 3), given(r + 1, 3)) for r in range(size)]
    same(numbers.resolve_conj(), functools.reduce(torch.add, both), device)
    parameter = nn.Parameter(given(rank, 3).to(device))
    dist.all_reduce(parameter)
    same(parameter.detach(), functools.reduce(torch.add, [given(r, 3) for r in range(size)]), device)
    with pytest.raises(dist.UsageError, match="share memory"):
        dist.all_reduce(torch.ones(1, device=device).expand(3))


def scaled_sums(device: torch.device) -> None:
    """Check ``premul_sum`` with a number, with a CPU tensor and with a device tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = functools.reduce(torch.add, [given(r, 4) * (r + 1) for r in range(size)])
    for factor in (rank + 1.0, torch.tensor(rank + 1.0), torch.tensor([rank + 1.0]).to(device)):
        tensor = given(rank, 4).to(device)
        dist.all_reduce(tensor, dist.premul_sum(factor))
        same(tensor, expected, device)
        part = torch.zeros(4, device=device)
        dist.reduce_scatter(part, [given(rank, 4).to(device)] * size, dist.premul_sum(factor))
        same(part, expected, device)


def objects_and_sparse(device: torch.device) -> None:
    """Check functions that make several calls: objects, coalesced tensors, sparse tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    gathered: list[object] | None = [None] * size if rank == size - 1 else None
    dist.gather_object({"rank": rank}, gathered, size - 1)
    assert gathered is None or gathered == objects
    dist.broadcast_object_list(told := [rank, "x"], size - 1)
    assert told == [size - 1, "x"]
    dist.scatter_object_list(mine := [None], objects if rank == 0 else None, 0)
    assert mine == [{"rank": rank}]
    dist.all_reduce_coalesced(several := [given(rank, 2).to(device), given(rank, 3).to(device)])
    same(several[1], functools.reduce(torch.add, [given(r, 3) for r in range(size)]), device)
    if device.type != "away":  # the stand-in has no sparse tensors
        at = torch.tensor([[rank, size]])
        tensor = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0]), (size + 1,)).to(device)
        dist.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [1.0] * size + [2.0 * size]


def wrong_calls(device: torch.device) -> None:
    """Check that wrong calls raise an error and change no tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.ones(rank + 1, device=device)
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(mine)
    same(mine, torch.ones(rank + 1), device)
    with pytest.raises(dist.UsageError, match=r"all_gather: tensors must be on one device"):
        dist.all_gather([torch.ones(1) for _ in range(size)], torch.ones(1, device=device))
    with pytest.raises(dist.UsageError, match=r"scatter: tensors must be on one device"):
        dist.scatter(torch.ones(1, device=device), [torch.ones(1)] * size, rank)
    with pytest.raises(dist.UsageError, match=r"BAND of torch\.float32"):
        dist.all_reduce(torch.ones(1, device=device), dist.ReduceOp.BAND)
    dist.barrier()


def ranks_on_other_devices(device: torch.device) -> None:
    """Check a call in which the tensor of rank 0 is on the CPU and the others are on a device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.device("cpu") if rank == 0 else device
    tensor = given(rank, 5).to(mine)
    dist.all_reduce(tensor)
    same(tensor, functools.reduce(torch.add, [given(r, 5) for r in range(size)]), mine)


def several_waiters(device: torch.device) -> None:
    """Check results after ``wait``, of a future, and after polling ``is_completed``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = 1 << 20
    expected = functools.reduce(torch.add, [given(r, numel) for r in range(size)])
    for _ in range(3):
        tensor = given(rank, numel).to(device)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        work.wait()
        same(tensor, expected, device)
        same(future.wait()[0], expected, device)
        work = dist.all_reduce(tensor.copy_(given(rank, numel)), async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.001)
        same(work.result()[0], expected, device)


def forked_child(device: torch.device) -> None:
    """Check that a forked child (a data loader's worker) can delete its parent's work."""
    work = dist.all_reduce(tensor := torch.ones(1000, device=device), async_op=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(dist.NotInitializedError):
                dist.all_reduce(torch.ones(1))
            del work
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert work is not None
    work.wait()
    same(tensor, torch.full((1000,), float(dist.get_world_size())), device)
    assert os.waitstatus_to_exitcode(status) == 0


def gradients(device: torch.device) -> None:
    """Check gradients of ``allranks.nn.functional``."""
    from allranks.nn import functional

    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = given(rank, 4).to(device).requires_grad_()
    out = functional.all_reduce(tensor)
    same(out.detach(), functools.reduce(torch.add, [given(r, 4) for r in range(size)]), device)
    (out * (rank + 1.0)).sum().backward()
    assert tensor.grad is not None
    same(tensor.grad, torch.full((4,), size * (size + 1) / 2), device)
    rows = functional.all_gather(tensor)
    tensor.grad = None
    torch.stack(rows).sum().backward()
    assert tensor.grad is not None
    same(tensor.grad, torch.full((4,), float(size)), device)


def training(device: torch.device) -> None:
    """Compare DistributedDataParallel with the same steps on the CPU, on the mean loss of all ranks' batches."""
    rank, size = dist.get_rank(), dist.get_world_size()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(6, 600)
            self.large = nn.Linear(600, 600)  # more than 1 MiB: not copied into a bucket
            self.last = nn.Linear(600, 2)
            self.unused = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, batch: Tensor) -> Tensor:
            self.seen += 1
            return self.last(torch.tanh(self.large(torch.tanh(self.small(batch)))))

    def made() -> Model:
        torch.manual_seed(1)
        return Model()

    def stepped(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]

    expected, by_hand = [], made()
    for step in range(3):
        for r in range(size):
            (by_hand(given(r + step, 8, 6)).square().mean() / size).backward()
        expected.append(stepped(by_hand))

    devices = None if device.type == "cpu" else [device.index]
    for options in (
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "gradient_as_bucket_view": True},
        {"overlap": False, "find_unused_parameters": True},
        {"overlap": True, "static_graph": True},
    ):
        overlap = options.pop("overlap")
        model = made().to(device)
        model.unused.requires_grad_("find_unused_parameters" in options or "static_graph" in options)
        wrapped = dist.nn.parallel.DistributedDataParallel(model, device_ids=devices, **options)
        wrapped.overlap = overlap
        for step in range(3):
            batch = given(rank + step, 8, 6)  # DistributedDataParallel moves it to the device
            wrapped(batch).square().mean().backward()
            torch.testing.assert_close(stepped(model), expected[step], rtol=1e-4, atol=1e-5)
        assert model.seen.item() == 3
    if size > 1:  # a rank alone has no gradient to wait for
        wrapped = dist.nn.parallel.DistributedDataParallel(made().to(device))
        with pytest.raises(dist.UsageError, match=r"no gradient to 2 of 8 parameters .*unused.weight"):
            wrapped(given(rank, 8, 6).to(device)).sum().backward()
    if device.type == "cpu":
        return
    with pytest.raises(dist.UsageError, match=r"the module's parameters are on"):
        dist.nn.parallel.DistributedDataParallel(made().to(device), device_ids=["cpu"])


def uneven_training(device: torch.device) -> None:
    """Check training within ``join`` if the ranks have inputs for different numbers of steps."""
    rank = dist.get_rank()
    model = nn.Linear(3, 1).to(device)
    wrapped = dist.nn.parallel.DistributedDataParallel(model)
    with wrapped.join():
        for _ in range(rank + 1):
            wrapped(given(rank, 2, 3).to(device)).mean().backward()
    everyones = [torch.zeros(3, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, model.weight.detach().view(-1))
    for other in everyones:
        same(other, everyones[0].cpu(), device)


def nested_backwards(device: torch.device) -> None:
    """Check a backward within a backward in autograd's device thread, as in re-entrant checkpoints."""
    size = dist.get_world_size()

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, layer: nn.Module, batch: Tensor) -> Tensor:
            ctx.layer, ctx.batch = layer, batch.detach()
            return layer(batch)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
            batch = ctx.batch.requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.layer(batch), gradient)
            return None, batch.grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, batch: Tensor) -> Tensor:
            return Again.apply(self.second, self.first(batch))

    model = Model().to(device)
    wrapped = dist.nn.parallel.DistributedDataParallel(model)
    wrapped(given(dist.get_rank(), 2, 3).to(device)).sum().backward()
    for layer in (model.first, model.second):
        mine = layer.weight.grad.clone()
        dist.all_reduce(mine, dist.ReduceOp.SUM)
        torch.testing.assert_close(mine.cpu(), layer.weight.grad.cpu() * size)
    if device.type == "away":
        return  # torch terminates the process if a hook raises in the thread of this device
    hidden = Hidden()
    wrapped = dist.nn.parallel.DistributedDataParallel(Model().to(device))
    wrapped.module.register_forward_hook(lambda module, given, output: hidden.put(output))
    wrapped(given(dist.get_rank(), 2, 3).to(device))
    with pytest.raises(dist.UsageError, match="a backward within a backward"):
        hidden.output.sum().backward()


def large(device: torch.device) -> str:
    """Measure an all_reduce of 64 MiB after the buffers have been allocated."""
    tensor = torch.ones(16 << 20, device=device)
    seconds = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        last = tensor[-1].item()
        seconds.append(time.perf_counter() - began)
    assert last == float(dist.get_world_size() ** 4)
    assert bool((tensor.cpu() == last).all())
    return f"64 MiB: {min(seconds) * 1e3:.1f} ms, {tensor.nbytes / min(seconds) / 1e9:.1f} GB/s"


def streams(device: torch.device) -> None:
    """Check that a call runs after the earlier work of its stream and before the later work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel, cycles = 1 << 20, 200_000_000  # about 0.1 s
    cuda: object = torch.cuda
    sleep: Callable[[int], None] = cuda._sleep  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    for later in (False, True):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch.zeros(numel, device=device)
            sleep(cycles)
            tensor += rank + 1
            work = dist.all_reduce(tensor, async_op=later)
            if work is not None:
                work.wait()
            doubled = tensor * 2
        side.synchronize()
        same(doubled, torch.full((numel,), float(size * (size + 1))), device)
        with torch.cuda.stream(side):
            tensor = torch.zeros(numel, device=device)
            sleep(cycles)
            tensor += rank + 1
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait() * 2
        side.synchronize()
        same(doubled, torch.full((numel,), float(2 * size * (size + 1))), device)
        # A call writes its output after pending writes of the stream, even if another stream waits for the call.
        with torch.cuda.stream(side):
            tensor = torch.full((numel,), float(rank), device=device)
            sleep(cycles)
            tensor.fill_(rank)
            work = dist.broadcast(tensor, size - 1, async_op=True)
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
        same(tensor, torch.full((numel,), float(size - 1)), device)


def graphs(device: torch.device) -> str:
    """Check a call in the capture of a CUDA graph: it is replayed with correct results, or refused without damage."""
    size = dist.get_world_size()
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)  # nccl connects in the first call, which must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The other modes also forbid the calls of nccl's watchdog thread while a capture is in progress.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        try:
            dist.all_reduce(tensor)
        except dist.UsageError as error:
            refusal = str(error)
        else:
            refusal = ""
    if not refusal:
        for replays in (1, 2):
            tensor.fill_(replays)
            graph.replay()
            torch.cuda.synchronize()
            same(tensor, torch.full((4,), float(size * replays)), device)
        return "captured"
    assert "is being captured in a graph" in refusal
    dist.all_reduce(tensor.fill_(1))
    same(tensor, torch.full((4,), float(size)), device)
    return "refused"


def checkpoints(device: torch.device) -> None:
    """Check a saved and loaded training: equal tensors, tensors of each rank, and every dtype, bit by bit."""
    rank = dist.get_rank()
    dist.broadcast_object_list(folders := [tempfile.mkdtemp() if rank == 0 else None], 0)
    folder = str(folders[0])

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 300).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8).to(device)).square().mean().backward()
        optimizer.step()
        tensors = {str(dtype): _bits(seed, SEVERAL, dtype).view(dtype).to(device) for dtype in DTYPES}
        own = given(rank + seed, 5).to(device)
        return {"model": model, "optimizer": optimizer, "tensors": tensors, "own": own}

    def bits(state: dict[str, Any]) -> list[Tensor]:
        tensors = [*state["model"].parameters(), *state["tensors"].values(), state["own"]]
        tensors += [each for moments in state["optimizer"].state.values() for each in moments.values()]
        return [each.detach().cpu().view(-1).view(torch.uint8) for each in tensors]

    try:
        saved = made(1)
        checkpoint.save(saved, folder, step=1)
        checkpoint.save_async(saved, folder, step=2).wait()
        for step in (1, 2):
            checkpoint.load(folder, step=step, into=(loaded := made(2)))
            for number, (ours, theirs) in enumerate(zip(bits(loaded), bits(saved), strict=True)):
                assert torch.equal(ours, theirs), (step, number, ours, theirs)
            assert {loaded["own"].device.type, *(p.device.type for p in loaded["model"].parameters())} == {device.type}
        assert checkpoint.verify(checkpoint.latest(folder)) == []
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder)


def cpu_beside_it(device: torch.device) -> None:
    """Check that each call uses the engine of its tensor's device."""
    size = dist.get_world_size()
    for where in (device, torch.device("cpu")):
        every_verb(where)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == list(range(size))


def through_the_plugin(device: torch.device) -> None:
    """Check functions of torch.distributed, torch's DistributedDataParallel and FSDP2, on a group of allranks."""
    group = dist.torch_group()
    on_torch(device)
    trainings_of_torch(device, group)


def trainings_of_torch(device: torch.device, group: Any = None) -> None:
    """Compare torch's DistributedDataParallel and FSDP2 with the same steps on the CPU, and save FSDP2's shards.

    FSDP2 does not run on the stand-in.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = group or torch.distributed.group.WORLD

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))

    def stepped(model: nn.Module, run: nn.Module, batches: Sequence[Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([run(batch).square().mean() for batch in batches]).mean().backward()
            optimizer.step()

    expected = made()
    stepped(expected, expected, [given(r, 3, 4) for r in range(size)])
    mine = [given(rank, 3, 4).to(device)]
    model = made().to(device)
    stepped(model, nn.parallel.DistributedDataParallel(model, process_group=group), mine)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    if device.type == "away":
        return
    mesh = DeviceMesh.from_group(group, device.type)
    sharded = fully_shard(made().to(device), mesh=mesh)
    stepped(sharded, sharded, mine)
    for shard, theirs in zip(sharded.parameters(), expected.parameters(), strict=True):
        whole: Tensor = shard.full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(whole.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    torch.distributed.broadcast_object_list(
        folders := [tempfile.mkdtemp() if rank == 0 else None], 0, group=group, device=device
    )
    try:
        dcp.save(get_model_state_dict(sharded), checkpoint_id=folders[0], process_group=group)
        loaded = fully_shard(made().to(device), mesh=mesh)
        dcp.load(state := get_model_state_dict(loaded), checkpoint_id=folders[0], process_group=group)
        for name, theirs in get_model_state_dict(sharded).items():
            assert torch.equal(state[name].to_local(), theirs.to_local()), name
        torch.distributed.barrier(group)
    finally:
        if rank == 0:
            shutil.rmtree(str(folders[0]))


def on_torch(device: torch.device) -> None:
    """Check some verbs of torch.distributed."""
    theirs = torch.distributed
    rank, size = theirs.get_rank(), theirs.get_world_size()
    total = functools.reduce(torch.add, [given(r, size, 2) for r in range(size)])
    theirs.all_reduce(tensor := given(rank, size, 2).to(device))
    same(tensor, total, device)
    work = theirs.all_reduce(tensor := given(rank, size, 2).to(device), async_op=True)
    result = work.get_future().wait()[0]
    # On the stand-in, the future holds the CPU memory behind the tensor.
    same(tensor if device.type == "away" else result, total, device)
    theirs.all_gather_into_tensor(gathered := torch.empty(size, 2, device=device), given(rank, 2).to(device))
    same(gathered, torch.stack([given(r, 2) for r in range(size)]), device)
    theirs.reduce_scatter_tensor(part := torch.empty(2, device=device), given(rank, size, 2).to(device).flatten())
    same(part, total[rank], device)
    theirs.broadcast(tensor := given(rank, 3).to(device), size - 1)
    same(tensor, given(size - 1, 3), device)
    objects: list[object] = [None] * size
    theirs.all_gather_object(objects, rank)
    assert objects == list(range(size))


def plugin_beside_nccl(device: torch.device) -> None:
    """Check the backend ``cpu:allranks,cuda:nccl`` of torch.distributed: verbs, DistributedDataParallel and FSDP2."""
    _in_world_of_torch("cpu:allranks" if device.type == "cpu" else "cpu:allranks,cuda:nccl", device)


def plugin_alone(device: torch.device) -> None:
    """Check the backend ``allranks`` of torch.distributed: verbs, DistributedDataParallel and FSDP2."""
    _in_world_of_torch("allranks", device)


def _in_world_of_torch(backend: str, device: torch.device) -> None:
    store = None
    if dist.get_rank() == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = torch.tensor([store.port if store else 0])
    dist.broadcast(port, 0)
    store = store or torch.distributed.TCPStore("127.0.0.1", int(port), is_master=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        for where in {device, torch.device("cpu")}:
            on_torch(where)
        trainings_of_torch(device)
    finally:
        torch.distributed.destroy_process_group()


def messages_of_nccl(device: torch.device) -> None:
    """Check a second group on the same engine, messages, and that nccl cannot receive from any rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    dist.all_reduce(tensor := given(rank, 3).to(device), group=group)
    same(tensor, functools.reduce(torch.add, [given(r, 3) for r in range(size)]), device)
    if size > 1:
        messages(device)
        if device.type == "cuda":
            with pytest.raises(dist.UsageError, match="requires the rank of the sender"):
                dist.recv(torch.ones(1, device=device))


def two_ranks_on_one_gpu(device: torch.device) -> None:
    """Check that the error of nccl names the native engine, which supports several ranks on one GPU."""
    with pytest.raises(dist.AllranksError, match=r"init_process_group\(\"native\"\)"):
        dist.all_reduce(torch.ones(1, device=device))


def a_loss(device: torch.device) -> str:
    """Kill the last rank during a call; the others abort the call and continue without that rank."""
    world = dist.group.WORLD
    assert world is not None
    rank, last = world.rank(), world.size() - 1
    dist.all_reduce(torch.ones(1, device=device))  # establishes the connections
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1 << 20, device=device), async_op=True)
    began = time.monotonic()
    while world.failed_ranks() != [last]:
        assert time.monotonic() < began + 60, world.failed_ranks()
        time.sleep(0.01)
    world.abort()
    with pytest.raises(dist.AllranksError):
        dist.all_reduce(torch.ones(1, device=device))
    group = dist.shrink_group([])
    assert (group.rank(), group.size()) == (rank, last)
    dist.all_reduce(tensor := given(rank, 3).to(device))
    same(tensor, functools.reduce(torch.add, [given(r, 3) for r in range(last)]), device)
    return f"gone on after {time.monotonic() - began:.2f} s"


def outputs_wait_for_their_stream(device: torch.device) -> None:
    """Check that a call synchronizes its output's stream, which may have pending writes; for the stand-in only."""
    import away

    before = away.Stream.waits
    dist.broadcast(torch.ones(1, device=device), 0)
    assert away.Stream.waits - before == (dist.get_rank() > 0)


def captures_are_refused(device: torch.device) -> None:
    """Check that a call within the capture of a graph is refused before a copy begins; for the stand-in only."""
    import away

    tensor = torch.ones(1, device=device)
    away.Stream.captures = True
    try:
        with pytest.raises(dist.UsageError, match="the current stream of away:0 is being captured in a graph"):
            dist.all_reduce(tensor)
    finally:
        away.Stream.captures = False
    dist.all_reduce(tensor)
    same(tensor, torch.full((1,), float(dist.get_world_size())), device)


def alone_on_its_device(device: torch.device) -> None:
    """Check an engine that supports only device tensors, as nccl does; for the stand-in only.

    allranks must then send its own data as device tensors.
    """
    world = dist.group.WORLD
    assert world is not None
    assert world._engine is not None
    world._engine.device = device.type
    messages_of_objects = [dist.get_rank()]
    if dist.get_rank() == 0:
        dist.send_object_list(messages_of_objects, 1)
    elif dist.get_rank() == 1:
        dist.recv_object_list(messages_of_objects, 0)
        assert messages_of_objects == [0]
    for check in (objects_and_sparse, training, uneven_training):
        check(device)
    dist.all_reduce(tensor := torch.ones(2, device=device), group=dist.new_group())
    same(tensor, torch.full((2,), float(dist.get_world_size())), device)


CHECKS = (
    every_verb,
    messages,
    from_any_rank,
    dtypes,
    every_dtype,
    layouts,
    scaled_sums,
    objects_and_sparse,
    wrong_calls,
    ranks_on_other_devices,
    several_waiters,
    forked_child,
    gradients,
    training,
    uneven_training,
    nested_backwards,
    checkpoints,
    large,
    through_the_plugin,
)
"""Checks of the native engine, on any device."""

ON_STREAMS = (streams, graphs)
"""Checks of the native engine and of nccl that need a GPU."""


ON_NCCL = (
    every_verb,
    dtypes,
    every_dtype,
    layouts,
    scaled_sums,
    objects_and_sparse,
    messages_of_nccl,
    several_waiters,
    gradients,
    training,
    uneven_training,
    checkpoints,
    large,
)
"""Checks of nccl, in a group with or without an engine for the CPU."""

NOT_ON_THE_CPU = (wrong_calls, ranks_on_other_devices, two_ranks_on_one_gpu, *ON_STREAMS)
"""Checks that have no meaning on CPU tensors."""


def on(checks: Sequence[Check], backend: str | None, kind: str, folder: str) -> str:
    """Run checks on this rank, in a world of their own; return their measurements."""
    sys.path.insert(0, folder)
    if kind == "away":
        import away

        device = away.enter()
    elif kind == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=60)
    try:
        return "; ".join(said for check in checks if (said := check(device)))
    finally:
        if dist.is_initialized():  # a check may have left it
            dist.destroy_process_group()
