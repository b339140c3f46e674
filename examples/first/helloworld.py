"""Every rank prints its number and the address of rank 0.

    allranks run -n 2 examples/first/helloworld.py [--backend gloo]
    python -m torch.distributed.launch --nproc_per_node 2 examples/first/helloworld.py

Source: a user's `helloworld.py` for torch.distributed.launch, with allranks instead of torch.distributed.
"""

from __future__ import annotations

import argparse
import os
import socket

import allranks as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend", help="native, tcp, gloo, nccl or mpi; else native for CPUs, nccl for GPUs")
parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help="from torch.distributed.launch")
args = parser.parse_args()

dist.init_process_group(backend=args.backend)
where = f"http://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
who = f"{socket.gethostname()}:{dist.get_backend()}"
print(f"[{where}] hello from [{who}] process {dist.get_rank()}/{dist.get_world_size()}")
dist.destroy_process_group()
