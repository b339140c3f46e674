"""A program on torch.distributed in which the other ranks wait for rank 1 for 12 s.

allranks watch --after 4s -- torchrun --nproc-per-node 2 job_hang.py cuda nccl late

The arguments are the device type, the backend and the cause:

- late: rank 1 does not call the second all_reduce of a tensor on the device.
- busy: rank 1 waits for its own device, on which earlier work delays a collective of a group of this rank alone. The
  other ranks wait in an all_reduce of a CPU tensor. One GPU is enough for this on nccl.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as td

SECONDS = 12.0
CYCLES_PER_S = 1.9e9  # GPUs run at 1.2 to 2.6 GHz; the wait may be longer or shorter
kind, backend, cause = sys.argv[1:]
rank = int(os.environ["RANK"])
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def occupy_device() -> None:
    if kind == "cuda":
        cuda: Any = torch.cuda
        cuda._sleep(int(SECONDS * CYCLES_PER_S))


td.init_process_group(backend)
if cause == "late":
    tensor = torch.ones(4, device=device)
    td.all_reduce(tensor)
    if rank == 1:
        time.sleep(SECONDS)  # late
    td.all_reduce(tensor)  # waits: late
    print(tensor.sum().item())  # on nccl, the CPU waits here
else:
    groups = [td.new_group([each]) for each in range(td.get_world_size())]
    own = torch.ones(4, device=device)
    td.all_reduce(own, group=groups[rank])  # nccl connects
    td.all_reduce(torch.ones(4))
    if rank == 1:
        occupy_device()
        td.all_reduce(own, group=groups[rank])
        print(own.sum().item() if kind == "cuda" else time.sleep(SECONDS))  # busy
    td.all_reduce(torch.ones(4))  # waits: busy
td.destroy_process_group()
