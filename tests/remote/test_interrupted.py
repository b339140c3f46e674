"""Interrupted operations: Ctrl-C, timeouts, threads and unread results.

No later operation may receive the data of an interrupted operation.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks import RemoteError, UsageError
from allranks.remote.master import operator_cache
from allranks.remote.master.master import Master
from allranks.remote.protocol import signature


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    def raise_it(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_in_a_large_fetch_does_not_mix_up_later_fetches(mw: Master) -> None:
    """Check that the next fetch does not receive the data that the worker still sends for the interrupted fetch."""
    a, b = (torch.full((40000,), value, device="worker:1") for value in (1.0, 2.0))
    mw.remote(time.sleep, on=1)(0.6)
    with ctrl_c_after(0.2):
        a.cpu()
    for _ in range(2):
        assert b.cpu().eq(2).all()
        assert a.cpu().eq(1).all()


def test_timed_out_futures_later_return_their_own_results(mw: Master) -> None:
    first = mw.remote(lambda: (time.sleep(0.4), torch.ones(2))[1], on=1)()
    second = mw.remote(lambda: torch.zeros(2), on=1)()
    for each in (first, second):
        with pytest.raises(allranks.TimeoutError):
            each.result(timeout=0.02)
    assert first.result().cpu().tolist() == [1.0, 1.0]
    assert second.result().cpu().tolist() == [0.0, 0.0]


def test_unread_large_answer_does_not_block_uploads(mw: Master) -> None:
    """Upload data while a large answer of the worker is unread.

    A worker that cannot send its answer reads no commands. The master must read the answer while it waits for space.
    """
    large = mw.remote(lambda: (time.sleep(0.4), b"x" * (30 << 20))[1], on=1)()
    with pytest.raises(allranks.TimeoutError):
        large.result(timeout=0.1)
    kept = [torch.ones(1 << 20).to("worker:1") for _ in range(6)]
    assert all(each.sum().item() == 1 << 20 for each in kept)
    assert len(large.result()) == 30 << 20


def test_threads(mw: Master) -> None:
    wrong: list[Any] = []

    def work(value: int) -> None:
        x = torch.full((100,), float(value), device="worker:1")
        for round in range(30):
            if x.to("worker:2").sum().item() != 100 * value:
                wrong.append((value, round))
            if (x > 0).nonzero().shape != (100, 1):
                wrong.append((value, "nonzero"))

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_results_are_correct_if_a_meta_kernel_predicts_wrong_strides(mw: Master) -> None:
    turned = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2).contiguous().transpose(0, 2)
    for operator in (torch.copysign, torch.floor_divide, torch.fmod, torch.atan2):
        for local in (torch.arange(1.0, 25.0).reshape(2, 3, 4), turned + 1, turned + 1):
            other = torch.tensor([2.0, -3.0, 0.5, 7.0])
            expected = operator(local, other)
            found = operator(local.to("worker:1"), other.to("worker:1"))
            assert torch.equal(found.cpu(), expected)
            assert torch.equal(torch.as_strided(found.contiguous(), (24,), (1,)).cpu(), expected.flatten())


def test_in_place_resize_and_transpose_do_not_change_aliases(mw: Master) -> None:
    for _ in range(2):
        x = torch.arange(6.0, device="worker:1")
        y = x.detach()
        x.resize_(3)
        assert (x.shape, y.shape) == ((3,), (6,))
        assert y.sum().item() == 15
        z = torch.ones(2, 3, device="worker:1")
        w = z.detach()
        z.t_()
        assert (z.cpu().shape, w.cpu().shape) == ((3, 2), (2, 3))


def test_group_operation_raises_if_its_workers_differ(mw: Master) -> None:
    group = mw.group([1, 2])
    x = group.scatter(torch.tensor([1.0, 2.0, 3.0, -1.0, -2.0, 4.0]))
    with pytest.raises(UsageError, match=r"workers of group \[1, 2\] differ"):
        x[x > 0]
    with pytest.raises(UsageError, match="differ"):
        torch.equal(x, x.abs())
    assert torch.equal(x, x + 0)
    index = group.scatter(torch.tensor([0, 9]))
    for _ in range(2):  # only the operation of worker 2 fails
        with pytest.raises(IndexError):
            torch.take(x, index)
    mw.synchronize()
    one = torch.take(x, index * 0)
    assert group.gather(one).tolist() == [1.0, -1.0]


def test_exception_of_a_discarded_future_is_raised_by_synchronize(mw: Master) -> None:
    def fails() -> None:
        raise KeyError("mine")

    mw.remote(fails, on=2)()
    gc.collect()
    with pytest.raises(RemoteError, match="KeyError: 'mine'"):
        mw.synchronize()


def test_function_receives_a_module_in_a_container(mw: Master) -> None:
    net = nn.Linear(3, 2, device="worker:2")
    x = torch.ones(1, 3, device="worker:2")
    kept: Any = {"nets": [net]}
    found, same = mw.remote(lambda kept, x: (kept["nets"][0](x), isinstance(kept["nets"][0].weight, nn.Parameter)))(
        kept, x
    ).result()
    assert same is True
    assert torch.equal(found.cpu(), net(x).detach().cpu())


def test_memory_of_finished_functions_is_freed_on_the_worker(mw: Master) -> None:
    def resident() -> int:
        return int(torch.worker.memory_stats("worker:1")["resident"])  # type: ignore[attr-defined]

    before = resident()
    for number in range(15):
        held = bytes([number]) * (8 << 20)
        assert mw.remote(lambda held=held: len(held), on=1)().result() == 8 << 20
    gc.collect()
    assert resident() - before < 80 << 20


def test_calls_with_different_numbers_share_a_template(mw: Master) -> None:
    x = torch.arange(4, device="worker:1")
    for _ in range(2):
        (x + 1, x * 2)
    before = mw.operators._next
    for number in range(50):
        assert (x + number).cpu().tolist() == [each + number for each in range(4)]
        x * number
    assert mw.operators._next == before
    for value in (1, True, 1.0, -0.0, float("nan"), 1 << 40):
        local = torch.arange(4) * value
        found = (torch.arange(4, device="worker:1") * value).cpu()
        assert found.dtype == local.dtype
        assert torch.equal(found.nan_to_num(7), local.nan_to_num(7))
    big = torch.full((2,), (1 << 64) - 1, dtype=torch.uint64)
    assert torch.equal(torch.full((2,), (1 << 64) - 1, dtype=torch.uint64, device="worker:1").cpu(), big)


def test_assigning_master_data_to_a_worker_parameter_raises(mw: Master) -> None:
    p = nn.Parameter(torch.ones(2, device="worker:1"))
    with pytest.raises(TypeError, match="data on cpu cannot replace data on worker:1"):
        p.data = torch.zeros(2)
    assert p.cpu().tolist() == [1.0, 1.0]


def test_slow_worker_blocks_only_the_threads_that_wait_for_it(mw: Master, tmp_path: Path) -> None:
    """Use worker 2 while other threads wait for worker 1.

    Worker 1 continues only after all operations on worker 2. If these waited for worker 1, the test would hang.
    """
    over = tmp_path / "over"

    def stay(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    small, large = torch.ones(3, device="worker:1"), torch.ones(50_003, device="worker:1")
    waits: list[Callable[[], Any]] = [
        lambda: small.sum().item(),
        lambda: small.cpu(),
        lambda: large.cpu(),
        lambda: torch.ones(50_003).to("worker:1").sum().item(),
        lambda: small.nonzero(),
        lambda: torch.fmod(torch.ones(7, 3, device="worker:1"), 0.75).sum().item(),
        lambda: mw.synchronize(),
        lambda: mw.remote(lambda: 5, on=1)().result(),
    ]
    mw.remote(stay, on=1)(str(over))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda each=each: found.append(each()), daemon=True) for each in waits]  # type: ignore[misc]
    for each in threads:
        each.start()
    time.sleep(0.3)
    x = torch.arange(5.0, device="worker:2")
    assert x.sum().item() == 10
    assert torch.fmod(x, 0.7).nonzero().shape == (4, 1)
    assert torch.ones(60_001).to("worker:2").cpu().sum() == 60_001
    assert mw.remote(lambda: 7, on=2)().result() == 7
    assert all(each.is_alive() for each in threads)
    over.touch()
    for each in threads:
        each.join(30)
    assert not any(each.is_alive() for each in threads)
    assert len(found) == len(waits)


def test_non_blocking_uploads_return_while_the_worker_is_busy(mw: Master, tmp_path: Path) -> None:
    """Upload to a worker that continues only after all uploads have returned.

    An upload that waited for the worker would hang.
    """
    over = tmp_path / "over"

    def stay(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    plain = torch.arange(12e6).reshape(3000, 4000)  # 46 MiB
    into = torch.zeros(4000, 3000, device="worker:1")
    layer = nn.Linear(2000, 2000)  # 15 MiB
    expected = {name: each.detach().clone() for name, each in layer.state_dict().items()}
    mw.remote(stay, on=1)(str(over))
    there = [(plain + i).to("worker:1", non_blocking=True) for i in range(5)]
    converted = plain.to("worker:1", torch.float64, non_blocking=True)
    into.copy_(plain.t(), non_blocking=True)
    batches = [torch.full((1 << 18,), float(i)).to("worker:1", non_blocking=True) for i in range(60)]
    layer.to("worker:1", non_blocking=True)
    both = plain.to(mw.group([1, 2]).device, non_blocking=True)
    kept = plain.clone()
    plain.zero_()  # each upload must send the values from the time of its call
    over.touch()
    for i, each in enumerate(there):
        assert each.cpu().equal(kept + i)
    assert converted.cpu().equal(kept.double())
    assert into.cpu().equal(kept.t())
    assert [each[-1].item() for each in batches] == [float(i) for i in range(60)]
    assert all(each.cpu().equal(expected[name]) for name, each in layer.state_dict().items())
    assert both.shard(2).cpu().equal(kept)


def test_eight_threads_receive_only_their_own_data(mw: Master) -> None:
    """Run eight threads with answers, large transfers and new shapes; none may receive data of another thread."""
    wrong: list[Any] = []

    def work(value: int) -> None:
        for round in range(12):
            there, other = f"worker:{1 + (value + round) % 2}", f"worker:{1 + (value + round + 1) % 2}"
            size = 20_000 + 64 * value + round  # a shape that no other thread uses; large enough for the data links
            x = torch.full((size,), float(value)).to(there)
            if not torch.equal((x + 1).cpu(), torch.full((size,), value + 1.0)):
                wrong.append((value, round, "fetch"))
            if x[: value + 3].sum().item() != value * (value + 3):
                wrong.append((value, round, "item"))
            if x.to(other).sum().item() != value * size:
                wrong.append((value, round, "copy"))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 9)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_respawn_raises_worker_lost_in_a_waiting_thread(mw: Master) -> None:
    errors: list[Exception] = []
    future = mw.remote(time.sleep, on=2)(60)

    def wait() -> None:
        try:
            future.result()
        except allranks.AllranksError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    mw.respawn(2, force=True)
    thread.join(10)
    assert not thread.is_alive()
    assert [type(each) for each in errors] == [allranks.WorkerLost]
    assert torch.ones(3, device="worker:2").sum().item() == 3


def test_caches_stay_bounded_if_every_shape_is_new(mw: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = mw.operators
    monkeypatch.setattr(operator_cache, "_TEMPLATES", 64)
    operators.forget()
    operators.templates.clear()
    before = len(signature._signatures)
    for size in range(1, 400):
        x = torch.full((size,), 2.0, device="worker:1")
        assert (x * size + 1).sum().item() == size * (2.0 * size + 1)
    del x
    gc.collect()
    assert len(operators.templates) <= 2 * 64
    assert len(mw.devices.worker(1).calls) <= 64
    assert len(signature._signatures) - before < 4 * 64
