"""Every rank says who it is.

allranks run -n 2 examples/first/hello.py [--backend native]

Source: a user's `helloworld.py` for torch.distributed.launch, with allranks in torch.distributed's place.
"""

from __future__ import annotations

import argparse
import socket

import allranks as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="native")
args = parser.parse_args()

dist.init_process_group(backend=args.backend)
print(f"hello from [{socket.gethostname()}:{dist.get_backend()}] process {dist.get_rank()}/{dist.get_world_size()}")
dist.destroy_process_group()
