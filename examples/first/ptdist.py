"""Rank 0 sends a tensor to rank 1 over MPI.

    mpiexec -n 2 python examples/first/ptdist.py

Source: a user's program for torch.distributed's MPI backend, with allranks instead of torch.distributed. mpiexec
assigns the ranks, so no variable is set.
"""

from __future__ import annotations

import torch

import allranks as dist


def main(rank: int, world_size: int) -> None:
    if rank == 0:
        x = torch.tensor([1.0, -1.0])  # the tensor of interest
        dist.send(x, dst=1)
        print("Rank-0 has sent the following tensor to Rank-1")
        print(x)
    else:
        z = torch.tensor([0.0, 0.0])  # receive buffer
        dist.recv(z, src=0)
        print("Rank-1 has recieved the following tensor from Rank-0")
        print(z)


if __name__ == "__main__":
    dist.init_process_group(backend="mpi")
    main(dist.get_rank(), dist.get_world_size())
