"""TORCH_DISTRIBUTED_DEBUG=DETAIL, and the texts by which programs recognize errors of gloo."""

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import allranks as dist
from allranks.testing import run_ranks

td: Any = torch_dist
LIMIT = timedelta(seconds=0.5)
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
BACKENDS = ["allranks", "gloo"]


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mismatch_is_raised_by_the_asynchronous_call(backend: str) -> None:
    def body() -> None:
        td.set_debug_level_from_env()  # torch has read it when it was imported
        group = td.new_group([0, 1], backend=backend)
        rank, tensor = td.get_rank(), torch.ones(20, 10)
        work = group.allreduce([tensor])
        assert work.is_completed() or work.wait()
        assert tensor[0, 0].item() == 2
        differ: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (lambda: group.allreduce([tensor]), lambda: group.reduce([tensor])),
            (lambda: group.allreduce([tensor]), lambda: group.allreduce([torch.ones(10, 20)])),
            (lambda: td.all_reduce(tensor, group=group, async_op=True), lambda: group.barrier()),
            (lambda: group.broadcast(tensor, 0), lambda: group.allgather([[tensor, tensor.clone()]], [tensor])),
        ]
        for mine in differ:
            text = error_of(mine[rank])
            assert "Detected mismatch between collectives on ranks" in text
            assert f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=" in text
            assert "Collectives differ in the following" in text
            if "OpType=BARRIER" not in text.partition(f"Rank {rank} is")[2].partition(")")[0]:
                assert re.search(r"TensorShape=\[\d+, \d+\], TensorDtypes=Float", text), text
            assert backend == "gloo" or "No tensor was changed" in text
        assert tensor[0, 0].item() == 2

    run_ranks(2, body, env=DETAIL)


def test_level_that_the_program_sets_applies_to_later_groups() -> None:
    def body() -> None:
        groups = [td.new_group([0, 1], backend="allranks")]
        td.set_debug_level(td.DebugLevel.DETAIL)
        groups.append(td.new_group([0, 1], backend="allranks"))
        td.set_debug_level(td.DebugLevel.OFF)
        groups.append(td.new_group([0, 1], backend="allranks"))
        assert [group.allreduce([torch.ones(3)]).is_completed() for group in groups[1:2]] == [True]
        for group, detail in zip(groups, (False, True, False), strict=True):
            tensor = torch.ones((6,) if td.get_rank() else (2, 3))  # only DETAIL compares shapes
            if detail:
                assert "shape" in error_of(lambda group=group, tensor=tensor: td.all_reduce(tensor, group=group))  # type: ignore[misc]
            else:
                td.all_reduce(tensor, group=group)
                assert tensor.sum().item() == 12

    run_ranks(2, body)


def test_group_works_at_this_level() -> None:
    def body() -> None:
        group = dist.torch_group()
        rank, other = td.get_rank(), 1 - td.get_rank()
        value = torch.ones(3)
        work = td.all_reduce(value, async_op=True)
        assert work.get_future().wait()[0].tolist() == [2.0] * 3
        assert work.wait()
        received = torch.empty(3)
        # Messages do not wait for the other rank.
        sent = td.isend(value, other)
        td.recv(received, other)
        sent.wait()
        assert received.tolist() == [2.0] * 3
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([value])
        group._end_coalescing(torch.device("cpu")).wait()
        assert value.tolist() == [4.0] * 3

    run_ranks(2, body, env=DETAIL)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("detail", [False, True])
def test_timeouts_contain_the_texts_of_gloo(backend: str, detail: bool) -> None:
    """Rank 1 calls when the wait of rank 0 has timed out. Its error does not name it as the missing rank."""
    waits, late = r" (Timed out|closed|timeout) ", "Connection closed by peer|Connection reset by peer"
    if backend == "gloo":  # if rank 1 runs much later, its own operation times out
        late += "|Timed out waiting"
    if detail:
        waits = "Ranks 1 failed to pass monitoredBarrier"
    calls: dict[str, Callable[[Any, torch.Tensor, int], object]] = {
        "all_reduce": lambda group, tensor, _: td.all_reduce(tensor, group=group),
        "barrier": lambda group, tensor, _: td.barrier(group=group),
        "asynchronous": lambda group, tensor, _: group.allreduce([tensor]).wait(),
        "message": lambda group, tensor, rank: (td.send if rank else td.recv)(tensor, 1 - rank, group=group),
    }

    def body() -> None:
        td.set_debug_level_from_env()
        rank = td.get_rank()
        # gloo's timeout also limits the creation of the group.
        limit = 4 * LIMIT if backend == "gloo" else LIMIT
        groups = {name: td.new_group([0, 1], timeout=limit, backend=backend) for name in calls}
        for name, call in calls.items():
            if rank:
                dist.recv(torch.empty(1), 0)
            text = error_of(lambda call=call, name=name: call(groups[name], torch.ones(3), rank))  # type: ignore[misc]
            if rank == 0:
                assert re.search(waits if name != "message" else " Timed out ", text), text
                dist.send(torch.ones(1), 1)
                continue
            assert re.search(late, text), text
            if backend == "allranks":
                assert "no data from rank 1" not in text
                assert "rank 0" in text
                assert "timed out" in text

    run_ranks(2, body, env=DETAIL if detail else None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_after_a_rank_was_killed_contains_the_text_of_gloo(backend: str) -> None:
    def body() -> None:
        group = td.new_group([0, 1], backend=backend)
        if td.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        text = error_of(lambda: td.all_reduce(torch.ones(3), group=group))
        assert re.search("Connection closed by peer|Connection reset by peer", text), text

    run_ranks(2, body, may_die={1})


@pytest.mark.parametrize("limit_ms", [10, 0])
def test_timeout_of_a_call_or_a_wait_is_recognized(limit_ms: int) -> None:
    def body() -> None:
        group = dist.torch_group()
        tensor = torch.ones(2)
        opts = torch_dist.BarrierOptions()  # type: ignore[attr-defined]
        opts.timeout = timedelta(milliseconds=limit_ms)
        if td.get_rank() == 0:
            work = group.allreduce([tensor])
            assert "Operation timed out!" in error_of(lambda: work.wait(timedelta(milliseconds=10)))
            dist.send(torch.ones(1), 1)
            work.wait()
            assert f"Timed out waiting {limit_ms}ms for recv" in error_of(lambda: group.barrier(opts).wait())
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.empty(1), 0)
            group.allreduce([tensor]).wait()
            dist.recv(torch.empty(1), 0)
            group.barrier().wait()

    run_ranks(2, body)


def test_late_rank_names_the_rank_that_has_timed_out() -> None:
    def body() -> None:
        group = dist.new_group(timeout=LIMIT)
        rank = dist.get_rank()
        if rank == 1:
            dist.recv(torch.empty(1), 0)
            dist.recv(torch.empty(1), 2)
        text = error_of(lambda: dist.all_reduce(torch.ones(1), group=group))
        if rank == 1:
            assert re.search(r"rank [02] \(.*\) timed out in all_reduce #1, after it had waited for this rank", text)
        else:
            assert "no data from rank 1" in text
            dist.send(torch.ones(1), 1)

    run_ranks(3, body)
