"""init_process_group and the properties of the world."""

import os
from datetime import timedelta

import pytest
import torch

import allranks as dist
from allranks.testing import run_ranks


def test_single_process_needs_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    dist.init_process_group()
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "native")
        assert dist.is_initialized()
        assert dist.is_available()
        tensor = torch.arange(100_000.0)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PROD, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            dist.all_reduce(tensor, op)
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.barrier()
        assert torch.equal(tensor, torch.arange(100_000.0))
        with pytest.raises(dist.UsageError, match="has a single rank"):
            dist.recv(tensor)
        with pytest.raises(dist.UsageError, match="already exists"):
            dist.init_process_group()
        assert dist.stats().calls == 8
        assert dist.stats().bytes == 7 * 400_000
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_calls_before_init_and_after_destroy_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (
        dist.barrier,
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
        dist.destroy_process_group,
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.send(torch.ones(1), 0),
    ):
        with pytest.raises(dist.NotInitializedError, match="init_process_group"):
            call()
    monkeypatch.setenv("ALLRANKS_BACKEND", "pigeon")
    with pytest.raises(dist.ConfigError, match="ALLRANKS_BACKEND: unknown backend 'pigeon'"):
        dist.init_process_group()
    dist.init_process_group("tcp")
    dist.destroy_process_group()
    monkeypatch.setenv("ALLRANKS_BACKEND", "allranks")
    dist.init_process_group()
    world = dist.group.WORLD
    assert repr(world) == "<ProcessGroup 'world': rank 0 of 1, native>"
    dist.destroy_process_group()
    with pytest.raises(dist.NotInitializedError, match="was destroyed"):
        world.all_reduce(torch.ones(1))
    assert dist.group.WORLD is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "infiniband"}, "unknown backend 'infiniband': expected 'native'"),
        ({"backend": "ucc"}, "backend 'ucc' is not supported by this version"),
        ({"backend": "cuda:gloo"}, "'cuda:gloo' is invalid"),
        ({"init_method": "http://x:1", "rank": 0, "world_size": 2}, "http"),
        ({"init_method": "tcp://127.0.0.1:1", "rank": 2, "world_size": 2}, "rank"),
        ({"init_method": "tcp://127.0.0.1:1", "rank": -3, "world_size": 2}, "rank"),
        ({"rank": 1}, "WORLD_SIZE"),
        ({"timeout": timedelta(0)}, "timeout must be positive"),
        ({"store": object(), "init_method": "env://"}, "either store or init_method"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=words):  # ConfigError and UsageError are ValueErrors
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()


def test_world_can_be_recreated_without_leaking_descriptors() -> None:
    def body() -> int:
        for _ in range(5):
            dist.destroy_process_group()
            dist.init_process_group(timeout=20, group_name="again")
            tensor = torch.ones(10)
            dist.all_reduce(tensor)
            assert tensor[0] == 3
        return len(os.listdir("/proc/self/fd"))

    descriptors = run_ranks(3, body)
    assert max(descriptors) < 60, "descriptors leaked"


def test_more_ranks_than_cpus_complete_their_calls() -> None:
    def body() -> float:
        tensor = torch.ones(70_000)
        for _ in range(20):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        dist.all_reduce(tensor)
        return tensor[-1].item()

    assert run_ranks(8, body) == [8.0] * 8


def test_forked_child_sees_the_world_of_its_parent_and_cannot_call_it() -> None:
    def body() -> str:
        world = dist.group.WORLD
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                answer = f"{dist.is_initialized()} {dist.get_rank() == world.rank()} {dist.get_world_size()}"
                for call in (world.barrier, dist.barrier):
                    try:
                        call()
                    except dist.NotInitializedError as error:
                        answer += f" {error}"
                os.write(writer, answer.encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        dist.barrier()
        return os.read(reader, 1000).decode()

    for answer in run_ranks(2, body):
        assert answer.startswith("True True 2 process group 'world' belongs to the parent process")
        assert answer.count("belongs to the parent process") == 2
