"""A failure under torch's DistributedDataParallel or FSDP2 raises an error of allranks on every rank."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import allranks as dist
from allranks.testing import run_ranks

KINDS = ("ddp", "ddp with a hook", "ddp, static graph", "fsdp2")
TIMEOUT_S = 1.5


def training(kind: str) -> Callable[[], None]:
    """Return a training step of a model that torch distributes."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, static_graph=kind == "ddp, static graph")
        if kind == "ddp with a hook":
            model.register_comm_hook(None, fp16_compress_hook)
    data = torch.ones(4, 100)
    return lambda: model(data).sum().backward()


def failing(
    kinds: Sequence[str], fail: Callable[[], None], timeout_s: float = 30.0, late_s: float = 0.0
) -> Callable[[], list[tuple[str, str]]]:
    """Return the function of a rank: for each kind, in a new world, training steps in which rank 1 fails.

    Rank 1 may be late by ``late_s``. The function returns the type and text of each error.
    """

    def once(kind: str) -> tuple[str, str]:
        step = training(kind)
        for _ in range(3):
            step()
        try:
            if dist.get_rank() == 1:
                fail()
            for _ in range(3):
                step()
        except dist.AllranksError as error:
            return type(error).__name__, str(error)
        return "none", ""

    def body() -> list[tuple[str, str]]:
        errors = []
        for kind in kinds:
            dist.init_process_group(timeout=timeout_s)
            dist.torch_group()
            until = time.monotonic() + late_s
            errors.append(once(kind))
            dist.destroy_process_group()
            time.sleep(max(0.0, until - time.monotonic()))  # joining the next world has the same timeout
        return errors

    return body


@pytest.mark.parametrize("kind", KINDS)
def test_killed_rank_raises_peer_lost_error_on_the_other_ranks(kind: str) -> None:
    body = failing([kind], lambda: os.kill(os.getpid(), signal.SIGKILL))
    results = run_ranks(3, body, init=False, may_die={1})
    for rank in (0, 2):
        error, text = results[rank][0]
        assert error == "PeerLostError", text
        assert "rank 1" in text
        assert "died" in text


def test_different_call_raises_mismatch_error_on_every_rank() -> None:
    for errors in run_ranks(2, failing(KINDS, lambda: torch_dist.all_reduce(torch.ones(5))), init=False):
        for error, text in errors:
            assert error == "MismatchError", text
            assert "5 x float32, SUM" in text
            assert "test_torch_failures.py" in text  # the call site


def test_late_rank_raises_timeout_error_on_every_rank() -> None:
    late = failing(KINDS, lambda: time.sleep(2 * TIMEOUT_S), TIMEOUT_S, late_s=2.5 * TIMEOUT_S)
    results = run_ranks(2, late, init=False)
    for rank, errors in enumerate(results):
        for error, text in errors:
            assert error == "TimeoutError", text
            assert ("after it had waited for this rank" if rank == 1 else "no data from rank 1") in text


def test_ctrl_c_interrupts_backward() -> None:
    """Check that Ctrl-C interrupts the wait of DistributedDataParallel in C++ at the end of backward."""

    def body() -> None:
        dist.torch_group()
        other = dist.new_group()
        step = training("ddp")
        step()
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0, group=other)  # returns only after the interrupt of rank 0
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            step()
        dist.send(torch.empty(1), 1, group=other)

    run_ranks(2, body)
