"""abort and shrink_group of torch.distributed on groups of allranks, after the loss of a rank."""

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import allranks as dist
from allranks.testing import run_ranks

td: Any = torch_dist
_c10d: Any = td.distributed_c10d


def me() -> int:
    return int(os.environ["RANK"])


def begin(folder: Path, size: int, name: str = "store") -> None:
    store = td.FileStore(str(folder / name), size)
    td.init_process_group("allranks", store=store, rank=me(), world_size=size, timeout=timedelta(seconds=20))


def summed(group: Any = None) -> float:
    tensor = torch.tensor([2.0 ** me()])
    td.all_reduce(tensor, group=group)
    return tensor.item()


def test_abort_ends_the_calls_of_all_ranks_and_allows_a_new_world(tmp_path: Path) -> None:
    def body() -> None:
        begin(tmp_path, 2)
        group = td.group.WORLD
        td.new_group([0, 1])
        if me() == 0:
            with pytest.raises(dist.AbortedError, match="rank 1"):
                td.all_reduce(torch.ones(1))
        else:
            group.abort()
            with pytest.raises(dist.AbortedError):
                td.all_reduce(torch.ones(1))
        if hasattr(group, "get_error"):
            assert group.get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR  # type: ignore[attr-defined]
        _c10d._abort_process_group()
        assert not td.is_initialized()
        begin(tmp_path, 2, "again")
        assert summed() == 3
        td.destroy_process_group()
        assert not dist.is_initialized()

    run_ranks(2, body, init=False)


@pytest.mark.skipif(not hasattr(td, "shrink_group"), reason=f"torch {torch.__version__} has no shrink_group")
def test_shrink_group_removes_the_excluded_ranks(tmp_path: Path) -> None:
    def body() -> None:
        begin(tmp_path, 4)
        some = td.new_group([0, 1, 3])
        assert summed() == 15
        if me() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if me() != 2:
            with pytest.raises(dist.PeerLostError):
                summed(some)
            new = td.shrink_group([1], some, _c10d.SHRINK_ABORT)
            assert (new.rank(), new.size(), summed(new)) == (me() // 3, 2, 9)
            assert td.get_process_group_ranks(new) == [0, 3]
            assert td.get_backend(new) == "allranks"
            tensor = torch.tensor([float(me())])
            td.broadcast(tensor, 3, group=new)
            assert tensor.item() == 3
        new = td.shrink_group([1])
        assert new is td.group.WORLD
        rank = {0: 0, 2: 1, 3: 2}[me()]
        assert (td.get_rank(), td.get_world_size(), summed()) == (rank, 3, 13)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
        assert td.get_process_group_ranks(new) == [0, 1, 2]
        pair = td.new_group([0, 2])
        assert rank == 1 or summed(pair) == 9
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(rank))).sum().backward()
        assert [float(p.grad) for p in model.parameters()] == [1.0]  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="in the exclusion list"):
            td.shrink_group([rank])
        td.destroy_process_group()
        assert not dist.is_initialized()

    run_ranks(4, body, init=False, may_die=(1,))


@pytest.mark.skipif(not hasattr(td, "shrink_group"), reason=f"torch {torch.__version__} has no shrink_group")
def test_shrink_group_raises_store_lost_error_if_the_store_died_with_rank_0() -> None:
    """Check that the error is one of allranks, not torch's socket error.

    Without the store, the surviving ranks cannot agree on a new group.
    """

    def body() -> None:
        port = int(os.environ["TEST_PORT"])
        td.init_process_group("allranks", init_method=f"tcp://127.0.0.1:{port}", rank=me(), world_size=3)
        assert summed() == 7
        if me() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLostError):
            summed()
        with pytest.raises(dist.StoreLostError):
            td.shrink_group([0])

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(3, body, init=False, may_die=(0,), env={"TEST_PORT": str(port)})
