"""Target of injected faults: a rank starts, computes, replaces a lost rank, saves and loads a checkpoint, and exits.

The last line of each rank contains its result, which is the same for each number of ranks.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

import allranks as dist
from allranks import checkpoint

os.access("/inject/start", os.F_OK)  # signals the phase to injection.c
FOLDER, STEPS, LOST_AT, SAVED_AT = sys.argv[1], 8, 3, 5

dist.init_process_group(timeout=10)
os.access("/inject/run", os.F_OK)
weight = torch.zeros(1000)
state = dist.resilience.State(weight=weight)
for step in state.steps(STEPS):
    with step:
        gradient = torch.full((1000,), float(step.index))
        if step.index == LOST_AT and os.environ["ALLRANKS_START"] == "0":
            os.access("/inject/recovery", os.F_OK)
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        step.commit()
        weight += gradient
    if step.index == SAVED_AT:
        os.access("/inject/checkpoint", os.F_OK)
        checkpoint.save({"weight": weight}, FOLDER, step=step.index)
        assert torch.equal(checkpoint.load(FOLDER)["weight"], weight)
os.access("/inject/end", os.F_OK)
print(f"END {dist.get_rank()} {weight.sum().item():g}", flush=True)
dist.destroy_process_group()
