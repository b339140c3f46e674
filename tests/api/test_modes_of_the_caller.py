"""Calls while the program has set a default device, a default dtype, or an autograd mode."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks as dist
from allranks.testing import run_ranks

CPU = {"device": "cpu", "dtype": torch.float32}


def _objects() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    several = ["a", 1.5] if rank == 0 else [None, None]
    dist.broadcast_object_list(several, 0)
    collected: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank, collected, 1)
    own: list[Any] = [None]
    dist.scatter_object_list(own, list(range(size)) if rank == 0 else None, 0)
    return [gathered, several, collected, own]


def _tensors() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.monitored_barrier()
    strided = torch.ones(6, **CPU)[::2]
    dist.all_reduce(strided)
    scaled = torch.ones(3, **CPU)
    dist.all_reduce(scaled, op=dist.premul_sum(2.0))
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank]], device="cpu"), torch.ones(1, **CPU), (4,), check_invariants=True, **CPU
    )
    dist.all_reduce(sparse)
    exchanged = torch.zeros(size, **CPU)
    dist.all_to_all_single(exchanged, torch.arange(1.0 * size, **CPU), [1] * size, [1] * size)
    dist.barrier(group=dist.new_group())
    return [each.tolist() for each in (strided, scaled, sparse.to_dense(), exchanged, dist.empty_shared(2).zero_())]


def _trains(folder: Path) -> list[Any]:
    rank = dist.get_rank()
    net = dist.DistributedDataParallel(nn.Linear(2, 2, **CPU))
    with net.join():
        for _ in range(1 + rank):
            net(torch.ones(1, 2, **CPU)).sum().backward()
    dist.checkpoint.save({"net": net.module, "rank": 3}, folder / str(torch.get_default_dtype()), step=1)
    state = dist.checkpoint.load(folder / str(torch.get_default_dtype()), into={"net": net.module, "rank": 0})
    return [net.module.weight.grad.tolist(), state["rank"]]


@pytest.mark.parametrize("part", [_objects, _tensors, _trains])
@pytest.mark.parametrize("meta", [(0, 1), (1,)], ids=["all", "rank 1"])
def test_a_default_device_and_type_change_nothing(
    tmp_path: Path, part: Callable[..., list[Any]], meta: tuple[int, ...]
) -> None:
    def main() -> tuple[list[Any], list[Any]]:
        words = [tmp_path] if part is _trains else []
        as_usual = part(*words)
        torch.set_default_dtype(torch.float64)
        with torch.device("meta" if dist.get_rank() in meta else "cpu"):
            return as_usual, part(*words)

    for as_usual, found in run_ranks(2, main):
        assert found == as_usual


_FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip


def test_package_creates_tensors_on_an_explicit_device() -> None:
    """Check the source, so that no tensor is created on the default device of the program."""
    package = Path(dist.__file__).parent
    for file in package.rglob("*.py"):
        if "tools" in file.relative_to(package).parts:  # separate programs
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in _FACTORIES:
                names = {keyword.arg for keyword in node.keywords}
                assert names & {"device", "out", None}, f"{file}:{node.lineno} {ast.unparse(node)}"


def _strided(value: float) -> torch.Tensor:
    return torch.full((4, 2), float(value))[:, 0]


@pytest.mark.parametrize("how", ["wait", "poll", "thread", "future"])
def test_call_of_inference_mode_can_be_waited_for_outside_it(how: str) -> None:
    def main() -> list[Any]:
        rank = dist.get_rank()
        with torch.inference_mode():
            total, received = _strided(rank + 1.0), _strided(9.0)
            gathered = [_strided(9.0), _strided(9.0)]
            works = [dist.all_reduce(total, async_op=True), dist.all_gather(gathered, _strided(rank), async_op=True)]
            if how != "future":
                works += [dist.isend(torch.full((4,), float(rank)), 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            if how == "wait":
                assert work.wait()
            elif how == "poll":
                while not work.is_completed():
                    time.sleep(0.001)
            elif how == "thread":
                thread = threading.Thread(target=work.wait)
                thread.start()
                thread.join()
            else:
                work.get_future().wait()
            assert work.wait()
            assert work.exception() is None
        return [total.tolist(), [each.tolist() for each in gathered], received.tolist()]

    for rank, (total, gathered, received) in enumerate(run_ranks(2, main)):
        assert total == [3.0] * 4
        assert gathered == [[0.0] * 4, [1.0] * 4]
        assert received == [9.0 if how == "future" else 1.0 - rank] * 4


def test_second_wait_reports_the_failed_copy_of_the_results_again() -> None:
    def main() -> None:
        size = 4
        tensor = torch.ones(2, size)[:, ::2]
        work = dist.all_reduce(tensor, async_op=True)
        tensor.resize_(0)  # an error of the program: the results no longer have a destination
        for _ in range(2):
            with pytest.raises(RuntimeError, match="size"):
                work.wait()
        assert isinstance(work.exception(), RuntimeError)

    run_ranks(2, main)
