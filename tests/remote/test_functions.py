"""Python functions that run on workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import io
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_on_selects_the_worker_that_runs_a_function(mw: Master) -> None:
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


def test_results_can_be_requested_in_any_order(mw: Master) -> None:
    futures = [mw.remote(lambda n: (n, torch.tensor(n)), on=1 + n % 2)(n) for n in range(6)]
    for n, future in reversed(list(enumerate(futures))):
        number, tensor = future.result()
        assert (number, tensor.item()) == (n, n)


def test_exception_of_a_function_is_raised_by_result(mw: Master) -> None:
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
    with pytest.raises(RuntimeError, match="runs on worker:1, but an argument is on worker:2"):
        mw.remote(lambda x, y: x)(torch.zeros(1, device="worker:1"), torch.zeros(1, device="worker:2"))


def test_discarded_futures_leave_no_tensors_on_the_worker(mw: Master) -> None:
    gc.collect()
    before = torch.worker.memory_stats("worker:1")["tensors"]  # type: ignore[attr-defined]
    for _ in range(5):
        mw.remote(torch.zeros, on=1)(1000)
    made = mw.remote(torch.zeros, on=1)(10).result()
    assert torch.worker.memory_stats("worker:1")["tensors"] == before + 1  # type: ignore[attr-defined]
    del made
    assert torch.worker.memory_stats("worker:1")["tensors"] == before  # type: ignore[attr-defined]


def test_gradients_of_function_arguments_are_added_on_the_master(mw: Master) -> None:
    """Check that the gradient of a worker's copy of a parameter is added to the master's parameter."""
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


def test_function_runs_on_the_worker_of_the_tensors_that_it_holds(mw: Master) -> None:
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
    assert [each.result().tolist() for each in futures][-1] == [3.0] * 3  # the state of the object stays on the worker
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="a tensor that it holds is on worker:1"):
        mw.remote(lambda: weight.sum(), on="worker:2")()


def test_exceptions_that_cannot_be_printed_or_unpickled_are_reported(mw: Master) -> None:
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
    with pytest.raises(RemoteError, match=r"Odd: \(no error text: str\(\) raised ValueError\)"):
        mw.remote(odd, on=1)().result()
    with pytest.raises(RemoteError, match="Coded: 3"):
        mw.remote(coded, on=1)().result()
    for _ in range(2):
        with pytest.raises((RemoteError, ValueError), match="invalid literal for int"):
            mw.remote(lambda: broken, on=1)().result()


def later() -> Callable[[float, Any], Any]:
    """Return a function that a worker can load without importing this module."""
    return lambda seconds, value: (time.sleep(seconds), value)[1]


def test_futures_implement_the_concurrent_futures_interface(mw: Master) -> None:
    first, second = mw.remote(later(), on=1), mw.remote(later(), on=2)
    pending = first(0.5, 1)
    assert (pending.done(), pending.running(), pending.cancel(), pending.cancelled()) == (False, True, False, False)
    assert pending.exception() is None
    assert (pending.done(), pending.result()) == (True, 1)
    assert [each.result() for each in concurrent.futures.as_completed([first(0.6, 2), second(0.0, 3)])] == [3, 2]
    done, waiting = concurrent.futures.wait(
        [first(0.0, 1), second(1.0, 2)], return_when=concurrent.futures.FIRST_COMPLETED
    )
    assert [each.result() for each in (*done, *waiting)] == [1, 2]
    failed = mw.remote(int, on=1)("x")
    assert isinstance(failed.exception(), RemoteError)
    with pytest.raises(allranks.TimeoutError, match=r"remote function: worker 1 .* has not answered for 0\.05 s"):
        first(0.3, 1).exception(timeout=0.05)


def test_done_callbacks_receive_the_finished_future(mw: Master) -> None:
    """Callbacks for a tensor, for an exception, and for a call that has already finished."""
    got: queue.Queue[Any] = queue.Queue()
    future = mw.remote(lambda: torch.ones(3), on=1)()
    future.add_done_callback(lambda each: got.put(each.result().sum().item()))
    assert got.get(timeout=30) == 3
    future.add_done_callback(lambda each: got.put(each is future))
    assert got.get(timeout=30)
    mw.remote(int, on=1)("x").add_done_callback(lambda each: got.put(each.exception()))
    assert isinstance(got.get(timeout=30), RemoteError)


def test_gradients_are_added_by_result_and_not_by_wait(mw: Master) -> None:
    weight = torch.ones(2, device="worker:1", requires_grad=True)

    def backward(weight: torch.Tensor) -> None:
        weight.sum().backward()

    future = mw.remote(backward)(weight)
    concurrent.futures.wait([future])
    assert weight.grad is None
    future.result()
    future.result()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_coroutines_can_await_remote_functions(mw: Master) -> None:
    async def main() -> None:
        first, second = mw.remote(later(), on=1)(0.1, 5), mw.remote(later(), on=2)(0.2, torch.ones(2))
        found = await asyncio.gather(*map(asyncio.wrap_future, (first, second)))
        assert found[0] == 5
        assert found[1].device == torch.device("worker:2")
        assert await mw.remote(lambda: 7, on=mw.group([1, 2]))() == [7, 7]
        with pytest.raises(RemoteError, match="ZeroDivisionError"):
            await mw.remote(lambda: 1 / 0, on=1)()
        slow = mw.remote(later(), on=1)(0.4, 8)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(slow), 0.1)
        assert await slow == 8

    asyncio.run(main())


def test_output_of_a_function_is_written_to_the_redirected_stdout(
    mw: Master, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output of remote functions after the program has replaced sys.stdout and sys.stderr, as a notebook does."""

    def say() -> None:
        print("told")
        print("warned", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        future = mw.remote(say, on=1)()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        future.result()
    assert (out.getvalue(), err.getvalue()) == ("told\n", "warned\n")

    def fails() -> None:
        print("before")
        raise ValueError

    with contextlib.redirect_stdout(out), pytest.raises(RemoteError):
        mw.remote(fails, on=1)().result()
    assert out.getvalue() == "told\nbefore\n"


def test_warnings_of_a_function_are_issued_on_the_master(mw: Master) -> None:
    class Odd(DeprecationWarning):
        pass

    def warn(kind: type[Warning] = FutureWarning) -> int:
        warnings.warn("careful", kind, stacklevel=2)
        return 5

    future = mw.remote(warn, on=1)()
    with pytest.warns(FutureWarning, match="^worker 1: careful$") as caught:
        assert future.result() == 5
    assert caught[0].filename == __file__
    mw.remote(warn, on=2)(Odd)
    with pytest.warns(DeprecationWarning, match="careful"):
        mw.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failed = mw.remote(warn, on=1)(UserWarning)
        for _ in range(2):
            with pytest.raises(UserWarning, match="careful"):
                failed.result()
