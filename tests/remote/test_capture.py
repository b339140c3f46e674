"""Captured steps, compared with the same eager step on the local CPU with the same number of threads."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import allranks
from allranks import RemoteError, UsageError
from allranks.remote.master.master import Master

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def batch(number: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def train(device: str, make: Optimizer, captured: bool, calls: int = 12) -> tuple[list[torch.Tensor], Any]:
    net = network().to(device)
    optimizer = make(net.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called: Any = allranks.capture(step) if captured else step
    torch.manual_seed(1)
    losses = [called(*(each.to(device) for each in batch(number))) for number in range(calls)]
    return [each.detach().cpu() for each in (*losses, *net.state_dict().values())], called


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_captured_step_has_the_results_of_the_eager_step(mw: Master, optimizer: str) -> None:
    local, _ = train("cpu", OPTIMIZERS[optimizer], captured=False)
    remote, step = train("worker:1", OPTIMIZERS[optimizer], captured=True)
    assert step.recordings == 1
    for ours, theirs in zip(remote, local, strict=True):
        assert torch.equal(ours, theirs)


def test_captured_step_respects_autocast_generators_and_flags(mw: Master) -> None:
    def run(device: str, captured: bool) -> list[torch.Tensor]:
        kind = torch.device(device).type
        torch.manual_seed(0)
        net = nn.Linear(8, 4).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        generator = torch.Generator(device=device).manual_seed(2)

        def step(x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH), torch.autocast(kind, dtype=torch.bfloat16):
                q = net(x + torch.randn(x.shape, device=device, generator=generator)).view(1, 1, -1, 4)
                loss = F.scaled_dot_product_attention(q, q, q).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called: Any = allranks.capture(step) if captured else step
        losses = [called(batch(number)[0].to(device)) for number in range(5)]
        assert not captured or called.recordings == 1
        return [each.detach().cpu() for each in (*losses, *net.parameters())]

    for ours, theirs in zip(run("worker:1", True), run("cpu", False), strict=True):
        assert torch.equal(ours, theirs)
    assert mw.remote(torch.backends.cuda.flash_sdp_enabled, on=1)().result()

    product: Any = allranks.capture(lambda x: x @ x.mT)
    x = torch.ones(2, 2, device="worker:1")
    for _ in range(3):
        assert product(x).dtype is torch.float32
    for _ in range(3):
        with torch.autocast("worker", dtype=torch.bfloat16):
            assert product(x).dtype is torch.bfloat16
    with sdpa_kernel(SDPBackend.MATH):  # results may depend on flags, so each combination has a recording
        for _ in range(3):
            assert product(x).dtype is torch.float32
    assert product.recordings == 3


def test_replay_is_sent_as_one_small_frame(mw: Master) -> None:
    weight = torch.ones(4, device="worker:1")

    @allranks.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(x.sum()).add_(1).clamp_(max=2)
        return weight * x

    x = torch.ones(4, device="worker:1")
    for _ in range(3):
        step(x)
    mw.synchronize()
    sent, calls = mw.connections.outbox.sent(0), mw.connections.outbox.calls
    held = [step(x) for _ in range(10)]
    mw.connections.outbox.flush()
    assert mw.connections.outbox.calls == calls + 10
    assert mw.connections.outbox.sent(0) - sent <= 10 * (2 + 4 * 2) + 12  # plus the call site, once
    assert len({each._ref.id for each in held}) == 10  # type: ignore[attr-defined]
    assert held[0].cpu().tolist() == [2.0] * 4


def test_gradients_remain_after_a_captured_step(mw: Master) -> None:
    """Accumulate gradients over two micro-batches; they remain after the step, because zero_grad is at its start."""

    def run(device: str, captured: bool) -> list[torch.Tensor]:
        net = network().to(device)
        net.eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.cross_entropy(net(part), target)
                loss.backward()
            optimizer.step()
            return loss.detach()

        called: Any = allranks.capture(step) if captured else step
        found = []
        for number in range(8):
            found.append(called(*(each.to(device) for each in batch(number))))
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return [each.detach().cpu() for each in (*found, *net.parameters())]

    for ours, theirs in zip(run("worker:1", True), run("cpu", False), strict=True):
        assert torch.equal(ours, theirs)


def test_captured_step_with_a_group_matches_local_training(mw: Master) -> None:
    group = mw.group([1, 2])
    with group:
        net = nn.Linear(8, 4)
    group.broadcast_(net.parameters(), src=1)
    local = nn.Linear(8, 4)
    local.load_state_dict({name: each.shard(1).cpu() for name, each in net.state_dict().items()})
    ours, theirs = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(local.parameters(), lr=0.1)

    @allranks.capture
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        allranks.all_reduce_([p.grad for p in net.parameters()], op="avg")
        ours.step()
        ours.zero_grad()
        return loss.detach()

    for number in range(8):
        x, y = batch(number)
        loss = step(group.scatter(x), group.scatter(y))
        halves = [F.cross_entropy(local(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        ((halves[0] + halves[1]) / 2).backward()
        theirs.step()
        theirs.zero_grad()
        assert group.gather(loss).tolist() == pytest.approx([each.item() for each in halves], rel=1e-4)
    assert step.recordings == 1
    torch.testing.assert_close(net.weight.detach().shard(2).cpu(), local.weight.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(net.weight.detach().shard(1).cpu(), net.weight.detach().shard(2).cpu())


def test_captured_pipeline_over_two_workers_matches_local_training(mw: Master) -> None:
    def run(first: str, second: str, captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        a, b = nn.Linear(8, 8).to(first), nn.Linear(8, 4).to(second)
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = a(x).relu()
            loss = F.cross_entropy(b(hidden.to(second)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), hidden.detach()

        called: Any = allranks.capture(step) if captured else step
        found: list[torch.Tensor] = []
        for number in range(8):
            x, y = batch(number)
            found += called(x.to(first), y.to(second))
        return [each.detach().cpu() for each in (*found, *a.parameters(), *b.parameters())]

    for ours, theirs in zip(run("worker:1", "worker:2", True), run("cpu", "cpu", False), strict=True):
        assert torch.equal(ours, theirs)


def test_each_shape_and_argument_value_is_recorded_separately(mw: Master) -> None:
    @allranks.capture(max_recordings=2)
    def double(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    for _ in range(4):
        for size in (2, 3):
            x = torch.arange(float(size))
            assert torch.equal(double(x.to("worker:1")).cpu(), x * 2)
    assert double.recordings == 2
    with pytest.raises(UsageError, match="more than 2 kinds of arguments"):
        double(torch.zeros(4, device="worker:1"))
    double.reset()
    for by in (3.0, 4.0, 3.0, 4.0, 3.0, 4.0):
        assert double(torch.ones(1, device="worker:1"), by=by).item() == by


def test_captured_step_accepts_nested_arguments_and_results(mw: Master) -> None:
    @allranks.capture
    def step(batch: dict[str, list[torch.Tensor]], *, scale: int) -> dict[str, Any]:
        a, b = batch["ab"]
        a.add_(1)
        return {"sum": [a + b * scale], "same": b, "n": scale, "none": None}

    for number in range(6):
        a, b = torch.full((2,), float(number), device="worker:1"), torch.ones(2, device="worker:1")
        version = a._version
        found = step({"ab": [a, b]}, scale=3)
        assert found["sum"][0].cpu().tolist() == [number + 4.0] * 2
        assert a.cpu().tolist() == [number + 1.0] * 2
        assert a._version > version
        assert (found["same"].cpu().tolist(), found["n"], found["none"]) == ([1.0, 1.0], 3, None)
    x = torch.ones(2, device="worker:1")
    # The same tensor twice needs another recording, because an in-place change affects both.
    assert step({"ab": [x, x]}, scale=3)["sum"][0].cpu().tolist() == [8.0, 8.0]


def test_unsupported_operations_are_refused_at_their_call_site(mw: Master) -> None:
    weight = torch.ones(3, device="worker:1", requires_grad=True)
    x = torch.ones(3, device="worker:1")
    nested = allranks.capture(lambda x: x + 1)
    outside = allranks.capture(lambda x: x.clone())
    for step, said in (
        (lambda x: x * x.sum().item(), "the step fetches a value"),
        (lambda x: x + 1 if x.sum() > 0 else x, "the step fetches a value"),
        (lambda x: x[x > 0], "depends on the data"),
        (lambda x: x + torch.ones(3).to("worker:1"), "the step sends a tensor of the master"),
        (lambda x: x.cpu(), "the step fetches a tensor"),
        (lambda x: (x * weight).sum(), r"which a replay cannot return\.\n  Return it with \.detach\(\)"),
        (lambda x: nested(x), "which is also captured"),
        (lambda x: mw.remote(len)([1]), "the step runs a function on a worker"),
        (lambda x: mw.synchronize(), "the step waits for the workers"),
        (lambda x: torch.zeros(2), "returns a tensor of the master"),
    ):
        with pytest.raises(UsageError, match=f"capture: .*{said}"):
            allranks.capture(step)(x)
        assert outside(x).cpu().tolist() == [1.0] * 3  # the failed capture has left no state
    with pytest.raises(UsageError, match=r"test_capture\.py:\d+: the step fetches a value"):
        allranks.capture(lambda x: x.sum().item())(x)
    with pytest.raises(UsageError, match="tensor of the master"):
        outside(torch.ones(3))
    with pytest.raises(UsageError, match="cannot be compared"):
        allranks.capture(lambda x, y: x)(x, {1, 2})
    with pytest.raises(UsageError, match="expected a function"):
        allranks.capture(3)  # type: ignore[arg-type]


def call_often(step: Any, x: torch.Tensor) -> None:
    for _ in range(8):
        step(x)


def test_error_names_the_operation_that_does_not_repeat(mw: Master) -> None:
    counter = io.BytesIO(bytes(range(100)))  # capture cannot detect reads from this object
    x = torch.ones(3, device="worker:1")

    def counts(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 + counter.read(1)[0])

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if counter.read(1)[0] % 2 else x.cos()

    def grows(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(counter.read(1)[0] + 1, 3, device="worker:1").sum(0)

    for step, said in (
        (counts, r"a number that the master computes is \S+ and then \S+ in aten::mul.*test_capture\.py:\d+"),
        (branches, r"is aten::(sin|cos) at .*test_capture\.py:\d+ and then aten::(sin|cos)"),
        (grows, "with other shapes or constants"),
    ):
        captured = allranks.capture(step)
        with pytest.raises(UsageError, match=f"does not repeat the same operations: (.|\n)*{said}"):
            call_often(captured, x)


def test_exception_during_a_capture_leaves_no_recording(mw: Master) -> None:
    fail = [True]

    @allranks.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if fail[0]:
            raise KeyError("mine")
        return y

    x = torch.zeros(2, device="worker:1")
    with pytest.raises(KeyError, match="mine"):
        step(x)
    fail[0] = False
    for _ in range(4):
        assert step(x).cpu().tolist() == [1.0, 1.0]
    assert step.recordings == 1


def test_failing_operation_in_a_replay_poisons_only_its_results(mw: Master) -> None:
    table = torch.arange(3.0, device="worker:1")
    state = torch.zeros(1, device="worker:1")

    @allranks.capture
    def step(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(1)
        found = table.index_select(0, index)
        return (found * 2).sum(), state + 10

    index = torch.tensor([1], device="worker:1")
    for _ in range(4):
        assert step(index)[0].item() == 2.0
    wrong, right = step(torch.tensor([7], device="worker:1"))
    assert right.item() == 15.0
    with pytest.raises(RemoteError, match=r"index_select failed on worker 1 \(queued at .*test_capture.py:\d+\)"):
        wrong.item()
    assert step(index)[0].item() == 2.0
    assert state.item() == 6.0
    mw.synchronize()


def test_replay_increments_versions_so_that_stale_graphs_raise(mw: Master) -> None:
    weight = torch.ones(3, device="worker:1", requires_grad=True)

    @allranks.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.add_(x)
        return x + 1

    x = torch.ones(3, device="worker:1")
    for _ in range(3):
        step(x)
    graph = (weight * weight).sum()
    step(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_assigned_parameter_data_is_noticed(mw: Master) -> None:
    weight = nn.Parameter(torch.ones(2, device="worker:1"))

    @allranks.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).detach()

    x = torch.ones(2, device="worker:1")
    for _ in range(3):
        step(x)
    weight.data = torch.full((2,), 5.0, device="worker:1")
    for _ in range(4):
        assert step(x).cpu().tolist() == [5.0, 5.0]


def test_deleted_captured_step_frees_its_memory(mw: Master) -> None:
    def tensors() -> int:
        gc.collect()
        return int(torch.worker.memory_stats("worker:1")["tensors"])  # type: ignore[attr-defined]

    before = tensors()
    _, step = train("worker:1", OPTIMIZERS["adamw"], captured=True)
    step.reset()
    del step
    assert tensors() == before
    numbers = len(mw.operators.programs)
    for _ in range(3):
        captured = allranks.capture(lambda x: x + 1)
        x = torch.ones(1, device="worker:1")
        for _ in range(3):
            captured(x)
        del captured, x
    assert tensors() == before
    assert len(mw.operators.programs) == numbers


def test_replay_on_a_lost_worker_raises(mw: Master) -> None:
    @allranks.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.ones(2, device="worker:2")
    for _ in range(3):
        step(x)
    mw.respawn(2, force=True)
    with pytest.raises(allranks.WorkerLost):
        step(x)
    x = torch.ones(2, device="worker:2")
    for _ in range(4):
        assert step(x).cpu().tolist() == [2.0, 2.0]


def test_replay_respects_the_storage_offset_of_arguments(mw: Master) -> None:
    """Use `as_strided` and returned views, whose offsets count from the start of the storage."""
    data = torch.arange(12.0, device="worker:1")

    @allranks.capture
    def first(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2,), (1,)) * 1

    @allranks.capture
    def rest(x: torch.Tensor) -> torch.Tensor:
        return x[1:]

    for start in (0, 0, 0, 4, 4, 4, 8, 0):
        part = data[start : start + 4]
        assert first(part).cpu().tolist() == [start, start + 1.0]
        view = rest(part)
        assert view.storage_offset() == start + 1
        assert torch.as_strided(view, (1,), (1,)).item() == start + 1


def test_zero_grad_outside_the_step_is_reported_and_prevents_replay(mw: Master) -> None:
    net = nn.Linear(8, 4, device="worker:1")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @allranks.capture
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    def train(calls: int) -> None:
        for number in range(calls):
            x, y = batch(number)
            step(x.to("worker:1"), y.to("worker:1"))
            assert net.weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"is not replayed, because net\.\w+\.grad changes before(.|\n)*zero_grad"):
        train(12)


class _Trainer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @allranks.capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies."""
        return x * self.scale


def test_method_is_captured_separately_for_each_object() -> None:
    x = torch.ones(3, device="worker:1")
    first, second = _Trainer(2.0), _Trainer(3.0)
    for _ in range(4):
        assert first.step(x).sum().item() == 6
        assert second.step(x).sum().item() == 9
    assert (first.step.recordings, second.step.recordings) == (1, 1)
    first.scale = 5.0
    assert [first.step(x).sum().item() for _ in range(3)] == [15, 15, 15]
    assert copy.deepcopy(second).step(x).sum().item() == 9
    assert _Trainer.step.__doc__ == "Multiplies."
    for scale in range(12):  # more objects than capture keeps recordings for
        trainer = _Trainer(scale)
        assert [trainer.step(x).sum().item() for _ in range(3)] == [3 * scale] * 3
    assert first.step(x).sum().item() == 15
