"""``python benchmarks/goals master``: master-worker mode, its goals, and its peers torch's RPC and send/recv.

Three masters run one after the other in this process. The first has two workers, for operations, values, training steps
and copies. The second has eight, or ``-n`` if that is less, for a step of 5 ms. The third has ``-n`` workers, for one
command to all. With the first, blocks of all measurements take turns, so that a drift of the machine's speed affects
all alike. Every worker has one thread.

===========================  ==========================================================================================
operations                   the rate until the last is queued (``queued``), and until the last is done (``done``)
training steps               forward, backward and optimizer of an MLP (32-64-64-10, batch 16); counts the operations
                             in the outbox; a third of the calls that a step dispatches are no operations
bytes                        the bytes sent to the worker, divided by the operations
replayed step                a captured step of that MLP: time of the call, and bytes, per step
share of a step of 5 ms      CPU time of all threads of the master, divided by the time of the step on a worker that
                             has a CPU: the load of the master if all workers had one; with a ``synchronize()`` every
                             50 steps, like a program that sometimes reads its loss, or every 10
one command                  ``synchronize()``: sent, executed after all queued operations, and acknowledged by all
                             workers; also with an operation of a group before it
copies                       ``x.to("worker:2")`` of several tensors that are kept (``stream``), and of one
                             (``single``), until ``synchronize()`` returns; compared with ``send`` and ``recv`` of a
                             process group of the same two workers, into existing memory
torch RPC                    ``rpc.remote`` of an addition to the previous result; ``to_here`` of one number
===========================  ==========================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import results
import torch
from results import Goal, MasterReport, of
from rpc import RpcPeer
from torch.nn import functional

import allranks
from allranks.remote.master.master import Master
from allranks.tools.bench.text import human
from allranks.tools.progress import TerminalProgress

__all__ = ["main"]

_ROUNDS = (3, 30)
_OPERATIONS, _REMOTE_CALLS, _ITEMS, _STEPS = 10_000, 300, 200, 100
_COPIES, _COPIED = 16, 128 << 20  # in a stream: the maximum number of tensors and of bytes
_PARALLEL = 8
_STEP_S = 0.005
_TIMEOUT_S = 120
_RPC, _SEND = "torch RPC", "send/recv"

Samples = dict[str, list[float]]
Block = Callable[[Samples], None]
"""Adds its measurements to samples, by name."""


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    report = MasterReport(
        workers=options.nproc,
        budget_s=options.budget,
    )
    with TerminalProgress("benchmarks/goals") as progress, contextlib.closing(RpcPeer()) as peer:
        progress.put(results.head(report, "master-worker mode"))
        if peer.missing:
            report.left_out.append(f"torch RPC: {peer.missing}")
            progress.put(f"# left out: {report.left_out[-1]}")
        for what, measure in (
            ("operations, values, steps and copies", partial(_alone, peer, options.sizes)),
            ("a step of 5 ms on each worker", partial(_shares, min(_PARALLEL, options.nproc))),
            ("one command for all workers", partial(_command, options.nproc)),
        ):
            progress.at(what)
            found = measure(options.budget)
            report.goals += found
            progress.put(results.lines(found))
    if options.json:
        results.write(report, options.json)
    return 0


def _turns(blocks: Sequence[Block], budget_s: float) -> Samples:
    """Run blocks in turn, each round with a different first block, for ``budget_s`` seconds per block."""
    samples: Samples = defaultdict(list)
    for block in blocks:
        block(defaultdict(list))  # workers record their templates, memory is touched, connections are opened
    least, most = _ROUNDS
    began = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - began >= budget_s * len(blocks):
            break
        first = turn % len(blocks)
        for block in (*blocks[first:], *blocks[:first]):
            block(samples)
    return samples


# Operations, values, steps and copies: two workers.


def _alone(peer: RpcPeer, sizes: list[int], budget_s: float) -> list[Goal]:
    with allranks.init_master_worker(workers=2, threads=1, timeout=_TIMEOUT_S) as mw:
        blocks = [*_operations(mw), *_training(mw), _replay(mw), *_transfers(mw, sizes)]
        if not peer.missing:
            blocks += [_chain(peer), lambda found: found["to_here"].extend(peer.fetch(_ITEMS))]
        with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
            _both(mw, _join, f"{folder}/store")
            found = _turns(blocks, budget_s)
            _both(mw, _leave)
    return _judge(found, sizes)


def _judge(found: Samples, sizes: list[int]) -> list[Goal]:
    made = [
        of(f"queued {name}", "op/s", found[f"queued {name}"], least=1e5, peer=_RPC, beside=found["queued rpc"])
        for name in ("add", "add_", "mm")
    ]
    made.append(of("done add", "op/s", found["done add"], peer=_RPC, beside=found["done rpc"]))
    made += [of(f"queued training, {name}", "op/s", found[f"queued {name}"], least=6e4) for name in _OPTIMIZERS]
    made += [of(f"bytes per operation, {name}", "B", found[f"bytes {name}"], most=24) for name in ("add", *_OPTIMIZERS)]
    items, theirs = found["item"], found["to_here"]
    made.append(of("item(), p50", "us", items, most=150e-6, peer=_RPC, beside=theirs))
    made.append(of("item(), p99", "us", items, part=0.99, peer=_RPC, beside=theirs))
    made.append(of("replayed step, call", "us", found["replay"], most=30e-6))
    made.append(of("replayed step, bytes", "B", found["replay bytes"], most=64 + 4 * 3))  # two inputs and one output
    for size in sizes:
        for how in ("stream", "single"):
            name = f"copy {human(size)}, {how}"
            ratio = 0.9 if how == "stream" else None
            made.append(of(name, "GB/s", found[name], peer=_SEND, beside=found[f"native {name}"], least_ratio=ratio))
    last = [f"{way} {human(sizes[-1])}" for way in ("upload", "download")]
    return made + [of(name, "GB/s", found[name]) for name in last]


def _operations(mw: Master) -> list[Block]:
    a, b = (torch.randn(4, 4, device="worker:1") for _ in range(2))
    one = torch.ones((), device="worker:1")
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(a, b),
        "add_": lambda: a.add_(b),
        "mm": lambda: torch.mm(a, b),
    }

    def block(name: str, call: Callable[[], object]) -> Block:
        def run(found: Samples) -> None:
            with torch.no_grad():
                _rate(mw, found, name, call, _OPERATIONS)

        return run

    def items(found: Samples) -> None:
        for _ in range(_ITEMS):
            began = time.perf_counter()
            one.item()
            found["item"].append(time.perf_counter() - began)

    return [*(block(name, call) for name, call in calls.items()), items]


def _rate(mw: Master, found: Samples, name: str, call: Callable[[], object], times: int) -> None:
    mw.synchronize()
    calls, sent = mw.connections.outbox.calls, mw.connections.outbox.sent(0)
    began = time.perf_counter()
    for _ in range(times):
        call()
    queued = time.perf_counter() - began
    calls = mw.connections.outbox.calls - calls
    mw.synchronize()
    found[f"queued {name}"].append(calls / queued)
    found[f"done {name}"].append(calls / (time.perf_counter() - began))
    found[f"bytes {name}"].append((mw.connections.outbox.sent(0) - sent) / calls)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def _step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _mlp(inside: int = 64) -> torch.nn.Module:
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(linear(32, inside), relu(), linear(inside, inside), relu(), linear(inside, 10))


def _data(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 32), torch.randint(10, (rows,))


def _training(mw: Master) -> list[Block]:
    x, y = (each.to("worker:1") for each in _data())

    def block(name: str) -> Block:
        net = _mlp().to("worker:1")
        step = _step(net, _OPTIMIZERS[name](net.parameters()))
        return lambda found: _rate(mw, found, name, lambda: step(x, y), _STEPS)

    return [block(name) for name in _OPTIMIZERS]


def _replay(mw: Master) -> Block:
    x, y = (each.to("worker:1") for each in _data())
    net = _mlp().to("worker:1")
    step = allranks.capture(_step(net, _OPTIMIZERS["AdamW"](net.parameters())))
    for _ in range(5):  # the first calls record and verify the step
        step(x, y)

    def run(found: Samples) -> None:
        mw.synchronize()
        sent = mw.connections.outbox.sent(0)
        began = time.perf_counter()
        for _ in range(_STEPS):
            step(x, y)
        found["replay"].append((time.perf_counter() - began) / _STEPS)
        mw.synchronize()
        found["replay bytes"].append((mw.connections.outbox.sent(0) - sent) / _STEPS)

    return run


def _chain(peer: RpcPeer) -> Block:
    def run(found: Samples) -> None:
        queued, done = peer.chain(_REMOTE_CALLS)
        found["queued rpc"].append(_REMOTE_CALLS / queued)
        found["done rpc"].append(_REMOTE_CALLS / done)

    return run


# Copies, compared with the native channel.


def _transfers(mw: Master, sizes: list[int]) -> list[Block]:
    made = {size: max(2, min(_COPIES, _COPIED // size)) for size in sizes}
    ends = {
        size: [[torch.ones(size // 4, device=f"worker:{rank}") for _ in range(count)] for rank in (1, 2)]
        for size, count in made.items()
    }
    last = torch.ones(sizes[-1] // 4)
    name = human(sizes[-1])
    move = mw.remote(_move)

    def copy(size: int, how: str, count: int) -> Block:
        def run(found: Samples) -> None:
            mw.synchronize()
            began = time.perf_counter()
            copies = [each.to("worker:2") for each in ends[size][0][:count]]
            mw.synchronize()
            found[f"copy {human(size)}, {how}"].append(len(copies) * size / (time.perf_counter() - began))

        return run

    def native(size: int, how: str, count: int) -> Block:
        """Time the same transfers as a program of two ranks, on the same two workers."""

        def run(found: Samples) -> None:
            took = [move(tensors[:count], rank) for rank, tensors in enumerate(ends[size])]
            slowest = max(each.result() for each in took)
            found[f"native copy {human(size)}, {how}"].append(count * size / slowest)

        return run

    def upload(found: Samples) -> None:
        mw.synchronize()
        began = time.perf_counter()
        last.to("worker:1")
        mw.synchronize()
        found[f"upload {name}"].append(sizes[-1] / (time.perf_counter() - began))

    def download(found: Samples) -> None:
        mw.synchronize()
        began = time.perf_counter()
        ends[sizes[-1]][0][0].cpu()
        found[f"download {name}"].append(sizes[-1] / (time.perf_counter() - began))

    cells = [(size, how, made[size] if how == "stream" else 1) for size in sizes for how in ("stream", "single")]
    return [*(make(*cell) for cell in cells for make in (copy, native)), upload, download]


def _both(mw: Master, function: Callable[..., object], *args: object) -> None:
    for each in [mw.remote(function, on=rank)(rank - 1, *args) for rank in (1, 2)]:
        each.result()


def _join(rank: int, store: str) -> None:
    allranks.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)


def _leave(rank: int) -> None:
    allranks.destroy_process_group()


def _move(tensors: list[torch.Tensor], rank: int) -> float:
    allranks.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        if rank == 0:
            allranks.send(tensor, 1)
        else:
            allranks.recv(tensor, 0)
    return time.perf_counter() - began


# The master's CPU load for steps of several milliseconds.


def _shares(workers: int, budget_s: float) -> list[Goal]:
    with allranks.init_master_worker(workers=workers, threads=1, timeout=_TIMEOUT_S) as mw:
        group = mw.group(list(range(1, workers + 1)))
        net = _mlp(256).to(group.device)
        optimizer = _OPTIMIZERS["AdamW"](net.parameters())
        rows, step_s = mw.remote(_rows_for, on=1)(_STEP_S).result()
        x, y = (each.to(group.device) for each in _data(rows))
        eager = _step(net, optimizer)
        steps = {"eager": eager, "captured": allranks.capture(eager)}
        for _ in range(5):  # the first calls record and verify the step
            steps["captured"](x, y)
        waits = [("eager", 10), ("captured", 10), ("captured", 50)]
        found = _turns([_share(mw, name, each, partial(steps[name], x, y)) for name, each in waits], budget_s)
    made = []
    for name, each in waits:
        what = f"x {workers}, {name}, a wait each {each}"
        cpu = [took / step_s for took in found[f"cpu {name} {each}"]]
        made.append(of(f"share of a 5 ms step {what}", "%", cpu, most=0.02 if each == 50 else None))
        made.append(of(f"share of these CPUs' time {what}", "%", found[f"wall {name} {each}"]))
    return made


def _share(mw: Master, name: str, steps: int, step: Callable[[], object]) -> Block:
    def run(found: Samples) -> None:
        mw.synchronize()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        mw.synchronize()
        took, busy = time.perf_counter() - began, time.process_time() - busy
        found[f"cpu {name} {steps}"].append(busy / steps)
        found[f"wall {name} {steps}"].append(busy / took)

    return run


def _rows_for(seconds: float) -> tuple[int, float]:
    """Return the batch size with which a step takes about ``seconds`` on this worker, and the measured time."""
    net = _mlp(256)
    step = _step(net, _OPTIMIZERS["AdamW"](net.parameters()))

    def took(rows: int) -> float:
        x, y = _data(rows)
        times = []
        for _ in range(10):
            began = time.perf_counter()
            step(x, y)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    rows = 16
    while (now := took(rows)) < seconds * 0.9 and rows < 1 << 14:
        rows = max(rows + 1, min(2 * rows, int(rows * seconds / now)))
    return rows, now


# One command to all workers.


def _command(workers: int, budget_s: float) -> list[Goal]:
    with allranks.init_master_worker(workers=workers, threads=1, timeout=_TIMEOUT_S) as mw:
        x = torch.ones(4, device=mw.group(list(range(1, workers + 1))).device)

        def alone(found: Samples) -> None:
            for _ in range(20):
                began = time.perf_counter()
                mw.synchronize()
                found["alone"].append(time.perf_counter() - began)

        def behind(found: Samples) -> None:
            for _ in range(20):
                began = time.perf_counter()
                x.add_(1)
                mw.synchronize()
                found["behind"].append(time.perf_counter() - began)

        found = _turns([alone, behind], budget_s)
    goal = 1e-3 if workers == 64 else None
    return [
        of(f"one command to {workers} workers, p50", "us", found["alone"], most=goal),
        of(f"one command to {workers} workers, p99", "us", found["alone"], part=0.99),
        of(f"an operation of {workers} workers and it, p50", "us", found["behind"]),
    ]
