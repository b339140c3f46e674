"""Two trainers send the weights of a model to two rollout workers, which are another job.

    allranks run -n 2 examples/rollout/send_weights.py trainer &
    allranks run -n 2 examples/rollout/send_weights.py worker

On two hosts, pass the address of the trainers' host to both (``--address tcp://node0:29610``), and set the same
ALLRANKS_SECRET. The output compares the transfer with one message of the same size from a trainer to a worker.

RL libraries (OpenRLHF, slime, SGLang) create a group for such a transfer beside the world of each job, as
``weight_group`` does. The transfer is fast for four reasons:

- Each trainer broadcasts. A trainer writes each byte once, and all workers of a host read it. With pairs of ``send``
  and ``recv``, it would write the bytes again for each worker.
- A group contains one trainer and all workers. Each trainer sends a part of the weights through its own group, both at
  the same time. In a group of all ranks, each trainer would also receive the part of the other.
- The parameters are sent from and to their own memory. Copies into flat buckets and out of them take longer than the
  transfer within a host. A bucket is therefore a list of parameters.
- All broadcasts of a bucket are asynchronous, and the next bucket starts before the previous one is complete.
  Otherwise, each rank would wait for the slowest one after each parameter.
"""

import argparse
import collections
import hashlib
import math
import statistics
import time
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as td
from torch import nn
from torch.distributed import distributed_c10d as c10d

import allranks as dist

TRAINERS, WORKERS = 2, 2
IN_FLIGHT = 2  # buckets of a trainer. The limit saves memory if a bucket is first gathered from shards or converted.
MIB = 1 << 20


def weight_groups(role, url, backend):
    """Return the groups of this rank, by trainer. In each group the trainer is rank 0."""
    rank = dist.get_rank()
    address = urlsplit(url)
    serves = role == "trainer" and rank == 0
    store = td.TCPStore(address.hostname, address.port, is_master=serves, timeout=timedelta(minutes=5))
    if role == "trainer":
        return {rank: weight_group(store, backend, f"weights of trainer {rank}", 0)}
    return {
        trainer: weight_group(store, backend, f"weights of trainer {trainer}", 1 + rank) for trainer in range(TRAINERS)
    }


def weight_group(store, backend, name, rank):
    """Create a group beside the world. torch has only an internal function for that: new_group needs a common world."""
    size = 1 + WORKERS
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(minutes=5),
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def buckets(parameters, size):
    """Split a list of parameters into lists of at least ``size`` bytes."""
    found, filled = [[]], 0
    for parameter in parameters:
        if filled >= size:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += parameter.nbytes
    return found


def transfer(parts, groups):
    """Send or receive the buckets ``parts``. The trainers send them in turn."""
    pending = collections.deque()

    def wait():
        for work in pending.popleft():
            work.wait()

    for number, bucket in enumerate(parts):
        group = groups.get(number % TRAINERS)
        if group is None:
            continue  # the other trainer sends this bucket
        pending.append([td.broadcast(parameter, 0, group=group, async_op=True) for parameter in bucket])
        if len(pending) > IN_FLIGHT * len(groups):
            wait()
    while pending:
        wait()


def send_message(tensor, role, groups):
    """Send a tensor from the first trainer to the first worker."""
    if dist.get_rank() == 0:
        if role == "trainer":
            td.send(tensor, 1, group=groups[0])
        else:
            td.recv(tensor, 0, group=groups[0])


def seconds(action, groups):
    """Return the seconds until all ranks have executed an action, measured on the first trainer."""
    # The workers leave the barrier of the first trainer last, when all ranks are ready. At the end they reach it when
    # they have all weights.
    for trainer in sorted(groups, reverse=True):
        td.barrier(group=groups[trainer])
    began = time.perf_counter()
    action()
    for group in groups.values():
        td.barrier(group=group)
    return time.perf_counter() - began


def make_model(mib):
    """Create a model of 8 equal layers, as in a transformer, with about ``mib`` MiB of weights."""
    width = math.isqrt(mib * MIB // 4 // 64)
    layers = [[nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)] for _ in range(8)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def fingerprint(parameters):
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.numpy())
    return digest.hexdigest()[:12]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["trainer", "worker"])
    parser.add_argument("--address", default="tcp://127.0.0.1:29610", help="address at which the first trainer listens")
    parser.add_argument("--mib", type=int, default=1024, help="size of the weights in MiB")
    parser.add_argument("--bucket", type=int, default=32, help="size of a bucket in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="number of transfers; the first one is not measured")
    parser.add_argument("--backend", default="allranks", help="torch's name of the backend: allranks, gloo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    groups = weight_groups(args.role, args.address, args.backend)
    torch.manual_seed(0 if args.role == "trainer" else 1)
    parameters = [parameter.detach() for parameter in make_model(args.mib).parameters()]
    size = sum(parameter.nbytes for parameter in parameters)
    parts = buckets(parameters, args.bucket * MIB)
    message = torch.ones(size // 4) if dist.get_rank() == 0 else torch.empty(0)
    times = []
    for _ in range(args.rounds + 1):
        if args.role == "trainer":
            for parameter in parameters:
                parameter.mul_(1.01)  # a training step
        plain = seconds(lambda: send_message(message, args.role, groups), groups)
        times.append((plain, seconds(lambda: transfer(parts, groups), groups)))
    mine = fingerprint(parameters)
    for group in groups.values():
        found = [None] * (1 + WORKERS)
        td.all_gather_object(found, mine, group=group)
        if set(found) != {mine}:
            raise SystemExit(f"the weights differ: {found}")
    if args.role == "trainer" and dist.get_rank() == 0:
        plain, sent = (size / statistics.median(column) / 1e9 for column in zip(*times[1:], strict=True))
        print(f"{size / MIB:,.0f} MiB in {len(parts)} buckets: the weights of all workers are {mine}")
        print(f"{sent:.2f} GB/s; one message of this size {plain:.2f} GB/s; ratio {sent / plain:.2f}")
    for group in groups.values():
        td.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
