"""Groups of workers, copies between workers, and what workers do together; the oracle is local CPU."""

from __future__ import annotations

import pytest
import torch

import allranks
from allranks.remote.master import Master


def close_to_local(remote: torch.Tensor, local: torch.Tensor) -> None:
    fetched = remote.cpu()
    assert fetched.dtype == local.dtype
    assert fetched.stride() == local.stride()
    assert torch.equal(fetched, local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_copy_goes_from_worker_to_worker(mw: Master, dtype: torch.dtype) -> None:
    local = torch.arange(24).reshape(2, 3, 4).to(dtype)
    there = local.to("worker:1")
    sent = mw.outbox.sent(0), mw.outbox.sent(1)
    copied = there.to("worker:2")
    assert copied.device == torch.device("worker:2")
    close_to_local(copied, local)
    close_to_local(there.permute(2, 0, 1).to("worker:2"), local.permute(2, 0, 1))
    close_to_local(there[:, 1].to("worker:2"), local[:, 1].clone())
    close_to_local(there[:0].to("worker:2"), local[:0])
    close_to_local(there[0, 0, 0].to("worker:2"), local[0, 0, 0])
    assert mw.outbox.sent(0) - sent[0] < 3000 > mw.outbox.sent(1) - sent[1]


def test_large_tensors_go_past_the_master(mw: Master) -> None:
    local = torch.randn(1 << 20)
    there = local.to("worker:1")
    mw.synchronize()
    sent = mw.outbox.sent(0) + mw.outbox.sent(1)
    back = there.to("worker:2").to("worker:1")
    close_to_local(back, local)
    assert mw.outbox.sent(0) + mw.outbox.sent(1) - sent < 4096


def test_copies_convert_and_assign(mw: Master) -> None:
    local = torch.arange(6.0)
    there = local.to("worker:1")
    close_to_local(there.to("worker:2", torch.float64), local.double())
    into = torch.zeros(6, device="worker:2")
    into.copy_(there)
    into[2:4] = there[:2]
    expected = local.clone()
    expected[2:4] = local[:2]
    close_to_local(into, expected)


def test_autograd_crosses_workers(mw: Master) -> None:
    def run(first: str, second: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        a, b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        a, b = a.to(first), b.to(second)
        x = torch.arange(12.0).reshape(3, 4).to(first).requires_grad_()
        loss = b(a(x).relu().to(second)).pow(2).mean()
        loss.backward()
        grads = [x.grad, *(p.grad for p in a.parameters()), *(p.grad for p in b.parameters())]
        return [loss.detach().cpu(), *(each.cpu() for each in grads if each is not None)]

    for remote, local in zip(run("worker:1", "worker:2"), run("cpu", "cpu"), strict=True):
        assert torch.equal(remote, local)


def test_one_handle_for_many_workers(mw: Master) -> None:
    group = mw.group([1, 2])
    assert (len(group), group.ranks, group.device.type) == (2, (1, 2), "worker")
    whole = torch.arange(12.0).reshape(4, 3)
    parts = group.scatter(whole)
    assert parts.shape == (2, 3)
    close_to_local(parts.shard(1), whole[:2])
    close_to_local(parts.shard(2), whole[2:])
    doubled = parts * 2
    doubled[0] += 1
    expected = whole * 2
    expected[0] += 1
    expected[2] += 1
    assert torch.equal(group.gather(doubled), expected)
    close_to_local(group.scatter(whole.T, dim=1).shard(2), whole.T[:, 2:].contiguous())
    parts.shard(2).zero_()
    close_to_local(parts.shard(2), torch.zeros(2, 3))
    assert "worker 1:" in repr(parts)
    assert "worker 2:" in repr(parts)


def test_scatter_from_a_worker_and_join(mw: Master) -> None:
    group = mw.group([1, 2])
    whole = torch.arange(8.0)
    assert torch.equal(group.gather(group.scatter(whole.to("worker:1"))), whole)
    one, two = torch.ones(3, device="worker:1"), torch.zeros(3, device="worker:2")
    both = group.join([one, two])
    both += 5
    close_to_local(one, torch.full((3,), 6.0))
    close_to_local(two, torch.full((3,), 5.0))


def test_a_tensor_to_all_of_a_group(mw: Master) -> None:
    group, local = mw.group([2, 1]), torch.randn(3, 3)
    for source in (local, local.to("worker:1"), local.to("worker:2")):
        copied = source.to(group.device)
        close_to_local(copied.shard(1), local)
        close_to_local(copied.shard(2), local)
    alone = mw.group([2])
    close_to_local(local.to("worker:1").to(alone.device), local)


@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
def test_all_reduce(mw: Master, op: str) -> None:
    group, whole = mw.group([1, 2]), torch.tensor([[1.0, 5.0], [3.0, 2.0]])
    small, many = group.scatter(whole), group.scatter(whole.double())
    version = small._version
    allranks.all_reduce_([small, many], op=op)
    assert small._version > version
    reduced = {
        "sum": whole.sum(0), "avg": whole.mean(0), "product": whole.prod(0), "min": whole.amin(0), "max": whole.amax(0),
    }[op]  # fmt: skip
    for rank in (1, 2):
        close_to_local(small.shard(rank), reduced[None])
        close_to_local(many.shard(rank), reduced[None].double())


def test_broadcast_all_gather_reduce_scatter(mw: Master) -> None:
    group = mw.group([1, 2])
    with group:
        net = torch.nn.Linear(3, 2)
        assert net.weight.device == group.device
        made = torch.zeros(2)
    net.weight.detach().shard(2).zero_()
    group.broadcast_(net.parameters(), src=1)
    assert torch.equal(net.weight.detach().shard(1).cpu(), net.weight.detach().shard(2).cpu())
    assert net.weight.detach().shard(2).abs().sum().item() > 0
    group.all_reduce_(made)
    whole = torch.arange(8.0).reshape(4, 2)
    parts = group.scatter(whole)
    close_to_local(group.all_gather(parts).shard(2), whole)
    close_to_local(group.all_gather(parts, dim=1).shard(1), torch.cat([whole[:2], whole[2:]], 1))
    close_to_local(group.reduce_scatter(parts).shard(2), (whole[:2] + whole[2:])[1:])


def test_wrong_use_of_groups(mw: Master) -> None:
    group = mw.group([1, 2])
    parts = group.scatter(torch.zeros(4))
    for wrong, said in (
        (lambda: mw.group([1, 1]), "each once"),
        (lambda: mw.group([]), "each once"),
        (lambda: mw.group([1, 9]), "1 to 2"),
        (lambda: group.scatter(torch.zeros(3)), "2 equal parts"),
        (lambda: parts[0].item(), "shard(1)"),
        (lambda: parts.cpu(), "shard(1)"),
        (lambda: parts.shard(5), "not on worker:5"),
        (lambda: group.all_reduce_(torch.zeros(2, device="worker:1")), "not on worker:1"),
        (lambda: group.all_reduce_(parts, op="median"), "expected one of"),
        (lambda: group.broadcast_(parts, src=0), "is not in the group"),
        (lambda: group.join([parts.shard(1), parts.shard(1)]), "expected a tensor on worker:2"),
        (lambda: allranks.all_reduce_([torch.zeros(2)]), "all_reduce()"),
    ):
        with pytest.raises(allranks.UsageError, match=said.replace("(", r"\(").replace(")", r"\)")):
            wrong()
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, group"):
        parts + torch.zeros(2, device="worker:1")


def test_a_fault_travels_with_the_tensor(mw: Master) -> None:
    """Neither a copy nor a collective of poison leaves the others waiting."""
    group = mw.group([1, 2])
    table, wrong = torch.zeros(3, device="worker:1"), torch.tensor([5], device="worker:1")
    torch.gather(table, 0, torch.tensor([1], device="worker:1"))
    poisoned = torch.gather(table, 0, wrong)
    with pytest.raises(allranks.RemoteError, match=r"aten::gather.*worker 1 .*test_worker_groups\.py:\d+.*index 5"):
        poisoned.to("worker:2").cpu()
    healthy = torch.zeros(1, device="worker:2")
    both = group.join([poisoned, healthy])
    group.all_reduce_(both)
    with pytest.raises(allranks.RemoteError, match="index 5 is out of bounds"):
        both.shard(2).cpu()
    close_to_local(group.gather(group.scatter(torch.ones(4))), torch.ones(4))
