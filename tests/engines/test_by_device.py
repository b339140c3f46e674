"""Groups with one engine per device type, and the meaning of backend names."""

from importlib.util import find_spec

import pytest
import torch

import allranks as dist
from allranks import _engines
from allranks._engines.by_device import ByDevice
from allranks._engines.mpi import job as mpi_job
from allranks._group.process_group import ProcessGroup
from allranks.testing import run_ranks


@pytest.mark.parametrize(
    ("backend", "cuda", "means"),
    [
        (None, False, "native"),
        (None, True, "cpu:native,cuda:nccl"),
        ("NATIVE", True, "native"),
        ("gloo", True, "gloo"),
        ("cpu:gloo,cuda:nccl", False, "gloo"),
        ("cuda:nccl, cpu:gloo", True, "cuda:nccl,cpu:gloo"),
        ("nccl", True, "nccl"),
        ("nccl", False, r"built without nccl\.\n  Pass backend='native', which supports CPU and GPU tensors"),
        ("cuda:nccl", False, r"no pair of device and engine is available in this process\.\n  Pass backend='native'"),
        ("cuda:native", True, "native"),
        ("cpu:native,cuda:native", True, "native"),
        ("cpu:gloo,cuda:native", True, "cpu:gloo,cuda:native"),
        ("cpu:gloo,cuda:native", False, "gloo"),
        ("cpu:gloo,xla:native", True, "gloo"),
        ("gpu:native", True, "'gpu:native' is invalid"),
        ("cuda:nccl,mtia:native", True, "no engine for the CPU is available"),
        ("cpu:nccl", True, "'cpu:nccl' is invalid"),
        ("cpu:gloo,cpu:native", True, "'cpu:native' is invalid"),
        ("cpu:ucc", True, "not supported by this version"),
        ("cpu:mpi,cuda:nccl", True, "cpu:mpi,cuda:nccl"),
        ("cpu:mpi,cuda:mpi", True, "mpi"),
        ("cpu:infiniband", True, "unknown backend 'cpu:infiniband'"),
    ],
)
def test_names(backend: str | None, cuda: bool, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.mtia, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: cuda)
    monkeypatch.setattr(mpi_job, "installed", lambda: True)
    if " " in means:
        with pytest.raises(dist.ConfigError, match=means):
            _engines.check_backend(backend)
    else:
        assert _engines.check_backend(backend) == means


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a torch that is built for CUDA on a host without a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(dist.ConfigError, match=r"'nccl': this process has no cuda device\.\n  Pass backend='native'"):
        _engines.check_backend("nccl")


def test_each_tensor_uses_the_engine_of_its_device() -> None:
    def body() -> None:
        world = dist.group.WORLD
        size, rank = world.size(), world.rank()
        native, gloo = world._engine, dist.new_group(backend="gloo")._engine
        # This test has no CUDA tensors. The gloo engine represents the engine that receives no calls.
        engine = ByDevice("cpu:native,cuda:nccl", {"cpu": native, "cuda": gloo}, "both")
        both = ProcessGroup(engine, "both", rank, world.members, 20.0)
        assert both.backend == "cpu:native,cuda:nccl"
        for asynchronous in (False, True):
            mine, ones = torch.tensor([rank + 1.0]), torch.ones(size)
            rows = [torch.zeros(1) for _ in range(size)]
            everyone = [i + 1.0 for i in range(size)]
            works = [both.all_gather(rows, mine, asynchronous), both.barrier(asynchronous)]
            works.append(both.reduce_scatter(part := torch.zeros(1), ones, async_op=asynchronous))
            works.append(both.all_to_all_single(turned := torch.zeros(size), mine.repeat(size), async_op=asynchronous))
            works.append(both.reduce(at_0 := mine.clone(), 0, async_op=asynchronous))
            works.append(both.broadcast(from_1 := mine.clone(), 1, asynchronous))
            gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
            works.append(both.gather(mine, gathered, 0, asynchronous))
            given = [torch.tensor([float(i)]) for i in range(size)] if rank == 0 else None
            works.append(both.scatter(got := torch.zeros(1), given, 0, asynchronous))
            works.append(both.all_reduce(total := mine.clone(), async_op=asynchronous))
            for work in works:
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()
            assert torch.cat(rows).tolist() == turned.tolist() == everyone
            assert (part.item(), total.item(), from_1.item(), got.item()) == (size, sum(everyone), 2, rank)
            assert at_0.item() == (sum(everyone) if rank == 0 else rank + 1)
            assert gathered is None or torch.cat(gathered).tolist() == everyone
        if rank == 0:
            both.send(torch.ones(1), 1)
            both.isend(torch.ones(1), 1).wait()
        elif rank == 1:
            assert both.recv(torch.zeros(1), 0) == 0
            both.irecv(torch.zeros(1), 0).wait()
        assert gloo.stats().calls == 1  # the barrier at the creation of the group
        assert both.stats().calls >= 18
        with pytest.raises(dist.UsageError, match=r"on meta.*has no engine \(it has cpu:native,cuda:nccl\)"):
            both.all_reduce(torch.zeros(1, device="meta"))
        with pytest.raises(TypeError, match=r"expected a torch.Tensor"):
            both.broadcast([1.0], 0)
        both.close()

    run_ranks(3, body)


def test_error_about_an_unsupported_device_names_the_supported_tensors() -> None:
    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        for group, says in ((None, "no elements"), (gloo, "the gloo engine supports only CPU tensors")):
            with pytest.raises(dist.UsageError, match=f"the tensor is on meta, .*{says}"):
                dist.all_reduce(torch.zeros(1, device="meta"), group=group)

    run_ranks(2, body)


def test_environment_variable_sets_the_default_backend_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_BACKEND", "gloo")
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    with pytest.raises(dist.ConfigError, match=r"no engine of the default backend \(gloo\) supports tensors on cuda"):
        dist.get_default_backend_for_device("cuda")
    monkeypatch.setenv("ALLRANKS_BACKEND", "gloom")
    with pytest.raises(dist.ConfigError, match="ALLRANKS_BACKEND: "):
        dist.get_default_backend_for_device("cpu")


def test_availability_and_default_backends_are_reported() -> None:
    assert dist.is_gloo_available() == dist.is_backend_available("GLOO") == torch.distributed.is_gloo_available()
    assert dist.is_nccl_available() == dist.is_backend_available("nccl") == torch.distributed.is_nccl_available()
    assert dist.is_mpi_available() == dist.is_backend_available("MPI") == (find_spec("mpi4py") is not None)
    assert [dist.get_default_backend_for_device(d) for d in ("cpu", "cuda:1", torch.device("cuda"))] == [
        "native",
        "nccl",
        "nccl",
    ]
    assert dist.Backend.default_device_backend_map == {"cpu": "native", "cuda": "nccl"}
    assert dist.Backend.backend_capability == {
        "native": ["cpu", "cuda"],
        "tcp": ["cpu", "cuda"],
        "gloo": ["cpu"],
        "mpi": ["cpu", "cuda"],
        "nccl": ["cuda"],
    }
