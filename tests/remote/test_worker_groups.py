"""Groups of workers, copies between workers, and collectives, compared with the local CPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import allranks
from allranks.remote.master.groups import Group
from allranks.remote.master.master import Master
from allranks.remote.master.start import init_master_worker


@pytest.fixture(scope="module")
def mw() -> Iterator[Master]:
    with init_master_worker(workers=3, timeout=60) as made:
        yield made


def close_to_local(remote: torch.Tensor, local: torch.Tensor) -> None:
    fetched = remote.cpu()
    assert fetched.dtype == local.dtype
    assert fetched.stride() == local.stride()
    assert torch.equal(fetched, local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_copies_between_workers_keep_values_and_bypass_the_master(mw: Master, dtype: torch.dtype) -> None:
    local = torch.arange(24).reshape(2, 3, 4).to(dtype)
    there = local.to("worker:1")
    sent = mw.connections.outbox.sent(0), mw.connections.outbox.sent(1)
    copied = there.to("worker:2")
    assert copied.device == torch.device("worker:2")
    close_to_local(copied, local)
    close_to_local(there.permute(2, 0, 1).to("worker:2"), local.permute(2, 0, 1))
    close_to_local(there[:, 1].to("worker:2"), local[:, 1].clone())
    close_to_local(there[:0].to("worker:2"), local[:0])
    close_to_local(there[0, 0, 0].to("worker:2"), local[0, 0, 0])
    assert mw.connections.outbox.sent(0) - sent[0] < 3000 > mw.connections.outbox.sent(1) - sent[1]


def test_large_copies_between_workers_bypass_the_master(mw: Master) -> None:
    local = torch.randn(1 << 20)
    there = local.to("worker:1")
    mw.synchronize()
    sent = mw.connections.outbox.sent(0) + mw.connections.outbox.sent(1)
    back = there.to("worker:2").to("worker:1")
    close_to_local(back, local)
    assert mw.connections.outbox.sent(0) + mw.connections.outbox.sent(1) - sent < 4096


def test_copies_between_workers_convert_dtypes_and_assign_slices(mw: Master) -> None:
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


def test_group_tensor_has_a_shard_on_each_worker(mw: Master) -> None:
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


def test_scatter_copies_its_source_and_join_shares_memory(mw: Master) -> None:
    group = mw.group([1, 2])
    whole = torch.arange(8.0)
    assert torch.equal(group.gather(group.scatter(whole.to("worker:1"))), whole)
    one, two = torch.ones(3, device="worker:1"), torch.zeros(3, device="worker:2")
    both = group.join([one, two])
    both += 5
    close_to_local(one, torch.full((3,), 6.0))
    close_to_local(two, torch.full((3,), 5.0))
    source = whole.to("worker:1")
    group.scatter(source).zero_()
    close_to_local(source, whole)


def test_tensor_moved_to_a_group_is_copied_to_each_worker(mw: Master) -> None:
    group, local = mw.group([2, 1]), torch.randn(3, 3)
    for source in (local, local.to("worker:1"), local.to("worker:2")):
        copied = source.to(group.device)
        close_to_local(copied.shard(1), local)
        close_to_local(copied.shard(2), local)
    factor = torch.tensor(2.0, requires_grad=True)  # operations accept a CPU tensor without dimensions
    (group.scatter(torch.arange(6.0)) * factor).sum().backward()
    assert factor.grad == 15
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


def test_broadcast_all_gather_and_reduce_scatter_match_local_results(mw: Master) -> None:
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
    turns = torch.tensor([1 + 2j, 3 - 1j, 2j, 1j]).conj()  # conj() only sets the conjugate bit
    close_to_local(group.all_gather(group.scatter(turns)).shard(1), turns.resolve_conj())
    close_to_local(group.all_gather(group.scatter(turns.conj()).conj()).shard(2), turns.resolve_conj())
    close_to_local(group.all_gather(parts.sum()).shard(1), torch.stack([whole[:2].sum(), whole[2:].sum()]))


def test_wrong_use_of_groups_raises(mw: Master) -> None:
    group = mw.group([1, 2])
    parts = group.scatter(torch.zeros(4))
    for wrong, said in (
        (lambda: mw.group([1, 1]), "expected distinct ranks"),
        (lambda: mw.group([]), "expected distinct ranks"),
        (lambda: mw.group([1, 9]), "1 to 3"),
        (lambda: group.scatter(torch.zeros(3)), "2 equal parts"),
        (lambda: group.scatter(torch.zeros(4), dim=1), "dimension 1 of (4,) cannot be split"),
        (lambda: group.reduce_scatter(parts[:1]), "dimension 0 of (1,) cannot be split"),
        (lambda: group.reduce_scatter(parts, op="median"), "expected one of"),
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


def test_error_propagates_with_copies_and_collectives_of_its_tensor(mw: Master) -> None:
    """Copy and reduce a poisoned tensor; the other worker must not wait forever."""
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


class Rows:
    """Local reference for a group under autograd: each row of a tensor stands for the shard of a worker."""

    def scatter(self, x: Any, dim: int = 0) -> Any:
        return torch.stack(x.chunk(2, dim))

    def gather(self, x: Any, dim: int = 0) -> Any:
        return torch.cat(x.unbind(), dim)

    def all_gather(self, x: Any, dim: int = 0) -> Any:
        return torch.stack([torch.cat(x.unbind(), dim)] * 2)

    def reduce_scatter(self, x: Any, op: str = "sum", dim: int = 0) -> Any:
        return torch.stack((x.sum(0) if op == "sum" else x.mean(0)).chunk(2, dim))

    def join(self, tensors: Any) -> Any:
        return torch.stack(tensors)

    def all_reduce_(self, tensors: Any, op: str = "sum") -> None:
        for each in tensors:
            each.copy_((each.sum(0) if op == "sum" else each.mean(0)).expand_as(each))

    def broadcast_(self, x: Any, src: int) -> None:
        x.copy_(x[src - 1].expand_as(x))

    def shard(self, x: Any, rank: int) -> Any:
        return x[rank - 1]

    def everywhere(self, x: Any) -> Any:
        return torch.stack([x] * 2)

    def at(self, x: Any, rank: int) -> Any:
        return x


class Workers(Group):
    def shard(self, x: Any, rank: int) -> Any:
        return x.shard(rank)

    def everywhere(self, x: Any) -> Any:
        return x.to(self.device)

    def at(self, x: Any, rank: int) -> Any:
        return x.to(f"worker:{rank}")


def through_scatter_and_gather(g: Any, x: Any) -> Any:
    return g.gather(g.scatter(x.sin(), dim=1).exp(), dim=1)


def through_scatter_from_a_worker(g: Any, x: Any) -> Any:
    whole = g.gather(g.scatter(g.at(x, 2).sin(), dim=1).exp())
    return g.gather(g.scatter(g.at(whole, 3)).sin(), dim=1)  # worker 3 is not in the group


def through_all_gather(g: Any, x: Any) -> Any:
    return g.gather(g.all_gather(g.scatter(x), dim=1).sin() * g.scatter(torch.tensor([[2.0], [3.0]])))


def through_reduce_scatter(g: Any, x: Any) -> Any:
    parts = g.scatter(x).exp()
    return g.gather(g.reduce_scatter(parts, dim=1).sin() * g.reduce_scatter(parts.sin(), "avg", dim=1))


def through_shards_and_join(g: Any, x: Any) -> Any:
    parts = g.scatter(x)
    one, two = g.shard(parts, 1), g.shard(parts, 2)
    return g.gather(g.join([g.at(two, 1).sin(), g.at(one.exp() * one, 2)]).sin() * parts)


def through_copies_to_all(g: Any, x: Any) -> Any:
    return g.gather(g.everywhere(x).sin() * g.scatter(torch.tensor([[2.0], [3.0]])))


def through_changes_in_place(g: Any, x: Any) -> Any:
    parts, given = g.scatter(x), g.scatter(torch.ones(4, 4))
    made = [parts + parts, (parts + parts)[..., 1:], given]
    g.all_reduce_(made)
    averaged, spread = made[0].sin(), made[1].sin()
    g.all_reduce_([averaged], op="avg")
    g.broadcast_(spread, src=2)
    return g.gather(averaged) * g.gather(spread.sum(-1, keepdim=True)) * g.gather(given)


@pytest.mark.parametrize(
    "program",
    [
        through_scatter_and_gather, through_scatter_from_a_worker, through_all_gather, through_reduce_scatter,
        through_shards_and_join, through_copies_to_all, through_changes_in_place,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it for forward-mode derivatives
def test_derivatives_through_groups_match_local_derivatives(
    mw: Master, as_many_threads: None, program: Callable[[Any, Any], Any]
) -> None:
    found = []
    for group in (Workers(mw.group([1, 2])._place), Rows()):
        torch.manual_seed(1)
        x = torch.randn(4, 4, requires_grad=True)
        y = program(group, x)
        (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        with forward_ad.dual_level():
            moved = program(group, forward_ad.make_dual(x.detach(), x.detach().cos()))
            found.append((y, first, second, forward_ad.unpack_dual(moved).tangent))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.abs().sum() > 0


def test_captured_step_with_groups_and_their_workers_matches_local_training(mw: Master, as_many_threads: None) -> None:
    group = mw.group([1, 2])
    torch.manual_seed(2)
    start = torch.randn(4, 4)
    mine, each = nn.Parameter(start.to("worker:1")), nn.Parameter(start.to(group.device))
    local = [nn.Parameter(start.clone()) for _ in range(3)]
    ours, theirs = torch.optim.SGD([mine, each], lr=0.1), torch.optim.SGD(local, lr=0.1)

    @allranks.capture
    def step(x: torch.Tensor) -> Any:
        own = group.reduce_scatter(group.all_gather(group.scatter(x @ mine) @ each).tanh() * each, "avg") * 1
        group.all_reduce_(own)
        both = group.join([own.shard(2).to("worker:1") * 2, own.shard(1).to("worker:2").square()])
        loss = both.sin().sum()
        total = loss.shard(1) + loss.shard(2).to("worker:1")
        total.backward()
        ours.step()
        ours.zero_grad()
        return total.detach(), both.detach(), both.detach().shard(2)

    for _ in range(5):
        x = torch.randn(4, 4)
        parts = [part @ weight for part, weight in zip((x @ local[0]).chunk(2), local[1:], strict=True)]
        wide = [torch.cat(parts).tanh() * weight for weight in local[1:]]
        one, two = ((wide[0] + wide[1]) / 2).chunk(2)
        sums = [one * 1 + two * 1 for _ in range(2)]
        both = sums[0] * 2, sums[1].square()
        total = both[0].sin().sum() + both[1].sin().sum()
        total.backward()
        theirs.step()
        theirs.zero_grad()
        found = step(x.to("worker:1"))
        close_to_local(found[0], total.detach())
        close_to_local(found[1].shard(1), both[0].detach())
        close_to_local(found[2], both[1].detach())
    assert step.recordings == 1
    for here, there in zip(local, (mine.detach(), each.detach().shard(1), each.detach().shard(2)), strict=True):
        close_to_local(there, here.detach())


def test_operations_that_autograd_cannot_follow_are_refused(mw: Master) -> None:
    group = mw.group([1, 2])
    parts = group.scatter(torch.ones(4, requires_grad=True))
    both = group.join([parts.shard(1), parts.shard(2)])
    for wrong in (lambda: parts.shard(1).zero_(), lambda: both.mul_(2)):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            wrong()
    for wrong in (lambda: group.all_reduce_(parts * 1, op="max"), lambda: group.reduce_scatter(parts, op="min")):
        with pytest.raises(allranks.UsageError, match=r"autograd does not support op='m.*', only sums"):
            wrong()
    squares = parts.square()
    parts.detach().shard(2).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
    for number in (0, 1):
        pieces = [torch.ones(2, device=f"worker:{rank}", requires_grad=True) * 2 for rank in (1, 2)]
        joined = group.join(pieces).sum()
        pieces[number].add_(1)
        with pytest.raises(RuntimeError, match="join: one of the tensors"):
            joined.backward()
    with torch.no_grad():
        group.all_reduce_(parts, op="max")
    close_to_local(parts.detach().shard(2), torch.ones(2))


def test_deleted_groups_release_their_resources(mw: Master) -> None:
    """Create groups in a loop; file descriptors and shared memory must not accumulate."""

    def resources() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd" in each for each in maps)

    look = mw.remote(resources, on=mw.group([1, 2, 3]))
    kinds = [ranks for count in (2, 3) for ranks in itertools.permutations((1, 2, 3), count)]
    counts, devices = [], set()
    for number in range(504):
        group = mw.group(kinds[number % 12])
        devices.add(group.device)
        if number % 8 < 2:  # the other groups never communicate
            x = group.scatter(torch.arange(2.0 * len(group)))
            group.all_reduce_(x)
            if number % 96 == 48:
                assert sum(x.shard(group.ranks[-1]).tolist()) == sum(range(2 * len(group)))
        if number % 24 == 0:  # once per round; the first measurement precedes one-time allocations of the workers
            del x
            mw.synchronize()
            counts.append(look().result())
    assert len(devices) > 100
    assert counts[1] == counts[-1]
    assert any(each[1] for each in counts[-1])  # otherwise the measurement counts nothing
    with pytest.raises(allranks.UsageError, match=r"A group's device exists only as .*\n  Keep the result of group"):
        torch.zeros(
            2, device=next(each for each in devices if each.index not in {p.index for p in mw.devices.groups.values()})
        )
