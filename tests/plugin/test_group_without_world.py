"""Groups that a program creates with torch's internal functions, beside the world or before it.

Trainers that send weights to rollout workers (OpenRLHF, slime, SGLang, vLLM) have ranks of two worlds in such a group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import allranks as dist
from allranks._cluster.outer_job import SEAL, seal
from allranks.testing import run_ranks
from support.extra_groups import LIMIT, choose, free_ports, init_process_group, results, stateless_group, total


def _join_world(backend: str, url: str, rank: int, size: int) -> None:
    distributed.init_process_group(choose(backend), init_method=url, rank=rank, world_size=size, timeout=LIMIT)


@pytest.mark.parametrize("backend", ["allranks", "instead of gloo"])
def test_groups_created_before_and_beside_the_world_give_correct_sums(tmp_path: Path, backend: str) -> None:
    def body() -> list[float]:
        rank, name = int(os.environ["RANK"]), choose(backend)
        found = []
        first = init_process_group(name, f"file://{tmp_path}/first", "first", rank, 2)
        found.append(total(first, rank + 1.0))
        _join_world(backend, f"file://{tmp_path}/world", rank, 2)
        # With the ranks in reverse order.
        second = init_process_group(name, f"file://{tmp_path}/second", "second", 1 - rank, 2)
        sub = distributed.new_group([0, 1])
        found += [total(group, rank + 1.0) for group in (None, first, second, sub)]
        distributed.destroy_process_group(second)
        found += [total(None, 1.0), total(first, 2.0)]
        distributed.destroy_process_group()
        return found

    assert run_ranks(2, body, init=False) == [[3.0] * 5 + [2.0, 4.0]] * 2


def _transfer(backend: str, default: str) -> Callable[[], list[Any]]:
    """Return a program of two trainers and a rollout worker, with two groups of all three at a time."""
    ports = free_ports(5)
    urls = [f"tcp://127.0.0.1:{port}" for port in ports]

    def body() -> list[Any]:
        rank, name = int(os.environ["RANK"]), choose(backend)
        found = []
        if default:
            _join_world(default, urls[0] if rank < 2 else urls[1], rank % 2, 2 if rank < 2 else 1)
        first = init_process_group(name, urls[2], "weights", rank, 3)
        second = init_process_group(name, urls[3], "other weights", 2 - rank, 3)
        found += [results(first), results(second)]
        distributed.destroy_process_group(first)
        found.append(results(second))
        again = init_process_group(name, urls[4], "weights", rank, 3)
        found.append(results(again))
        distributed.destroy_process_group(again)
        distributed.destroy_process_group(second)
        if default:
            found.append(total(None, rank + 1.0))
            distributed.destroy_process_group()
        assert name == "gloo" or type(first).__name__ == "TorchGroup"
        return found

    return body


@cache
def _on_gloo(has_default: bool) -> list[Any]:
    return run_ranks(3, _transfer("gloo", "gloo" if has_default else ""), init=False)


@pytest.mark.parametrize("default", ["", "gloo", "allranks"])
@pytest.mark.parametrize("backend", ["allranks", "instead of gloo"])
def test_groups_of_two_worlds_give_the_results_of_gloo(backend: str, default: str) -> None:
    if default == "gloo" and backend != "allranks":
        default = backend
    assert run_ranks(3, _transfer(backend, default), init=False) == _on_gloo(bool(default))


def test_ranks_of_one_group_can_have_been_restarted_at_different_times() -> None:
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}"

    def body() -> float:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
        return total(init_process_group("allranks", url, "weights", int(os.environ["RANK"]), 2), 1.0)

    assert run_ranks(2, body, init=False) == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["beside the world", "of some ranks"])
def test_variables_of_the_job_remain_for_the_world(tmp_path: Path, kind: str) -> None:
    """The launcher has started a shell, which has started the rank. The rank in the group differs from the job's."""

    def body() -> float:
        rank = int(os.environ["RANK"])
        os.environ[SEAL] = seal(os.environ, os.getppid())
        if kind == "of some ranks":
            _join_world("gloo", f"file://{tmp_path}/world", rank, 2)
            group = distributed.new_group([rank], backend="allranks", use_local_synchronization=True)
            assert total(group, 1.0) == 1.0
            distributed.destroy_process_group()
        else:
            init_process_group("allranks", f"file://{tmp_path}/group", "weights", 1 - rank, 2)
        dist.init_process_group()
        found = total(None, rank + 1.0)
        dist.destroy_process_group()
        return found

    assert run_ranks(2, body, init=False) == [3.0, 3.0]


def test_functions_of_allranks_accept_such_a_group(tmp_path: Path) -> None:
    """The world was created by allranks, and torch has not requested it yet."""

    def body() -> list[Any]:
        rank = int(os.environ["RANK"])
        dist.init_process_group(init_method=f"file://{tmp_path}/{rank // 2}", rank=rank % 2, world_size=2 - rank // 2)
        group = init_process_group("allranks", f"file://{tmp_path}/weights", "weights", rank, 3)
        tensor = torch.tensor([rank + 1.0])
        dist.broadcast(tensor, 2, group=group)
        found = [tensor.item(), dist.get_rank(group), dist.get_world_size(group), total(None, rank + 1.0)]
        distributed.destroy_process_group(group)
        found.append(total(None, 1.0))
        dist.destroy_process_group()
        return found

    assert run_ranks(3, body, init=False) == [[3.0, 0, 3, 3.0, 2.0], [3.0, 1, 3, 3.0, 2.0], [3.0, 2, 3, 3.0, 1.0]]


@pytest.mark.parametrize("backend", ["allranks", "instead of gloo"])
def test_a_program_can_construct_groups_on_gloo_beside_a_world_of_allranks(tmp_path: Path, backend: str) -> None:
    """As vLLM does. torch creates such a group without asking for a backend, so it stays on gloo."""
    urls = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]

    def body() -> list[float]:
        rank = int(os.environ["RANK"])
        _join_world(backend, f"file://{tmp_path}/{rank // 2}", rank % 2, 2 - rank // 2)
        first, second = stateless_group(urls[0], rank, 3), stateless_group(urls[1], 2 - rank, 3)
        found = [total(group, rank + 1.0) for group in (first, second, None)]
        tensor = torch.tensor([rank + 1.0])
        distributed.broadcast(tensor, group_src=2, group=first)
        distributed.barrier(group=first)
        first.shutdown()
        found += [tensor.item(), total(second, 1.0)]
        distributed.destroy_process_group()
        return found

    mine = [6.0, 6.0, 3.0, 3.0, 3.0]
    assert run_ranks(3, body, init=False) == [mine, mine, mine]
