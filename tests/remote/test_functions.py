"""Python functions on workers."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

import allranks
from allranks import RemoteError
from allranks.remote.master.master import Master


def test_a_function_runs_where_its_tensors_are(mw: Master) -> None:
    def scale(x: torch.Tensor, by: float, *, names: list[str]) -> dict[str, object]:
        return {"x": x * by, "names": [*names, "scaled"], "pid": os.getpid(), "grad": torch.is_grad_enabled()}

    x = torch.arange(3.0, device="worker:2")
    future = mw.remote(scale)(x, 2.0, names=["a"])
    result = future.result()
    assert result["pid"] == mw.connections.by_rank[2].pid
    assert (result["names"], result["grad"]) == (["a", "scaled"], True)
    assert result["x"].device == torch.device("worker:2")
    assert torch.equal(result["x"].cpu(), torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal((result["x"] + x).cpu(), torch.tensor([0.0, 3.0, 6.0]))
    assert future.result() is result
    assert "done" in repr(future)


def test_where_a_function_runs(mw: Master) -> None:
    pids = {rank: line.pid for rank, line in mw.connections.by_rank.items()}
    assert mw.remote(os.getpid, on=2)().result() == pids[2]
    assert mw.remote(os.getpid, on="worker:1")().result() == pids[1]
    assert mw.remote(os.getpid, on=mw.group([2, 1]))().result() == [pids[2], pids[1]]
    with torch.worker.device(2):  # type: ignore[attr-defined]
        assert mw.remote(os.getpid)().result() == pids[2]


def test_functions_are_queued_and_keep_state(mw: Master, tmp_path: Path) -> None:
    queued = tmp_path / "queued"

    def waits() -> None:
        while not queued.exists():
            time.sleep(0.01)

    class Loader:
        def __init__(self) -> None:
            self.at = 0

        def __call__(self) -> torch.Tensor:
            self.at += 1
            return torch.full((2,), float(self.at))

    load = mw.remote(Loader(), on=1)
    slow = mw.remote(waits, on=1)()
    batches = [load() for _ in range(3)]
    queued.touch()
    assert [each.result().sum().item() for each in batches] == [2.0, 4.0, 6.0]
    assert slow.result() is None


def test_results_in_the_order_that_they_are_asked_for(mw: Master) -> None:
    futures = [mw.remote(lambda n: (n, torch.tensor(n)), on=1 + n % 2)(n) for n in range(6)]
    for n, future in reversed(list(enumerate(futures))):
        number, tensor = future.result()
        assert (number, tensor.item()) == (n, n)


def test_what_a_function_raises(mw: Master) -> None:
    def fails(x: int) -> float:
        return x / 0

    future = mw.remote(fails, on=1)(1)
    with pytest.raises(
        RemoteError, match=r"worker 1 \(queued at .*test_functions.py:\d+\): ZeroDivisionError"
    ) as caught:
        future.result()
    assert "x / 0" in caught.value.traceback
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        future.result()
    with pytest.raises(allranks.TimeoutError):
        (waiting := mw.remote(time.sleep, on=1)(0.5)).result(timeout=0.05)
    assert waiting.result() is None
    with pytest.raises(allranks.UsageError, match="expected a function"):
        mw.remote(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="runs on worker:1, an argument is on worker:2"):
        mw.remote(lambda x, y: x)(torch.zeros(1, device="worker:1"), torch.zeros(1, device="worker:2"))


def test_a_future_that_nobody_asks_leaves_nothing(mw: Master) -> None:
    gc.collect()
    before = torch.worker.memory_stats("worker:1")["tensors"]  # type: ignore[attr-defined]
    for _ in range(5):
        mw.remote(torch.zeros, on=1)(1000)
    made = mw.remote(torch.zeros, on=1)(10).result()
    assert torch.worker.memory_stats("worker:1")["tensors"] == before + 1  # type: ignore[attr-defined]
    del made
    assert torch.worker.memory_stats("worker:1")["tensors"] == before  # type: ignore[attr-defined]


def test_gradients_of_what_a_function_was_given(mw: Master) -> None:
    """A parameter is a new object there: its gradient is brought to the master's, and added."""
    net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    there, input_there = torch.nn.Linear(3, 2), x.to("worker:1").requires_grad_()
    there.load_state_dict(net.state_dict())
    there.to("worker:1")

    def train(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    mine = x.clone().requires_grad_()
    for _ in range(2):
        expected, found = train(net, mine), mw.remote(train)(there, input_there).result()
        assert torch.allclose(found.cpu(), expected.detach())
        assert found.grad_fn is None
    for here, grad in ((net.weight, there.weight.grad), (net.bias, there.bias.grad), (mine, input_there.grad)):
        assert grad is not None
        assert here.grad is not None
        assert torch.allclose(grad.cpu(), here.grad)


def test_functions_that_hold_tensors_on_workers(mw: Master) -> None:
    weight = torch.ones(3, device="worker:1", requires_grad=True)

    class Counter:
        def __init__(self) -> None:
            self.sum = torch.zeros(3, device="worker:1")

        def __call__(self, x: float) -> torch.Tensor:
            self.sum += x
            (weight * x).sum().backward()
            return self.sum

    count = mw.remote(Counter())
    futures = [count(1.0), count(2.0)]
    assert [each.result().tolist() for each in futures][-1] == [3.0] * 3  # its state is on the worker
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="a tensor that it holds is on worker:1"):
        mw.remote(lambda: weight.sum(), on="worker:2")()


def test_exceptions_that_cannot_be_told(mw: Master) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("odd")

    class Coded(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__(code)

    def odd() -> None:
        raise Odd

    def coded() -> None:
        raise Coded(code=3)

    class Unloaded:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return int, ("x",)

    broken = Unloaded()
    with pytest.raises(RemoteError, match=r"Odd: \(its text cannot be had: ValueError\)"):
        mw.remote(odd, on=1)().result()
    with pytest.raises(RemoteError, match="Coded: 3"):
        mw.remote(coded, on=1)().result()
    for _ in range(2):
        with pytest.raises((RemoteError, ValueError), match="invalid literal for int"):
            mw.remote(lambda: broken, on=1)().result()
