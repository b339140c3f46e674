"""The nccl engine after a loss, without a GPU: a stub replaces torch's backend, and its calls never complete.

Tests that need a GPU are in tests/gpu. The check `a_loss` there kills a rank of a real nccl group.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

import allranks as dist
from allranks import _engines
from allranks._api.groups import history_of
from allranks._engines.c10d import engine as c10d
from allranks._group.exchange import exchange_locally
from allranks._group.process_group import ProcessGroup
from allranks.testing import run_ranks


class StandIn:
    """Stub of torch.distributed.ProcessGroupNCCL. A call waits for a lost rank until ``abort`` is called."""

    def __init__(self, _store: object, rank: int, members: Any, _timeout: object) -> None:
        self.rank, self.size = rank, len(members)
        self.aborts = 0
        self._ended = threading.Event()

    def allreduce(self, _tensors: object, _options: object) -> StandIn:
        return self

    def wait(self, *_: object) -> None:
        assert self._ended.wait(60)
        raise RuntimeError("NCCL communicator was aborted on rank 0.")

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def abort(self) -> None:
        self.aborts += 1
        self._ended.set()


def test_abort_fails_pending_calls_and_shrink_creates_a_new_communicator() -> None:
    """Check that abort calls torch's abort once, and that shrink creates a communicator of the remaining ranks."""

    def body() -> tuple[int, int, str]:
        c10d._nccl = StandIn
        c10d.C10dEngine._check = lambda *_: None  # type: ignore[method-assign] # skips the check for a GPU tensor
        world = dist.group.WORLD
        assert world is not None
        rank = world.rank()
        exchange = partial(exchange_locally, world, [0, 1, 2])
        made = _engines.make_engine("nccl", rank, world.members, exchange, "of nccl", 60.0)
        backend = made._backend  # type: ignore[attr-defined]
        group = ProcessGroup(made, "of nccl", rank, world.members, 60.0)
        group.history = history_of(group, "nccl", [0, 1, 2], b"of nccl")
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = made.all_reduce(torch.ones(2), dist.ReduceOp.SUM, True)
        assert work is not None
        until = time.monotonic() + 60
        while group.failed_ranks() != [1]:
            assert time.monotonic() < until
            time.sleep(0.01)
        group.abort()
        assert backend.aborts == 1
        with pytest.raises(dist.AbortedError, match=r"all_reduce on group 'of nccl' .*called abort\(\)"):
            work.wait()
        with pytest.raises(dist.AbortedError, match=r"Call shrink\(\) to continue with a new group"):
            made.all_reduce(torch.ones(2), dist.ReduceOp.SUM, False)
        assert group.failed_ranks() == [1]
        smaller = group.shrink()
        new = smaller.engine._backend  # type: ignore[attr-defined]
        assert (backend.aborts, new.aborts) == (1, 0)
        found = new.rank, new.size, smaller.backend
        smaller.close()
        return found

    found = run_ranks(3, body, may_die=[1])
    assert [found[rank] for rank in (0, 2)] == [(0, 2, "nccl"), (1, 2, "nccl")]


def test_immediate_close_waits_until_all_ranks_have_connected() -> None:
    """Close the engine immediately on every rank, while rank 2 is late.

    Before the first nccl call, no rank waits for another. Rank 0 must wait, because other ranks connect to its store.
    """

    def body() -> int:
        c10d._nccl = StandIn
        world = dist.group.WORLD
        assert world is not None
        rank = world.rank()

        def exchange(record: bytes) -> list[bytes]:
            records = exchange_locally(world, [0, 1, 2], record)
            if rank == 2:
                time.sleep(0.5)
            return records

        made = _engines.make_engine("nccl", rank, world.members, exchange, "of nccl", 60.0)
        size: int = made._backend.size  # type: ignore[attr-defined]
        made.close()
        return size

    assert run_ranks(3, body) == [3, 3, 3]


@pytest.mark.parametrize(
    "cause",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this.",
    ],
    ids=["before 2.30", "since 2.30"],
)
def test_error_of_nccl_on_a_shared_gpu_names_the_native_engine(cause: str) -> None:
    class Refuses(StandIn):
        def allreduce(self, _tensors: object, _options: object) -> StandIn:
            raise RuntimeError(f"[/pytorch/NCCLUtils.cpp:94] NCCL error: invalid usage\nLast error:\n{cause}")

    def body() -> None:
        c10d._nccl = Refuses
        c10d.C10dEngine._check = lambda *_: None  # type: ignore[method-assign] # skips the check for a GPU tensor
        world = dist.group.WORLD
        assert world is not None
        made = _engines.make_engine("nccl", 0, world.members, partial(exchange_locally, world, [0]), "of nccl", 60.0)
        with pytest.raises(dist.UsageError, match=r"two ranks use the same GPU.*\n.*init_process_group\(\"native\"\)"):
            made.all_reduce(torch.ones(2), dist.ReduceOp.SUM, False)
        made.close()

    run_ranks(1, body)
