"""torch.distributed's interface for changing the members of a group (torch 2.14 and later), on allranks.

The cases come from torch's tests of its own backends and from its documentation.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import allranks as dist
from allranks.testing import run_ranks
from support.handles import pass_on, wait_for

td: Any = torch_dist
pytestmark = pytest.mark.skipif(
    not hasattr(td, "_reconfigure"),
    reason=f"torch {torch.__version__} cannot reconfigure groups; torch 2.14 or later is needed",
)
SIZE = 3


def me() -> int:
    return int(os.environ["RANK"])


def begin(folder: Path, **options: object) -> Any:
    store = td.FileStore(str(folder / "store"), SIZE)
    timeout = timedelta(seconds=20)
    td.init_process_group(
        "allranks", store=store, rank=me(), world_size=SIZE, timeout=timeout, enable_reconfigure=True, **options
    )
    return td.group.WORLD


def handles(folder: Path, step: str) -> list[str]:
    return pass_on(folder, step, td._get_reconfigure_handle(), SIZE)


def reconfigure(uuid: int, members: list[str] | set[str]) -> None:
    assert td._reconfigure(uuid, members, timeout=timedelta(seconds=20)).wait()


def place() -> tuple[int, int, float]:
    tensor = torch.tensor([2.0 ** me()])
    td.all_reduce(tensor)
    return td.get_rank(), td.get_world_size(), tensor.item()


def in_world(tmp_path: Path, body: Callable[[Any], object], **options: Any) -> list[Any]:
    def rank() -> object:
        group = begin(tmp_path)
        result = body(group)
        td.destroy_process_group()
        assert not dist.is_initialized()
        return result

    return run_ranks(SIZE, rank, init=False, **options)


def test_group_communicates_only_after_the_first_reconfigure(tmp_path: Path) -> None:
    def body(group: Any) -> None:
        assert td._supports_reconfigure()
        assert group.supports_reconfigure
        assert (td.get_rank(), td.get_world_size()) == (group.rank(), group.size()) == (-1, -1)
        assert td.get_backend() == "allranks"
        assert group.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"call reconfigure\(\) first"):
            td.all_reduce(torch.ones(1))
        work = td._reconfigure(1, handles(tmp_path, "first"))
        assert isinstance(work, td.Work)
        assert work.wait()
        assert work.is_completed()
        assert work.get_future().wait() == []
        assert place() == (me(), SIZE, 7)
        assert td.get_process_group_ranks(group) == [0, 1, 2]
        assert dist.get_world_size() == SIZE
        rank = td.get_rank()
        received = torch.zeros(4)
        works = [group.send([torch.full((4,), rank + 1.0)], (rank + 1) % SIZE, 0)]
        works.append(group.recv([received], (rank - 1) % SIZE, 0))
        for each in works:
            each.wait()
        assert received.tolist() == [(rank - 1) % SIZE + 1.0] * 4

    in_world(tmp_path, body)


def test_reconfigure_supports_every_change_of_members(tmp_path: Path) -> None:
    """Reconfigure to every kind of membership.

    The cases are: a late join, the same members, single ranks, a split, a merge, the removal of the middle rank, a set
    of members and a reversed order.
    """

    def body(group: Any) -> None:
        own = [td._get_reconfigure_handle()]
        first = handles(tmp_path, "first")
        if me() < 1:
            reconfigure(1, first[:1])
        reconfigure(2, handles(tmp_path, "late join"))
        assert place() == (me(), 3, 7)
        reconfigure(3, handles(tmp_path, "identity"))
        assert place() == (me(), 3, 7)
        reconfigure(10 + me(), own)
        assert place() == (0, 1, 2.0 ** me())
        reconfigure(4, handles(tmp_path, "all again"))
        assert place() == (me(), 3, 7)
        reconfigure(*((5, first[:1]) if me() < 1 else (6, first[1:])))
        assert place() == ((0, 1, 1), (0, 2, 6), (1, 2, 6))[me()]
        reconfigure(7, handles(tmp_path, "merge"))
        assert place() == (me(), 3, 7)
        if me() != 1:
            reconfigure(8, [first[0], first[2]])
            assert place() == (me() // 2, 2, 5)
        reconfigure(9, set(handles(tmp_path, "set")))
        assert place() == (me(), 3, 7)
        reconfigure(20, first[::-1])
        assert place() == (2 - me(), 3, 7)

    in_world(tmp_path, body)


def test_reconfigure_restores_the_group_after_abort_timeout_and_death(tmp_path: Path) -> None:
    def body(group: Any) -> None:
        errors = torch._C._distributed_c10d.ErrorType  # type: ignore[attr-defined]
        first = handles(tmp_path, "first")
        reconfigure(1, first)
        backend = group._get_backend(torch.device("cpu"))
        if me() == 1:
            backend.abort()
            assert backend.get_error() == errors.COMM_ERROR
        with pytest.raises(dist.AbortedError):
            td.all_reduce(torch.ones(1))
        assert group.get_error() == errors.COMM_ERROR
        reconfigure(2, handles(tmp_path, "after abort"))
        assert place() == (me(), 3, 7)
        assert backend.get_error() == errors.SUCCESS
        if me() == 0:
            work = td.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(dist.TimeoutError):
                work.wait(timedelta(seconds=0.2))
            assert group.get_error() == errors.TIMEOUT
        reconfigure(3, handles(tmp_path, "after timeout"))
        assert place() == (me(), 3, 7)
        if me() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 10
        while group.get_error() == errors.SUCCESS and time.monotonic() < until:
            time.sleep(0.01)
        assert group.get_error() == errors.REMOTE_ERROR
        with pytest.raises(RuntimeError, match=r"rank 2 .* is gone"):
            td._reconfigure(4, first, timeout=timedelta(seconds=20))
        with pytest.raises(RuntimeError, match="already used"):
            td._reconfigure(4, first)
        reconfigure(5, first[:2])
        assert place() == (me(), 2, 3)
        td.distributed_c10d._abort_process_group()  # torch removes the group, and can then create another one
        assert not td.is_initialized()
        again = {"store": td.FileStore(str(tmp_path / "again"), 2), "rank": me(), "world_size": 2}
        td.init_process_group("allranks", **again)
        assert place() == (me(), 2, 3)

    in_world(tmp_path, body, may_die=(2,))


def test_ranks_that_request_different_members_raise_mismatch_error(tmp_path: Path) -> None:
    def body(group: Any) -> None:
        first = handles(tmp_path, "first")
        reconfigure(1, first)
        with pytest.raises(dist.MismatchError, match=r"was called with uuid 2 and"):
            td._reconfigure(2, first[:2] if me() == 0 else first, timeout=timedelta(seconds=20))
        assert place() == (me(), 3, 7)

    in_world(tmp_path, body)


def test_ddp_object_continues_after_reconfigure(tmp_path: Path) -> None:
    """Check that gradients are averages over the current ranks."""

    def body(group: Any) -> None:
        first = handles(tmp_path, "first")
        reconfigure(1, first)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))

        def gradient() -> float:
            model.zero_grad()
            model(torch.full((1, 2), float(me()))).sum().backward()
            (parameter,) = model.parameters()
            assert parameter.grad is not None
            return float(parameter.grad[0, 0])

        assert gradient() == 1
        if me() == 1:
            pass_on(tmp_path, "gone", "", 0)
            return
        wait_for(tmp_path / "gone.1")
        reconfigure(2, [first[0], first[2]])
        assert gradient() == 1  # the mean of 0 and 2
        reconfigure(10 + me(), [first[me()]])
        assert gradient() == me()

    in_world(tmp_path, body)


def test_reconfigure_method_ignores_hints_and_foreign_handles_are_rejected(tmp_path: Path) -> None:
    def body(group: Any) -> None:
        options = td.distributed_c10d.ReconfigureOptions()
        options.uuid, options.handles = 5 + me(), {group.get_reconfigure_handle()}
        options.hints = {"anything": "is ignored"}
        td.ProcessGroup.reconfigure(group, options).wait()
        assert (group.rank(), group.size()) == (0, 1)
        with pytest.raises(RuntimeError, match="is not a handle"):
            td._reconfigure(30, ["gloo:0:-1:0:"])

    in_world(tmp_path, body)


def test_world_created_without_enable_reconfigure_can_be_reconfigured(tmp_path: Path) -> None:
    def body() -> None:
        store = td.FileStore(str(tmp_path / "store"), SIZE)
        td.init_process_group("allranks", store=store, rank=me(), world_size=SIZE)
        first = handles(tmp_path, "first")
        reconfigure(1, first[::-1])
        assert place() == (2 - me(), 3, 7)
        td.destroy_process_group()

    run_ranks(SIZE, body, init=False)
