"""Check master-worker mode with workers on GPUs: results equal those of the master's own GPU. Workers share a GPU.

python job_workers.py cuda

The argument is the device type of the workers. With ``cpu``, the same program runs without a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allranks

KIND = sys.argv[1]
on_worker: Any = torch  # its module `worker` has no annotations


def train(device: str, steps: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x, y = torch.randn(32, 8).to(device), torch.randint(4, (32,)).to(device)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach().cpu(), *(each.detach().cpu() for each in net.parameters())]


def equal(remote: list[Tensor], local: list[Tensor]) -> None:
    for ours, theirs in zip(remote, local, strict=True):
        assert torch.equal(ours, theirs), (ours, theirs)


with allranks.init_master_worker(workers=2, worker_device=KIND) as mw:
    where = [mw.remote(lambda x: str(x.device), on=rank)(torch.ones(1, device=f"worker:{rank}")) for rank in mw.ranks]
    assert all(each.result().startswith(KIND) for each in where)

    equal(train("worker:1"), train(KIND))

    big = torch.randn(1 << 20)
    assert torch.equal(big.to("worker:1").to("worker:2").cpu(), big)

    group = mw.group([1, 2])
    parts = group.scatter(torch.arange(8.0))
    group.all_reduce_(parts)
    assert group.gather(parts).tolist() == [4.0, 6.0, 8.0, 10.0] * 2

    torch.manual_seed(5)
    drawn = torch.randn(3, device="worker:1").cpu()
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3, device=KIND).cpu(), drawn)

    made = [torch.Generator(on).manual_seed(1) for on in ("worker:1", KIND)]
    given = [torch.rand(3, device=each.device, generator=each).cpu() for each in made]
    assert torch.equal(*given)
    with torch.autocast("worker"), torch.autocast(KIND, torch.float16):
        equal(train("worker:1"), train(KIND))

    start, end = on_worker.worker.Event(enable_timing=True), on_worker.worker.Event(enable_timing=True)
    start.record()
    torch.randn(512, 512, device="worker:1") @ torch.randn(512, 512, device="worker:1")
    end.record()
    assert start.elapsed_time(end) > 0
    assert on_worker.worker.memory_allocated("worker:1") > 0
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(1 << 48, device="worker:2").sum().item()
    assert torch.ones(2, device="worker:2").sum().item() == 2
print("done")
