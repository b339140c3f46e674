"""A program in master-worker mode, for a type checker."""

import torch
from torch import nn

import allranks as ar

mw = ar.init_master_worker(workers=2)
model = ar.DataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@ar.capture
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


loss = step(torch.ones(4, 4), torch.ones(4, 2))
print(loss.item())
total = mw.remote(sum)([1, 2])
mw.shutdown()
mw.shutdonw()  # expect: attr-defined reportAttributeAccessIssue
