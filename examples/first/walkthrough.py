"""Manually started processes that join through environment variables; rank 0 sends its tensor to all other ranks.

    python examples/first/walkthrough.py --world-size 4

Source: "A Simple Distributed Walkthrough", a user's notes for torch.distributed, on CPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

import torch

import allranks as dist


def run(rank: int, world_size: int) -> None:
    """Blocking point-to-point communication."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        for other_rank in range(1, world_size):
            dist.send(tensor=tensor, dst=other_rank)
    else:
        dist.recv(tensor=tensor, src=0)
    print(f"rank {rank} has data {tensor[0]}", flush=True)


def init_process(rank: int, world_size: int) -> None:
    dist.init_process_group(backend="native", init_method="env://", rank=rank, world_size=world_size)
    run(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=4)
    args = parser.parse_args()

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12356")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=init_process, args=(rank, args.world_size)) for rank in range(args.world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
