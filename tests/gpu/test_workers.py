"""Workers of master-worker mode that store their tensors on a GPU. Several workers may share a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

gpu = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU, and a torch that was built for it")

PROGRAM = """
import torch, allranks

def train(device, steps=5):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x, y = torch.randn(32, 8).to(device), torch.randint(4, (32,)).to(device)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach().cpu(), *(each.detach().cpu() for each in net.parameters())]

with allranks.init_master_worker(workers=2, worker_device="cuda") as mw:
    where = [mw.remote(lambda x: str(x.device), on=rank)(torch.ones(1, device=f"worker:{rank}")) for rank in mw.ranks]
    assert all(each.result().startswith("cuda") for each in where)

    for remote, local in zip(train("worker:1"), train("cuda"), strict=True):
        assert torch.equal(remote, local)

    big = torch.randn(1 << 20)
    assert torch.equal(big.to("worker:1").to("worker:2").cpu(), big)

    group = mw.group([1, 2])
    parts = group.scatter(torch.arange(8.0))
    group.all_reduce_(parts)
    assert group.gather(parts).tolist() == [4.0, 6.0, 8.0, 10.0] * 2

    torch.manual_seed(5)
    drawn = torch.randn(3, device="worker:1").cpu()
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3, device="cuda").cpu(), drawn)

    made = [torch.Generator(on).manual_seed(1) for on in ("worker:1", "cuda")]
    given = [torch.rand(3, device=each.device, generator=each).cpu() for each in made]
    assert torch.equal(*given)
    with torch.autocast("worker"), torch.autocast("cuda"):
        for remote, local in zip(train("worker:1"), train("cuda"), strict=True):
            assert torch.equal(remote, local)

    start, end = torch.worker.Event(), torch.worker.Event()
    start.record()
    torch.randn(512, 512, device="worker:1") @ torch.randn(512, 512, device="worker:1")
    end.record()
    assert start.elapsed_time(end) > 0
    assert torch.worker.memory_allocated("worker:1") > 0
    try:
        torch.empty(1 << 48, device="worker:2").sum().item()
    except RuntimeError as error:
        assert "memory" in str(error)
    else:
        raise AssertionError("no out of memory")
    assert torch.ones(2, device="worker:2").sum().item() == 2
print("done")
"""


@gpu
def test_workers_on_gpus_compute_the_same_values_as_the_local_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
