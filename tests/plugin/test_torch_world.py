"""After ``allranks.init_process_group()``, torch's tools find a default group, which their first request creates."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as td

import allranks as dist
from allranks.testing import run_ranks

SEEDS = range(int(os.environ.get("ALLRANKS_WORLD_SEEDS", "3")))

STRICT = "-W", "error::UserWarning", "-W", "ignore:TypedStorage"  # torch 2.10 causes this warning itself

# A program as in torch's tutorials; only the import differs.
PROGRAM = """
import sys
import torch
import {package} as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(backend="gloo", init_method="env://")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
sampler = torch.utils.data.distributed.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=5, shuffle=False, num_workers=1, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
import torch.distributed.checkpoint as dcp
dcp.save({{"model": model.state_dict()}}, checkpoint_id=sys.argv[1])
dcp.load({{"model": model.state_dict()}}, checkpoint_id=sys.argv[1])
print(dist.get_world_size(), *(value.hex() for value in model.module.weight.flatten().tolist()))
dist.destroy_process_group()
"""


def summed(group: object = None) -> float:
    tensor = torch.tensor([2.0 ** td.get_rank()])
    td.all_reduce(tensor, group=group)
    return tensor.item()


def test_program_trains_the_same_weights_with_either_import(tmp_path: Path) -> None:
    printed = []
    for package in ("torch.distributed", "allranks"):
        script = tmp_path / f"{package}.py"
        script.write_text(PROGRAM.format(package=package))
        command = [sys.executable, *STRICT, "-m", "allranks", "run", "-n", "2", str(script)]
        done = subprocess.run(
            [*command, str(tmp_path / package)], capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert "several" not in done.stderr
        lines = {line.partition("] ")[2] for line in done.stdout.splitlines()}
        printed.append({line for line in lines if not line.startswith("[Gloo]")})  # printed by torch 2.10
    assert printed[0] == printed[1]
    assert len(printed[0]) == 1


def test_tools_of_torch_work_on_the_world_of_allranks() -> None:
    def on(engine: str) -> None:
        from torch.distributed.fsdp import fully_shard

        rank = int(os.environ["RANK"])
        dist.init_process_group(engine, timeout=30)
        hook = sys.excepthook
        if rank == 0:
            assert td.is_initialized()  # the other ranks do not have to call it
        assert sys.excepthook is hook
        dist.barrier()
        assert (td.get_rank(), td.get_world_size(), summed()) == (rank, 4, 15)
        assert dist.torch_group() is td.group.WORLD
        pair = dist.new_group([2, 3])
        inner = torch.nn.Linear(3, 1)
        model = torch.nn.parallel.DistributedDataParallel(inner)
        model(torch.ones(2, 3) * rank).sum().backward()
        torch.testing.assert_close(inner.weight.grad, torch.full((1, 3), 3.0))
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert mesh["b"].get_local_rank() == rank % 2
        assert summed(mesh["a"].get_group()) == (5 if rank % 2 == 0 else 10)
        assert dist.get_backend(mesh["a"].get_group()) == engine
        sharded = fully_shard(torch.nn.Linear(2, 2, bias=False), mesh=mesh["b"])
        sharded(torch.ones(1, 2)).sum().backward()
        assert sharded.weight.grad.full_tensor().tolist() == [[1, 1]] * 2
        some = td.new_group([1, 2])
        if rank == 3:  # only on this rank, torch has an additional group
            dist.torch_group(pair)
        if engine != "gloo":
            assert summed(td.new_group(backend="gloo")) == 15
        # Rank 0, which serves torch's store, does not take part. Since torch 2.15, no group may follow on any backend,
        # because torch counts groups that only some ranks create.
        if rank in (1, 2):
            assert summed(some) == 6
            assert summed(td.new_group([2, 1], use_local_synchronization=True)) == 6
        (dist if rank % 2 else td).destroy_process_group()
        assert not td.is_initialized()
        assert not dist.is_initialized()

    def body() -> None:
        for engine in ("native", "tcp", "gloo"):
            on(engine)

    run_ranks(4, body, init=False)


def test_any_rank_thread_or_child_can_request_the_group_first(tmp_path: Path) -> None:
    """Check ranks that do not use torch, a new group without the rank of the store, and concurrent threads."""

    def body() -> None:
        rank = dist.get_rank()
        assert "allranks._plugin.torch_group" not in sys.modules, "the module was loaded before its first use"
        if rank == 1:
            found: list[object] = []
            asking = [threading.Thread(target=lambda: found.append(td.group.WORLD)) for _ in range(8)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            assert found == [td.group.WORLD] * 8
        if rank:
            assert summed(td.new_group([1, 2], use_local_synchronization=True)) == 6
        dist.barrier()
        if rank != 1:
            child = os.fork()
            if child == 0:
                os._exit(td.get_rank() != rank)  # as a dataset does in a data loader's worker
            assert os.waitpid(child, 0)[1] == 0

    run_ranks(3, body)


def test_environment_variable_disables_the_default_group_of_torch() -> None:
    def body() -> None:
        assert not td.is_initialized()
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            torch.utils.data.distributed.DistributedSampler(range(4)).num_replicas  # noqa: B018 - the property raises
        assert dist.torch_group().size() == 2
        assert summed() == 3

    run_ranks(2, body, env={"ALLRANKS_TORCH_WORLD": "0"})

    def wrong() -> None:
        with pytest.raises(dist.ConfigError, match="ALLRANKS_TORCH_WORLD"):
            dist.init_process_group()
        assert not dist.is_initialized()

    run_ranks(1, wrong, env={"ALLRANKS_TORCH_WORLD": "yes"}, init=False)


def test_worlds_of_both_libraries_can_start_and_end_in_any_order(tmp_path: Path) -> None:
    """Create and destroy worlds with both libraries in random order, for ``ALLRANKS_WORLD_SEEDS`` seeds."""

    def run(seed: int) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        chance = random.Random(seed)
        # A world of allranks exists; torch finds it; torch has a world on gloo; torch has created its group.
        ours = shared = gloo = made = False
        said = []
        for step in range(25):
            action = chance.choice(["ours", "torch", "gloo", "ask", "sum", "end ours", "end torch", "one rank asks"])
            said.append(action)
            if action == "one rank asks" and rank == seed % size:
                assert td.is_initialized() == (shared or gloo), said
                time.sleep(0.01)
            made = (shared or gloo) and (made or action in ("ask", "one rank asks", "sum"))
            if made:  # after its first request, torch has a group and cannot create another world
                assert td.is_initialized() == (shared or gloo), said
            meet = {"init_method": f"file://{tmp_path}/{seed}-{step}", "rank": rank, "world_size": size}
            if action == "ours" and ours:
                with pytest.raises(dist.UsageError, match="already exists"):
                    dist.init_process_group(timeout=30)
            elif action == "ours":
                dist.init_process_group(timeout=30)
                ours, shared, made = True, not gloo, False
            elif action in ("torch", "gloo") and (gloo or (shared and made)):
                with pytest.raises(ValueError, match="twice"):
                    td.init_process_group(action, **meet)
            elif action in ("torch", "gloo"):
                td.init_process_group("allranks" if action == "torch" else "gloo", **meet)
                gloo = action == "gloo"
                if gloo:
                    # Without a barrier, one rank could destroy its group while the other rank still connects on gloo.
                    td.barrier()
                ours, shared, made = ours or not gloo, not gloo, True
            elif action == "sum" and (shared or gloo):
                assert summed() == 2**size - 1
            elif action == "end ours" and ours:
                dist.destroy_process_group()
                ours = shared = False
            elif action == "end torch" and (shared or gloo):
                td.destroy_process_group()
                ours, shared, gloo = ours and gloo, False, False
            assert dist.is_initialized() == ours, said
            if ours:
                tensor = torch.ones(1)
                dist.all_reduce(tensor)
                assert tensor.item() == size
        if td.is_initialized():
            td.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        assert not td.is_initialized()

    def body() -> None:
        for seed in SEEDS:
            run(seed)
        assert len(os.listdir("/proc/self/fd")) < 100

    run_ranks(2, body, init=False)
