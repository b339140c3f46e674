"""The collectives that a first program needs: reduce, all_reduce, gather, all_gather.

    allranks run -n 2 examples/first/start.py

Source: a user's `start.py` for torchrun, with allranks instead of torch.distributed.
"""

from __future__ import annotations

import os

import torch

import allranks as dist

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"global rank {rank}, local rank {os.environ['LOCAL_RANK']}, of {world_size}")

tensor = torch.tensor([rank + 1.0])
dist.reduce(tensor, dst=0)
if rank == 0:
    print(f"reduce: {tensor.item():g}")

tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
print(f"all_reduce: {tensor.item():g}")

mine = torch.tensor([float(rank)])
everybodys = [torch.zeros(1) for _ in range(world_size)]
dist.gather(mine, everybodys if rank == 0 else None, dst=0)
if rank == 0:
    print(f"gather: {torch.cat(everybodys).tolist()}")

everybodys = [torch.zeros(1) for _ in range(world_size)]
dist.all_gather(everybodys, mine)
print(f"all_gather: {torch.cat(everybodys).tolist()}")

dist.destroy_process_group()
