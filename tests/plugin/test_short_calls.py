"""Plain calls of torch.distributed, whose arguments the core reads: correct results, errors and profiles."""

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks

C: Any = torch._C._distributed_c10d
gather_single = getattr(td, "all_gather_single", td.all_gather_into_tensor)
reduce_scatter_single = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)


def read(group: Any) -> tuple[list[str], Any]:
    """Record the verbs of calls on the fast path; return the list and a function that stops recording."""
    calls: list[str] = []
    ours = group.allranks_group
    now = ours.now

    def noted(verb: str, *args: Any) -> bool:
        calls.append(verb)
        return bool(now(verb, *args))

    ours.now = noted
    return calls, lambda: setattr(ours, "now", now)


def test_plain_calls_of_every_verb_give_correct_results() -> None:
    def body() -> None:
        group = dist.torch_group()
        rank, ranks = td.get_rank(), td.get_world_size()
        made, restore = read(group)

        def do(verb: str, call: Any, result: torch.Tensor, before: torch.Tensor, right: torch.Tensor) -> None:
            for async_op in (False, True):
                result.copy_(before)
                count = group._get_sequence_number_for_group()
                made.clear()
                work = call(async_op)
                assert made == ([] if async_op else [verb])
                assert (work is None) is not async_op
                if work is not None:
                    assert isinstance(work, td.Work)
                    assert work.wait()
                    assert work.is_completed()
                assert group._get_sequence_number_for_group() == count + 1
                assert torch.equal(result, right), (verb, async_op)

        one, mine = torch.empty(3), torch.full((3,), rank + 1.0)
        out, whole = torch.empty(3 * ranks), torch.arange(3.0 * ranks)
        listed, total = list(out.chunk(ranks)), ranks * (ranks + 1) / 2
        gathered = torch.arange(1.0, ranks + 1).repeat_interleave(3)
        do("all_reduce", lambda a: td.all_reduce(one, async_op=a), one, mine, torch.full((3,), total))
        root = torch.full((3,), total) if rank == 1 else mine
        do("reduce", lambda a: td.reduce(one, 1, async_op=a), one, mine, root)
        do("broadcast", lambda a: td.broadcast(one, 1, async_op=a), one, mine, torch.full((3,), 2.0))
        do("all_gather", lambda a: td.all_gather(listed, mine, async_op=a), out, whole, gathered)
        do("all_gather", lambda a: gather_single(out, mine, async_op=a), out, whole, gathered)
        part = ranks * whole[3 * rank : 3 * rank + 3]
        do("reduce_scatter", lambda a: reduce_scatter_single(one, whole, async_op=a), one, mine, part)
        do("reduce_scatter", lambda a: td.reduce_scatter(one, list(whole.chunk(ranks)), async_op=a), one, mine, part)
        do("all_to_all", lambda a: td.all_to_all_single(out, mine.repeat(ranks), async_op=a), out, whole, gathered)
        do("barrier", lambda a: td.barrier(async_op=a), one, mine, mine)
        restore()

    run_ranks(2, body)
    run_ranks(3, body)


def test_core_starts_asynchronous_calls() -> None:
    def body() -> None:
        group = dist.torch_group()
        rank, ranks = td.get_rank(), td.get_world_size()
        made: list[Any] = []
        started = group._calls.started
        group._calls.started = lambda call: made.append(call) or started(call)

        mine, out = torch.full((3,), rank + 1.0), torch.empty(3 * ranks)
        listed, whole = list(out.chunk(ranks)), torch.arange(3.0 * ranks)
        gathered = torch.arange(1.0, ranks + 1).repeat_interleave(3)
        parts = list(gathered.chunk(ranks))
        total = torch.full((3,), ranks * (ranks + 1) / 2)
        part = ranks * whole[3 * rank : 3 * rank + 3]

        def do(call: Any, *results: torch.Tensor) -> None:
            for ask in (lambda work: work.result(), lambda work: work.get_future().wait()):
                for waits_first in (True, False):
                    mine.fill_(rank + 1.0)
                    out.zero_()
                    made.clear()
                    work = call()
                    assert len(made) == 1
                    if waits_first:
                        assert work.wait(timedelta(seconds=60))
                        assert work.wait()
                    found = ask(work)
                    assert len(found) == len(results)
                    assert all(torch.equal(f, r) for f, r in zip(found, results, strict=True))
                    assert work.is_completed()
                    assert work.is_success()
                    assert work.exception() is None

        do(lambda: td.all_reduce(mine, async_op=True), total)
        do(lambda: td.broadcast(mine, 1, async_op=True), torch.full((3,), 2.0))
        do(lambda: td.all_gather(listed, mine, async_op=True), *parts)
        do(lambda: gather_single(out, mine, async_op=True), *parts)
        do(lambda: reduce_scatter_single(mine, whole, async_op=True), part)
        do(lambda: td.all_to_all_single(out, mine.repeat(ranks), async_op=True), gathered)
        do(lambda: td.barrier(async_op=True))

        # The program drops its references to the works and their tensors.
        for _ in range(200):
            td.all_reduce(torch.ones(5000), async_op=True)
        value = torch.ones(2)
        td.all_reduce(value, async_op=True).wait()
        assert torch.equal(value, torch.full((2,), float(ranks)))

    run_ranks(2, body)


def test_ops() -> None:
    def body() -> None:
        dist.torch_group()
        operands = [torch.tensor([6, 3, 12]) * (r + 1) for r in range(2)]
        right = {
            "SUM": operands[0] + operands[1],
            "PRODUCT": operands[0] * operands[1],
            "MIN": torch.minimum(*operands),
            "MAX": torch.maximum(*operands),
            "BAND": operands[0] & operands[1],
            "BOR": operands[0] | operands[1],
            "BXOR": operands[0] ^ operands[1],
        }
        for name, value in right.items():
            for op in (getattr(td.ReduceOp, name), td.ReduceOp(getattr(td.ReduceOp, name))):
                tensor = operands[td.get_rank()].clone()
                td.all_reduce(tensor, op)
                assert torch.equal(tensor, value), name
        tensor = operands[td.get_rank()].double()
        td.all_reduce(tensor, td.ReduceOp.AVG)
        assert torch.equal(tensor, right["SUM"].double() / 2)
        tensor = operands[td.get_rank()].double()
        td.all_reduce(tensor, td._make_nccl_premul_sum(0.5))
        assert torch.equal(tensor, right["SUM"].double() / 2)

    run_ranks(2, body)


def test_only_plain_blocking_calls_use_the_fast_path() -> None:
    """Check options that the core leaves to Python, a profiled call, and a list of several tensors."""

    def body() -> None:
        group = dist.torch_group()
        made, restore = read(group)

        def options(**fields: Any) -> Any:
            opts = C.AllreduceOptions()
            for name, value in fields.items():
                setattr(opts, name, value)
            return opts

        def reduced(call: Any) -> tuple[float, int]:
            made.clear()
            tensor = torch.ones(1)
            call(tensor)
            return tensor.item(), len(made)

        assert reduced(lambda t: group.allreduce([t], options()).wait()) == (2.0, 0)  # asynchronous
        assert reduced(lambda t: group.allreduce([t], options(asyncOp=False)).wait()) == (2.0, 1)
        limited = options(asyncOp=False, timeout=timedelta(seconds=20))
        assert reduced(lambda t: group.allreduce([t], limited).wait()) == (2.0, 0)
        assert reduced(lambda t: group.allreduce([t, torch.ones(1)], options(asyncOp=False)).wait()) == (4.0, 0)
        assert reduced(lambda t: group.allreduce(t).wait()) == (2.0, 0)  # another signature
        with torch.profiler.profile() as profile:
            assert reduced(td.all_reduce)[0] == 2.0
        assert any("all_reduce" in event.key for event in profile.key_averages())
        restore()

    run_ranks(2, body)


def test_errors() -> None:
    """Check error types, gloo's message in errors of wrong calls, and the recorded failure of a group."""

    def body() -> None:
        group = dist.torch_group()
        with pytest.raises(dist.UsageError, match="gloo's message: invalid tensor size"):
            gather_single(torch.empty(5), torch.ones(2))
        for async_op in (False, True):
            tensor = torch.ones(2 + td.get_rank())
            work = None
            with pytest.raises(dist.MismatchError, match=r"(?s)all_reduce.*test_short_calls\.py"):  # noqa: PT012
                work = td.all_reduce(tensor, async_op=async_op)
                work.wait()
            assert (work is not None) is async_op
        if td.get_rank() == 1:
            os._exit(0)
        with pytest.raises(dist.PeerLostError, match="rank 1"):
            td.all_reduce(torch.ones(1))
        assert isinstance(group._calls.failure, dist.AllranksError)

    run_ranks(2, body, may_die=[1])


def test_group_on_another_engine_works_without_a_fast_path() -> None:
    """Use a group without a fast path, also in a process that has not loaded the native engine."""

    def body() -> None:
        dist.torch_group()
        for async_op in (False, True):
            tensor = torch.ones(1)
            work = td.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()
            assert tensor.item() == 2

    run_ranks(2, body, env={"ALLRANKS_BACKEND": "gloo"})
    code = "import torch, allranks as dist; import torch.distributed as td; dist.init_process_group('gloo');"
    code += "dist.torch_group(); t = torch.ones(1); td.all_reduce(t, async_op=True).wait(); assert t.item() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_on_a_closed_group_raise_not_initialized_error() -> None:
    def body() -> None:
        dist.torch_group()
        made = td.new_group([0, 1])
        tensor = torch.ones(1)
        td.all_reduce(tensor, group=made)
        made.shutdown()
        for async_op in (False, True):
            with pytest.raises(dist.NotInitializedError):
                td.all_reduce(tensor, group=made, async_op=async_op)

    run_ranks(2, body)
