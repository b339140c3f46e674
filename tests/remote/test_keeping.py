"""Kept tensors survive the loss of their workers: training with random kills gives the same weights.

ALLRANKS_TEST_KILLS is the number of workers that the long test kills (10 by default). ALLRANKS_SEED selects which
workers it kills, and when.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import allranks
from allranks import RemoteError, UsageError, WorkerLost, WorkerReplaced
from allranks.remote.master.master import Master
from allranks.remote.master.snapshots import Kept
from support import warm

KILLS = int(os.environ.get("ALLRANKS_TEST_KILLS", "10"))
SEED = int(os.environ.get("ALLRANKS_SEED", "1"))


@pytest.fixture
def recovering(mw: Master) -> Iterator[Master]:
    """A master that replaces lost workers. The fixture releases the kept objects after the test."""
    mw.on_lost("respawn")
    yield mw
    mw.on_lost("raise")
    if (kept := mw._losses.kept) is not None:
        kept.close()
    for rank in list(mw.lost):
        mw.respawn(rank)
    assert mw.ranks == [1, 2]


def kill(mw: Master, *ranks: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mw.connections.by_rank[rank].pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Training:
    """Training of a small network on both workers, with batches that depend only on the number of the step."""

    def __init__(self, mw: Master, captured: bool = False) -> None:
        torch.manual_seed(3)
        self.group = mw.group([1, 2])
        with self.group:
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
            )
        allranks.broadcast_(self.net.parameters(), src=1)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        self.at = {"step": 0}
        self.kept = mw.keep(self.net, self.opt, self.at)
        self.kept.refresh()
        mw.synchronize()
        self.update = allranks.capture(self._update()) if captured else self._update()

    def _update(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        net, opt = self.net, self.opt

        def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            allranks.all_reduce_([p.grad for p in net.parameters()], op="avg")
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return update

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.at["step"])
        x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        loss = self.update(self.group.scatter(x), self.group.scatter(y))
        if self.at["step"] % 3 == 0:
            loss.shard(2).item()
        self.at["step"] += 1
        self.kept.refresh()

    def run(self, steps: int) -> int:
        """Train up to `steps` steps. Return how many lost workers were replaced."""
        losses = 0
        while self.at["step"] < steps:
            try:
                self.step()
            except WorkerReplaced:
                losses += 1
        return losses

    def weights(self) -> list[torch.Tensor]:
        return [each.shard(rank).detach().cpu() for each in self.net.parameters() for rank in (1, 2)]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_a_training_survives_random_kills(recovering: Master, captured: bool) -> None:
    mw, steps, kills = recovering, 60, KILLS // 2
    undisturbed = Training(mw, captured)
    undisturbed.run(steps)
    expected = undisturbed.weights()
    undisturbed.kept.close()

    rng, met = random.Random(SEED + captured), 0
    training = Training(mw, captured)
    for number in range(kills):
        last = steps * (number + 1) // kills
        rank, moment = rng.choice([1, 2]), rng.uniform(0, 0.1)
        pid = mw.connections.by_rank[rank].pid
        timer = threading.Timer(moment, kill, (mw, rank))
        timer.start()
        met += training.run(last)
        timer.join()
        until(lambda rank=rank, pid=pid: rank in mw.lost or mw.connections.by_rank[rank].pid != pid)  # type: ignore[misc]
        try:
            mw.synchronize()
        except WorkerReplaced:
            met += 1 + training.run(last)
    assert met == kills
    assert equal(training.weights(), expected)


def test_kept_objects_are_restored_from_the_same_snapshot(recovering: Master) -> None:
    mw = recovering
    here, there = torch.zeros(3, device="worker:1"), torch.zeros(2, 2, device="worker:2")
    row, mine, table = there[0], torch.zeros(2), {"n": 0, "list": [1]}
    both = mw.group([1, 2]).scatter(torch.zeros(4))
    loose = torch.ones(2, device="worker:2")
    kept = allranks.keep(here, {"there": there, "row": row}, table, mine, both)
    for number in (1, 2):
        for each in (here, there, mine, both):
            each.fill_(number)
        table["n"] = number
        assert kept.refresh() == number
    mw.synchronize()
    for each in (here, there, mine, both):
        each.fill_(9)
    table.update(n=9, more=True)
    table["list"].append(2)
    kill(mw, 2)
    with pytest.raises(WorkerReplaced, match=r"killed by signal 9.*\n.*have the state of snapshot 2") as caught:
        until(lambda: there.sum().item() == 0)
    assert (caught.value.rank, caught.value.snapshot, kept.snapshot) == (2, 2, 2)
    assert (here.tolist(), there.tolist(), mine.tolist()) == ([2.0] * 3, [[2.0] * 2] * 2, [2.0] * 2)
    assert [both.shard(1).tolist(), both.shard(2).tolist()] == [[2.0] * 2] * 2
    assert table == {"n": 2, "list": [1]}
    row.fill_(5)
    assert there.tolist() == [[5.0] * 2, [2.0] * 2]  # the restored tensors share memory again
    for gone in (lambda: loose + 1, lambda: loose.cpu(), lambda: there[0] + loose, lambda: loose.to("worker:1")):
        with pytest.raises(WorkerLost) as plain:
            gone()
        assert type(plain.value) is WorkerLost
    kill(mw, 1)  # the copies that were on worker 2 have been recreated
    with pytest.raises(WorkerReplaced):
        until(lambda: here.sum().item() == 0)
    assert (here.tolist(), there.tolist()) == ([2.0] * 3, [[2.0] * 2] * 2)


def test_kept_objects_are_lost_with_a_worker_and_its_backup_worker(recovering: Master) -> None:
    mw = recovering
    x = torch.ones(3, device="worker:1")
    kept = mw.keep(x)
    kept.refresh()
    kept.refresh()
    mw.synchronize()
    kill(mw, 1, 2)
    until(lambda: len(mw.lost) == 2)
    with pytest.raises(
        WorkerLost, match=r"The kept objects are lost with worker 1 and its backup worker 2\. New"
    ) as caught:
        x.sum()
    assert type(caught.value) is WorkerLost
    assert mw.ranks == [1, 2]
    with pytest.raises(WorkerLost):
        kept.refresh()
    kept.close()
    y = torch.ones(3, device="worker:2")
    assert mw.keep(y).refresh() == 1


def test_worker_killed_during_a_snapshot_is_restored_from_a_complete_one(recovering: Master) -> None:
    """Kill the sending worker or its backup worker during a snapshot; the restored snapshot must be complete."""
    mw = recovering
    x = torch.zeros(4 << 20, device="worker:1")
    at = {"n": 0}
    kept = mw.keep(x, at)
    kept.refresh()
    mw.synchronize()
    for rank, moment in ((1, 0.0), (2, 0.002), (1, 0.01), (2, 0.02)):
        before = at["n"]
        x.fill_(before + 1)
        at["n"] = before + 1
        kept.refresh()
        time.sleep(moment)
        kill(mw, rank)
        with pytest.raises(WorkerReplaced):
            until(lambda: not kept.refresh())
        assert at["n"] in (before, before + 1)
        assert x.min().item() == x.max().item() == at["n"]


def test_restore_removes_gradients_and_state_newer_than_the_snapshot(recovering: Master) -> None:
    """Check that a restore removes gradients and optimizer state that are newer than the snapshot."""
    mw = recovering
    net = torch.nn.Linear(2, 2, device="worker:1")
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    kept = mw.keep(net, opt, schedule)
    kept.refresh()
    mw.synchronize()
    weight = net.weight.detach().cpu()
    for worker in (2, 1):
        net(torch.ones(1, 2, device="worker:1")).sum().backward()
        opt.step()
        schedule.step()
        assert opt.state
        kill(mw, worker)
        until(lambda worker=worker: worker in mw.lost)  # type: ignore[misc]
        with pytest.raises(WorkerReplaced):
            kept.refresh()
        assert not opt.state
        assert net.weight.grad is None
        assert (opt.param_groups[0]["lr"], schedule.last_epoch) == (0.5, 0)
        assert torch.equal(net.weight.detach().cpu(), weight)


def test_on_lost_function_is_called_in_the_calling_thread(recovering: Master) -> None:
    mw, calls = recovering, []
    thread = threading.get_ident()
    mw.on_lost(lambda rank, snapshot: calls.append((rank, snapshot, threading.get_ident())))
    x = torch.ones(2, device="worker:2")
    kill(mw, 2)
    until(lambda: 2 in mw.lost)
    with pytest.raises(WorkerReplaced, match="no objects were kept"):
        mw.synchronize()
    y = torch.ones(2, device="worker:2")
    mw.keep(y).refresh()
    mw.synchronize()
    kill(mw, 2)
    until(lambda: 2 in mw.lost)
    with pytest.raises(WorkerReplaced):
        y.sum()
    assert calls == [(2, 0, thread), (2, 1, thread)]
    with pytest.raises(WorkerLost):
        x.sum()

    class Stop(Exception):
        pass

    def stop(rank: int, snapshot: int) -> None:
        raise Stop

    mw.on_lost(stop)
    kill(mw, 1)
    until(lambda: 1 in mw.lost)
    with pytest.raises(Stop):
        mw.synchronize()
    mw.on_lost("raise")
    kill(mw, 2)
    until(lambda: 2 in mw.lost)
    assert repr(y).endswith("killed by signal 9 (SIGKILL).")
    with pytest.raises(WorkerLost):
        y.sum()
    mw.respawn(2)
    assert y.tolist() == [1.0] * 2


def test_replacement_that_dies_is_retried_up_to_five_times(recovering: Master) -> None:
    mw = recovering
    x = torch.ones(3, device="worker:1")
    mw.keep(x).refresh()
    mw.synchronize()
    admitted, left = mw._losses._admit, [2]

    def admit(worker: object) -> None:
        admitted(worker)  # type: ignore[arg-type]
        if left[0]:
            left[0] -= 1
            kill(mw, 1)

    mw._losses._admit = admit  # type: ignore[method-assign]
    try:
        kill(mw, 1)
        until(lambda: 1 in mw.lost)
        with pytest.raises(WorkerReplaced):
            x.sum()
        assert x.tolist() == [1.0] * 3
        left[0] = 100
        kill(mw, 1)
        until(lambda: 1 in mw.lost)
        with pytest.raises(WorkerLost, match="It could not be replaced after 5 attempts") as caught:
            x.sum()
        assert type(caught.value) is WorkerLost
        left[0] = 0
        with pytest.raises(WorkerReplaced):  # the next use tries again
            x.sum()
        assert x.tolist() == [1.0] * 3
    finally:
        mw._losses._admit = admitted  # type: ignore[method-assign]


def test_backup_worker_killed_during_a_replacement_loses_the_kept_objects(recovering: Master) -> None:
    mw = recovering
    here, there = torch.ones(3, device="worker:1"), torch.ones(3, device="worker:2")
    kept = mw.keep(here, there)
    kept.refresh()
    kept.refresh()
    mw.synchronize()
    admitted, pid = mw._losses._admit, mw.connections.by_rank[2].pid

    def admit(worker: object) -> None:
        admitted(worker)  # type: ignore[arg-type]
        if mw.connections.by_rank[2].pid == pid:
            kill(mw, 2)

    mw._losses._admit = admit  # type: ignore[method-assign]
    try:
        kill(mw, 1)
        until(lambda: 1 in mw.lost)
        with pytest.raises(WorkerLost, match="kept objects are lost with worker 1 and its backup worker 2") as caught:
            here.sum()
    finally:
        mw._losses._admit = admitted  # type: ignore[method-assign]
    assert type(caught.value) is WorkerLost
    assert mw.ranks == [1, 2]
    for gone in (here, there):
        with pytest.raises(WorkerLost):
            gone.sum()


def test_backup_worker_is_on_another_host_if_one_exists() -> None:
    hosts = {1: "a", 2: "a", 3: "b", 4: "b"}
    workers = {rank: SimpleNamespace(host=host) for rank, host in hosts.items()}
    kept = Kept([], SimpleNamespace(by_rank=workers), None, None)  # type: ignore[arg-type]
    assert [kept._backup_worker(rank) for rank in workers] == [3, 3, 1, 1]
    for worker in workers.values():
        worker.host = "a"
    assert [kept._backup_worker(rank) for rank in workers] == [2, 3, 4, 1]


def test_keep_refuses_unsupported_and_poisoned_objects(recovering: Master) -> None:
    mw = recovering
    with pytest.raises(UsageError, match="expected modules, optimizers, tensors and dicts, not object"):
        mw.keep(object())
    with pytest.raises(UsageError, match="conjugated"):
        mw.keep(torch.ones(2, dtype=torch.complex64, device="worker:1").conj())
    with pytest.raises(UsageError, match="on_lost: expected 'raise', 'respawn' or a function"):
        mw.on_lost("ignore")  # type: ignore[arg-type]
    table, wrong = torch.zeros(4, device="worker:1"), torch.tensor([9], device="worker:1")
    table.index_add_(0, torch.tensor([1], device="worker:1"), torch.zeros(1, device="worker:1"))
    kept = mw.keep(table)
    with pytest.raises(UsageError, match="other objects are already kept"):
        mw.keep(table)
    kept.refresh()
    table.index_add_(0, wrong, torch.ones(1, device="worker:1"))
    kept.refresh()
    with pytest.raises(RemoteError, match="index"):
        kept.refresh()
    kill(mw, 1)
    until(lambda: 1 in mw.lost)
    with pytest.raises(WorkerReplaced):
        kept.refresh()
    assert table.tolist() == [0.0] * 4
    kept.close()
    with pytest.raises(UsageError, match="close"):
        kept.refresh()


def test_master_stores_the_copies_of_a_single_worker() -> None:
    """Run in a separate process, because the master of the other tests has two workers."""
    program = """
import os, signal, torch, allranks
with allranks.init_master_worker(workers=1, timeout=60) as mw:
    mw.on_lost("respawn")
    x = torch.arange(5.0, device="worker:1")
    kept = allranks.keep(x)
    kept.refresh()
    for number in range(3):
        x.mul_(2)
        kept.refresh()
        mw.synchronize()
        os.kill(mw.connections.by_rank[1].pid, signal.SIGKILL)
        try:
            while True:
                x.sum().item()
        except allranks.WorkerReplaced as lost:
            print(lost.snapshot, x.tolist())
"""
    done = warm.run([sys.executable, "-c", program], timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        f"{number + 2} {[2.0 ** (number + 1) * each for each in range(5)]}" for number in range(3)
    ]
