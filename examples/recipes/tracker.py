"""A training whose rank 0 writes to TensorBoard: pip install tensorboard.

allranks run -n 2 examples/recipes/tracker.py runs
tensorboard --logdir runs
"""

import sys

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import allranks as dist

dist.init_process_group()
torch.manual_seed(1)
model = dist.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True)
mine = slice(dist.get_rank(), None, dist.get_world_size())

# One writer per job. A writer in each rank would write each value several times.
writer = SummaryWriter(sys.argv[1]) if dist.get_rank() == 0 else None
for step in range(50):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.AVG)  # every rank calls it
        if writer is not None:
            writer.add_scalar("loss", mean.item(), step)
if writer is not None:
    writer.close()
dist.destroy_process_group()
