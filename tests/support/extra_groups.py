"""Groups that a program creates beside torch's default group, by the functions that RL libraries have for it.

A trainer and its rollout workers are two worlds. To send weights, ranks of both are in one more group. The libraries
create it with internal functions of torch. Their order of calls is the same here:

- OpenRLHF (openrlhf/utils/distributed_util.py) and slime (slime/utils/distributed_utils.py): ``init_process_group``,
  which has the name of torch's function. In SGLang and verl the same function has another name.
- vLLM (vllm/distributed/utils.py): ``stateless_group``, which torch.distributed does not know.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

__all__ = ["LIMIT", "choose", "free_ports", "init_process_group", "results", "stateless_group", "total"]

LIMIT = timedelta(seconds=30)


def choose(backend: str) -> str:
    """Return the name of the backend for torch; let allranks replace gloo if requested."""
    if backend == "instead of gloo":
        from allranks._plugin.gloo import stand_in

        stand_in()
        return "gloo"
    return backend


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def init_process_group(backend: str, url: str, name: str, rank: int, size: int) -> Any:
    """Create a group of ranks that are numbered from 0, on a store of its own."""
    store, rank, size = next(c10d.rendezvous(url, rank, size, timeout=LIMIT))
    store.set_timeout(LIMIT)
    prefixed = c10d.PrefixStore(name, store)
    kind = c10d.Backend(backend)
    made, _ = c10d._new_process_group_helper(
        size, rank, [], kind, prefixed, group_name=name, backend_options=None, timeout=LIMIT
    )
    c10d._world.pg_group_ranks[made] = {number: number for number in range(size)}
    return made


def stateless_group(url: str, rank: int, size: int) -> Any:
    """Create a group on gloo that is not in torch's tables. The program calls the class of its backend."""
    store, rank, size = next(c10d.rendezvous(url, rank, size, timeout=LIMIT))
    store.set_timeout(LIMIT)
    prefixed = c10d.PrefixStore(url, store)
    made = distributed.ProcessGroup(prefixed, rank, size)
    backend = c10d.ProcessGroupGloo(prefixed, rank, size, timeout=LIMIT)
    made._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)
    backend._set_sequence_number_for_group()
    made._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, backend)
    return made


def total(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    distributed.all_reduce(tensor, group=group)
    return tensor.item()


def results(group: Any) -> list[Any]:
    """Return the results of the calls that transfer weights, and of calls that torch may refuse without a world."""
    rank, size = group.rank(), group.size()
    found: list[Any] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            found.append(call())
        except ValueError as error:  # torch: without a default group
            found.append(str(error))

    weights = torch.full((1000,), rank + 1.0)
    distributed.broadcast(weights, 0, group=group)
    found.append(weights.tolist())
    buckets = [torch.full((3,), 10.0 * number + rank) for number in range(3)]
    works = [distributed.broadcast(bucket, group_src=1, group=group, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()
    found.append([bucket.tolist() for bucket in buckets])
    parts = [torch.empty(2) for _ in range(size)]
    distributed.all_gather(parts, torch.full((2,), 2.0**rank), group=group)
    found.append([part.tolist() for part in parts])
    message = torch.arange(4.0)
    if rank == 0:
        distributed.send(message + 1, size - 1, group=group)
        distributed.recv(message, size - 1, group=group)
    elif rank == size - 1:
        distributed.recv(message, 0, group=group)
        work = distributed.isend(2 * message, 0, group=group)
        assert work is not None
        work.wait()
    found.append(message.tolist())
    found.append(total(group, rank + 1.0))
    distributed.barrier(group=group)

    def gather_objects() -> list[Any]:
        objects: list[Any] = [None] * size
        distributed.all_gather_object(objects, {"rank": rank}, group=group)
        return objects

    def exchange() -> list[float]:
        received = torch.empty(1)
        ops = [
            distributed.P2POp(distributed.isend, torch.tensor([1.0 * rank]), (rank + 1) % size, group),
            distributed.P2POp(distributed.irecv, received, (rank - 1) % size, group),
        ]
        for work in distributed.batch_isend_irecv(ops):
            work.wait()
        return received.tolist()

    attempt(gather_objects)
    attempt(exchange)
    attempt(lambda: (distributed.get_rank(group), distributed.get_world_size(group)))
    return found
