"""More hosts than a host has direct connections: large calls use chains, rings and trees of hosts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_connections import _ESTABLISHED, _held
from test_hosts import on_hosts

import allranks as dist
from support.cluster import Cluster
from support.prompt import PROMPT_S

HOSTS = 9
COUNT = 40_007 * HOSTS


def _operand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return ((torch.randn(COUNT, generator=generator) * torch.logspace(-6, 6, COUNT)) % 1000).to(dtype)


def test_results_equal_those_of_one_host_with_few_connections(nine_hosts: Cluster) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        heartbeats = _held(_ESTABLISHED)
        for dtype in (torch.float32, torch.bfloat16):
            summed = _operand(0, dtype).float()
            for other in range(1, size):
                summed += _operand(other, dtype)
            expected = summed.to(dtype)
            tensor = _operand(rank, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected)
            tensor = _operand(rank, dtype)
            dist.reduce(tensor, 5)
            assert torch.equal(tensor, expected if rank == 5 else _operand(rank, dtype))
            mine = torch.empty(COUNT // size, dtype=dtype)
            dist.reduce_scatter_tensor(mine, _operand(rank, dtype))
            assert torch.equal(mine, expected.chunk(size)[rank])
            dist.all_gather_into_tensor(tensor, mine)
            assert torch.equal(tensor, expected)
            tensor = _operand(rank, dtype)
            dist.broadcast(tensor, 3)
            assert torch.equal(tensor, _operand(3, dtype))
            pieces = [torch.empty(COUNT, dtype=dtype) for _ in range(size if rank == 5 else 0)]
            dist.gather(_operand(rank, dtype), pieces or None, 5)
            assert all(torch.equal(piece, _operand(other, dtype)) for other, piece in enumerate(pieces))
            tensor.zero_()
            dist.scatter(tensor, pieces or None, 5)
            assert torch.equal(tensor, _operand(rank, dtype))
        assert _held(_ESTABLISHED) - heartbeats <= 8  # four rounds of small calls with two peers each

    on_hosts(nine_hosts, list(range(HOSTS)), body)


def test_rank_killed_in_a_chain_is_reported_on_all_ranks(nine_hosts: Cluster) -> None:
    def body() -> float:
        tensor, mine = torch.ones(900_000), torch.ones(100_000)
        pieces = list(tensor.split(100_000)) if dist.get_rank() == 2 else None
        verbs: list[Callable[[Any], object]] = [
            lambda group: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group),
            lambda group: dist.reduce(tensor, 2, group=group),
            lambda group: dist.broadcast(tensor, 7, group=group),
            lambda group: dist.reduce_scatter_tensor(mine, tensor, group=group),
            lambda group: dist.all_gather_into_tensor(tensor, mine, group=group),
            lambda group: dist.gather(mine, pieces, 2, group=group),
            lambda group: dist.scatter(mine, pieces, 2, group=group),
        ]
        groups = [dist.new_group() for _ in verbs]
        for verb, group in zip(verbs, groups, strict=True):
            verb(group)
        dist.barrier()
        began = time.monotonic()
        if dist.get_rank() == 4:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def forever(verb: Callable[[Any], object], group: Any) -> None:
            while True:
                verb(group)

        for verb, group in zip(verbs, groups, strict=True):
            with pytest.raises(dist.PeerLostError, match="died") as caught:
                forever(verb, group)
            assert caught.value.rank == 4
        return time.monotonic() - began

    results = on_hosts(nine_hosts, list(range(HOSTS)), body, may_die={4})
    assert max(noticed_s for noticed_s in results if noticed_s is not None) < PROMPT_S
