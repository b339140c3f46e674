"""Ranks with pending calls in several threads when one rank aborts the group or is killed; the other ranks shrink."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import allranks as dist

ENDED = (dist.AbortedError, dist.PeerLostError)
_LARGE = 4 << 20  # float32 elements: more than a send transfers before the receiver requests it


def last_rank_ends(how: str) -> tuple[int, int, list[str], list[float]]:
    """Body of a rank. The last rank does not join the calls of the other ranks; it aborts the group or is killed.

    Args:
        how: "abort" or "death".

    Returns:
        The rank and the size after the shrink; the outcome of each pending call; the results computed after the shrink.
    """
    world = dist.group.WORLD
    assert world is not None
    rank, last = world.rank(), world.size() - 1
    if rank == last:
        for source in range(last):  # The other ranks send this message after they have started their calls.
            dist.recv(torch.empty(1), source, tag=9)
        time.sleep(0.2)
        if how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        world.abort()
        smaller = world.shrink()
        return smaller.rank(), smaller.size(), [], _compute(smaller)
    ended: dict[str, str] = {}

    def call(name: str, function: Callable[[], Any]) -> None:
        try:
            function()
            ended[name] = "returned"
        except ENDED:
            ended[name] = "raised"

    works = {f"async {n}": world.all_reduce(torch.ones(1000), async_op=True) for n in range(3)}
    works["irecv"] = dist.irecv(torch.empty(4), last, tag=3)
    works["isend"] = dist.isend(torch.ones(_LARGE), last, tag=3)  # Stays pending, because no rank receives it.
    calls = {
        "all_reduce": lambda: world.all_reduce(torch.ones(1000)),
        "recv 1": lambda: dist.recv(torch.empty(4), last, tag=1),
        "recv 2": lambda: dist.recv(torch.empty(4), last, tag=2),
    }
    threads = [threading.Thread(target=call, args=each) for each in calls.items()]
    for thread in threads:
        thread.start()
    dist.send(torch.ones(1), last, tag=9)
    while not ended:
        time.sleep(0.01)
    # Other threads are still inside their calls, which must finish as they would without the shrink.
    smaller = world.shrink()
    for thread in threads:
        thread.join()
    for name, work in works.items():
        assert work is not None
        call(name, work.wait)
    names = [*works, *calls]
    return smaller.rank(), smaller.size(), [ended[name] for name in names], _compute(smaller)


def _compute(group: dist.ProcessGroup) -> list[float]:
    """Run concurrent collectives and a large message to each neighbor."""
    size, rank = group.size(), group.rank()
    tensors = [torch.full((1000,), float(n + rank)) for n in range(3)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    got = torch.empty(_LARGE)
    to, source = group.ranks[(rank + 1) % size], group.ranks[rank - 1]
    works += [group.irecv(got, source, 5), group.isend(torch.full((_LARGE,), float(rank)), to, 5)]
    for work in works:
        assert work is not None
        work.wait()
    return [*(tensor[-1].item() for tensor in tensors), got[-1].item()]


def expected(size: int, rank: int) -> list[float]:
    """Return the expected result of ``_compute`` on this rank."""
    return [*(float(n * size + sum(range(size))) for n in range(3)), float((rank - 1) % size)]
