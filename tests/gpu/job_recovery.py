"""A training with `State` in which a rank is killed. Each rank prints a digest of the final weights.

allranks run -n 3 --elastic 2 job_recovery.py cuda native 5:1

The arguments are the device type, the backend, and the kills: STEP:RANK. Several ranks may share a GPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn

import allranks as dist

kind, backend, *kills = sys.argv[1:]
dist.init_process_group(None if backend == "default" else backend, timeout=30)
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
torch.use_deterministic_algorithms(True)  # on GPUs, it needs CUBLAS_WORKSPACE_CONFIG
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4)).to(device)
model = dist.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = dist.resilience.State(model=model, optimizer=optimizer)
for step in state.steps(20):
    with step:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8, device=device)).square().mean()
        if os.environ["ALLRANKS_START"] == "0" and f"{step.index}:{os.environ['RANK']}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
print("end", dist.get_rank(), dist.get_world_size(), state.replaced, digest.hexdigest()[:16], flush=True)
dist.destroy_process_group()
