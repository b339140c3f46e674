"""One world shared by torch.distributed and allranks, and the ways to request groups of allranks from torch."""

import contextlib
import inspect
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks
from support.worlds import world

TIMEOUT = timedelta(seconds=30)
SUPPORTED = {"coalescing", "reconfigure", "shrinking", "splitting", "window"}
UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(td.new_group).parameters else {}
reduce_scatter_single = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)


def init(backend: str = "allranks", **options: object) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    td.init_process_group(backend, **{"rank": rank, "world_size": size, "timeout": TIMEOUT, **options})


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    td.init_process_group("allranks", store=td.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield
    finally:
        td.destroy_process_group()


def summed(group: object = None) -> float:
    tensor = torch.tensor([2.0 ** td.get_rank()])
    td.all_reduce(tensor, group=group)
    return tensor.item()


def test_init_process_group_accepts_a_file_an_address_and_a_store(tmp_path: Path) -> None:
    """Initialize by a file, by an address and by a store, one after the other in one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body() -> None:
        rank = int(os.environ["RANK"])
        for options in (
            {"init_method": f"file://{tmp_path / 'meet'}"},
            {"init_method": f"tcp://127.0.0.1:{port}"},
            {"store": td.FileStore(str(tmp_path / "store"), 2)},
        ):
            init(**options)
            assert summed() == 3
            assert (td.get_backend(), td.get_world_size(), td.get_rank()) == ("allranks", 2, rank)
            assert td.get_process_group_ranks(td.group.WORLD) == [0, 1]
            td.destroy_process_group()
            assert not td.is_initialized()
            assert not dist.is_initialized()

    run_ranks(2, body, init=False)


def test_groups_of_torch_work_in_calls_of_allranks(tmp_path: Path) -> None:
    def body() -> None:
        with world("allranks", tmp_path / "meet"):
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (td.get_rank(), 3, "native")
            group = td.new_group([2, 0], **UNSORTED)
            tensor = torch.tensor([1.0 + dist.get_rank()])
            dist.all_reduce(tensor)
            assert tensor.item() == 6
            if dist.get_rank() != 1:
                dist.broadcast(tensor, src=2, group=group)
                assert dist.get_rank(group) == td.get_rank(group)
                everyone = [None, None]
                dist.all_gather_object(everyone, dist.get_rank(), group=group)
                assert everyone == td.get_process_group_ranks(group) == ([2, 0] if UNSORTED else [0, 2])
            model = dist.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            model(torch.ones(2, 3) * dist.get_rank()).sum().backward()
            torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), 2.0))
            dist.destroy_process_group()
            assert not td.is_initialized()

    run_ranks(3, body, init=False)


def test_groups_of_allranks_work_in_calls_of_torch() -> None:
    def body() -> None:
        rank = dist.get_rank()
        some = dist.new_group([2, 1], sort_ranks=False)
        world = dist.torch_group()
        assert world is td.group.WORLD is dist.torch_group()
        assert (td.get_rank(), td.get_world_size(), summed()) == (rank, 3, 7)
        groups = [world, dist.torch_group(some)] if rank else [world]
        assert not rank or td.get_process_group_ranks(groups[1]) == [2, 1]
        for group in groups:
            inner = torch.nn.Linear(3, 1)
            model = torch.nn.parallel.DistributedDataParallel(inner, process_group=group)
            model(torch.ones(2, 3) * rank).sum().backward()
            mean = sum(td.get_process_group_ranks(group)) / group.size()
            torch.testing.assert_close(inner.weight.grad, torch.full((1, 3), 2.0 * mean))
        made = td.new_group([0, 1])  # torch's own function still works
        if rank < 2:
            assert summed(made) == 3
        td.destroy_process_group()
        assert not dist.is_initialized()

    run_ranks(3, body)


def test_groups_of_allranks_and_gloo_work_in_one_job(tmp_path: Path) -> None:
    """Use a group of each backend in one job, with either as the world, also as mesh dimensions."""

    def trained(group: object) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 5), 1.0 + step + td.get_rank())).sum().backward()
            optimizer.step()
        return model.module.weight.detach()

    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        for first, other in (("gloo", "allranks"), ("allranks", "gloo")):
            with world(first, tmp_path / first):
                beside = td.new_group(backend=other)
                assert (td.get_backend(), td.get_backend(beside)) == (first, other)
                assert torch.equal(trained(td.group.WORLD), trained(beside))
                mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"), backend_override={"b": other})
                assert td.get_backend(mesh["b"].get_group()) == other
                assert summed(mesh["b"].get_group()) == 3

    run_ranks(2, body, init=False)


def test_each_backend_receives_the_tensors_of_its_device(tmp_path: Path) -> None:
    """Check that nccl is ignored if it is missing, and that each backend receives the tensors of its device."""

    def body() -> None:
        if not td.is_nccl_available():
            with world("cpu:allranks,cuda:nccl", tmp_path / "nccl"):
                assert summed() == 3
                assert summed(td.new_group()) == 3
        from torch.testing._internal.distributed import fake_pg

        assert fake_pg
        with world("cpu:allranks,meta:fake", tmp_path / "fake"):
            group = td.group.WORLD
            assert summed() == 3
            meta = torch.ones(3, device="meta")
            if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):  # not in torch 2.10
                td.all_reduce(meta)
                td.broadcast(meta, src=0)
                td.all_gather_into_tensor(torch.empty(6, device="meta"), meta)
            td.barrier()
            assert sorted(device.type for device in group._device_types) == ["cpu", "meta"]
            assert group._get_backend(torch.device("meta")).name() == "fake"
            assert summed(td.new_group([0, 1])) == 3

    run_ranks(2, body, init=False)


def test_torch_world_with_other_ranks_is_rejected_on_allranks_and_separate_on_gloo() -> None:
    def body() -> None:
        with pytest.raises(dist.UsageError, match="allranks is initialized with rank 0 of 1"):
            td.init_process_group("allranks", store=td.HashStore(), rank=0, world_size=2, timeout=TIMEOUT)
        td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
        assert dist.torch_group().size() == 1
        assert dist.torch_group() is not td.group.WORLD
        td.destroy_process_group()

    run_ranks(1, body)


def test_monitored_barrier_names_the_late_rank(tmp_path: Path) -> None:
    def body() -> str:
        with world("allranks", tmp_path / "meet"):
            rank, limit = td.get_rank(), timedelta(seconds=0.3)
            td.monitored_barrier(timeout=TIMEOUT)
            if rank == 1:
                time.sleep(1)
                return ""
            with pytest.raises((dist.TimeoutError, dist.PeerLostError)) as caught:
                td.monitored_barrier(timeout=limit)
            return str(caught.value)

    said = run_ranks(3, body, init=False)
    assert "Rank 1 failed to pass monitoredBarrier" in str(said[0])


def test_features_that_gloo_lacks_work(tmp_path: Path) -> None:
    """Check features that torch rejects on gloo, or that deadlock there."""

    def body() -> None:
        from torch.distributed import _functional_collectives as functional
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def layers() -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(6)])

        def gradients(hook: object, steps: int = 2) -> list[torch.Tensor]:
            inner = layers()
            model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.001)
            model.register_comm_hook(None, hook) if hook else None
            for _ in range(steps):
                model.zero_grad()
                model(torch.full((2, 20), 1.0 + td.get_rank())).sum().backward()
            return [p.grad for p in inner.parameters()]

        def calls_again(_, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations
            def again(future):  # type: ignore[no-untyped-def]
                return td.all_reduce(future.value()[0] / 4, async_op=True).result()[0]

            return td.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

        with world("allranks", tmp_path / "meet"):
            # Callbacks that make calls, with several buckets: gloo's two threads deadlock.
            for a, b in zip(gradients(calls_again), gradients(None), strict=True):
                torch.testing.assert_close(a, b)
            # Steps of ZeroRedundancyOptimizer within backward: torch rejects gloo.
            weights = []
            for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved, None):
                inner = layers()
                model = torch.nn.parallel.DistributedDataParallel(
                    inner, bucket_cap_mb=0.005, gradient_as_bucket_view=True
                )
                zero = ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.SGD, overlap_with_ddp=hook is not None, lr=0.001
                )
                if hook:
                    model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, zero))
                steps = 5 if hook is None else 7  # the first two iterations prepare and make no step
                for _ in range(steps):
                    model.zero_grad()
                    model(torch.full((2, 20), 1.0 + td.get_rank())).sum().backward()
                    None if hook else zero.step()
                weights.append([p.detach().clone() for p in inner.parameters()])
            for others in weights[:2]:
                for a, b in zip(others, weights[2], strict=True):
                    torch.testing.assert_close(a, b)
            # FSDP2 with a custom divide factor: gloo has no PREMUL_SUM.
            model = fully_shard(torch.nn.Linear(2, 2, bias=False))
            model.set_gradient_divide_factor(4.0)
            model(torch.ones(1, 2)).sum().backward()
            assert model.weight.grad.full_tensor().tolist() == [[0.5, 0.5]] * 2
            # AVG of integers rounds toward zero, as on nccl.
            rank, right = td.get_rank(), torch.tensor([-3, 3])
            mine = torch.tensor([-3, 3]) + torch.tensor([-1, 1]) * rank
            pieces = [torch.empty_like(right), torch.empty_like(right)]
            td.all_reduce(pieces[0].copy_(mine), td.ReduceOp.AVG)
            td.reduce(pieces[1].copy_(mine), 1, td.ReduceOp.AVG)
            assert torch.equal(pieces[0], right)
            assert torch.equal(pieces[1], right if rank else mine)
            reduce_scatter_single(pieces[0], torch.cat([mine, mine]), td.ReduceOp.AVG)
            td.reduce_scatter(pieces[1], [mine, mine], td.ReduceOp.AVG)
            assert torch.equal(pieces[0], right)
            assert torch.equal(pieces[1], right)
            assert torch.equal(functional.all_reduce(mine, "avg", td.group.WORLD).wait(), right)
            assert torch.equal(
                functional.reduce_scatter_tensor(torch.cat([mine, mine]), "avg", 0, td.group.WORLD).wait(), right
            )
            with pytest.raises(dist.UsageError, match=r"AVG of torch\.bool"):
                td.all_reduce(mine > 0, td.ReduceOp.AVG)
            # The plugin waits for a tensor without memory of its own. A call of allranks rejects it.
            pending = AsyncCollectiveTensor(torch.ones(2))
            td.all_reduce(pending)
            assert pending.tolist() == [2, 2]
            with pytest.raises(dist.UsageError, match="AsyncCollectiveTensor has no memory of its own"):
                dist.all_reduce(AsyncCollectiveTensor(torch.ones(2)))

    run_ranks(2, body, init=False)


def test_newer_interfaces_of_torch_groups_work_or_raise() -> None:
    """Check that whatever this version of torch has added to groups and backends works or raises an error."""
    with one_rank():
        group = td.group.WORLD
        for asked in (group, group._get_backend(torch.device("cpu"))):
            for name in dir(asked):
                value = getattr(asked, name)
                if name.startswith("supports_") and not callable(value):
                    assert value is (name.removeprefix("supports_") in SUPPORTED), name
        for name, args in (
            ("register_abort_hook", (1, lambda: None)),
            ("unregister_abort_hook", (1,)),
        ):
            if hasattr(group, name):
                with pytest.raises(RuntimeError, match=r"not|new_group"):
                    getattr(group, name)(*args)
        if hasattr(td, "_supports_reconfigure"):
            assert td._supports_reconfigure()
        if hasattr(group, "register_pre_hook"):
            seen: list[str] = []
            group.register_pre_hook(1, lambda _: seen.append("before"))
            group.register_post_hook(2, lambda _: seen.append("after"))
            assert (summed(), seen) == (1, ["before", "after"])
            group.unregister_pre_hook(1)
            group.unregister_post_hook(2)
            assert (summed(), len(seen)) == (1, 2)
        if hasattr(td, "gather_single"):
            for gather in (group.gather_single, group.gather_into_tensor):
                gather(gathered := torch.empty(2), torch.ones(2)).wait()
                assert gathered.tolist() == [1, 1]
            td.gather_single(torch.ones(2) * 3, gathered)
            assert gathered.tolist() == [3, 3]
