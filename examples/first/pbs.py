"""Four processes on one node allocated by PBS, each with a separate log; one message to all processes.

    qsub -I -l select=1:ngpus=4 -P 11003281 -l walltime=24:00:00 -q ai       # then, on the node:
    python examples/first/pbs.py --world_size 4

The launcher can start the processes and set their ranks instead (also in the job that `allranks submit --to pbs --gpus
4 ...` submits):

    allranks run -n 4 examples/first/pbs.py

Source: "Writing distributed applications with PyTorch", a user's notes for one node of PBS with four GPUs, with
allranks instead of torch.distributed. Without GPUs it uses CPUs.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

import allranks as dist
from allranks.logging import configure as configure_logger

BACKEND = "nccl" if torch.cuda.is_available() else "native"
RANKS = torch.cuda.device_count() or 4


def init_env(**kwargs: Any) -> None:
    """Initialize environment variables."""
    os.environ["MASTER_ADDR"] = kwargs.pop("master_addr", os.environ.get("MASTER_ADDR", "localhost"))
    os.environ["MASTER_PORT"] = kwargs.pop("master_port", os.environ.get("MASTER_PORT", "12356"))
    os.environ.update(kwargs)


def init_process(
    rank: int, world_size: int, backend: str, fn: Callable[[int, int], None] | None = None, **kwargs: Any
) -> None:
    """Initialize the distributed environment via init_process_group."""
    logger = configure_logger(rank)

    dist.init_process_group(backend=backend, rank=rank, world_size=world_size, **kwargs)
    logger.info(f"Initialized process group: Rank {rank} out of {world_size}")

    display_dist_info(rank, world_size, logger)

    if fn is not None:
        fn(rank, world_size)
    dist.destroy_process_group()


def display_dist_info(rank: int, world_size: int, logger: logging.Logger) -> None:
    logger.info(f"Explicit Rank: {rank}")
    logger.info(f"Explicit World Size: {world_size}")
    logger.info(f"Machine Hostname: {socket.gethostname()}")
    logger.info(f"PyTorch Distributed Available: {dist.is_available()}")
    logger.info(f"World Size in Initialized Process Group: {dist.get_world_size()}")
    logger.info(f"Rank within Default Process Group: {dist.get_rank()}")


def run(rank: int, world_size: int) -> None:
    """Blocking point-to-point communication."""
    tensor = torch.zeros(1)
    print("Rank ", rank, " has data ", tensor[0], flush=True)
    tensor = tensor.to(rank) if torch.cuda.is_available() else tensor  # in 1 node, global rank = local rank
    if rank == 0:
        tensor += 1
        for other_rank in range(1, world_size):
            dist.send(tensor=tensor, dst=other_rank)
    else:
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0], flush=True)


def main(world_size: int) -> None:
    """Main driver function."""
    init_env()
    configure_logger("main")
    mp.set_start_method("spawn")
    processes = [
        mp.Process(target=init_process, args=(rank, world_size, BACKEND, run), kwargs={"init_method": "env://"})
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--world_size", default=RANKS, type=int, help="Total number of processes")
    args = parser.parse_args()
    if "RANK" in os.environ:  # allranks run has started the processes and set their ranks
        init_process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), BACKEND, run)
    else:
        main(args.world_size)
