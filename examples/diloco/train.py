"""Trains over a slow network: many steps on each rank alone, then one all_reduce of what they have changed.

    allranks run -n 4 examples/diloco/train.py                    # 20 inner steps, outer steps in float32
    allranks run -n 4 examples/diloco/train.py --quantise         # changes as int8, with error feedback
    allranks run -n 4 examples/diloco/train.py --inner 1 --plain  # what DistributedDataParallel sends

The outer step takes the mean change of all ranks as a gradient, with Nesterov momentum (Douillard et al., DiLoCo,
2023). With --quantise each rank sends a byte for each weight and adds what rounding has cut off to its next change. The
last line says how many bytes of tensors a rank has given to collectives.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import allranks as dist


def mean_change(change, error, quantise):
    """Over all ranks, of a flat tensor, and what this rank still owes. Returns it and how many bytes were sent."""
    if not quantise:
        dist.all_reduce(change, op=dist.ReduceOp.AVG)
        return change, change.nbytes
    change = change + error
    scale = change.abs().max() / 127
    dist.all_reduce(scale, op=dist.ReduceOp.MAX)  # one scale for all, so that bytes can be added
    small = (change / scale.clamp_min(1e-12)).round().to(torch.int8)
    error.copy_(change - small * scale)
    gathered = [torch.empty_like(small) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, small)
    total = torch.stack(gathered).sum(0, dtype=torch.int32)
    return total * (scale / dist.get_world_size()), small.nbytes + 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer", type=int, default=15, help="outer steps")
    parser.add_argument("--inner", type=int, default=20, help="steps of each rank between them")
    parser.add_argument("--quantise", action="store_true", help="send int8")
    parser.add_argument("--plain", action="store_true", help="the outer step just takes the mean")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.images).float().flatten(1) / 16, torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1400][rank::size], y[:1400][rank::size], x[1400:], y[1400:]

    torch.manual_seed(0)  # the same weights everywhere
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.AdamW(net.parameters(), lr=2e-3)
    anchor = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    options = {"lr": 1.0} if args.plain else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    outer = torch.optim.SGD([anchor], **options)
    error, sent = torch.zeros_like(anchor), 0
    torch.manual_seed(rank)
    for _ in range(args.outer):
        for _ in range(args.inner):
            batch = torch.randint(len(train_x), (64,))
            inner.zero_grad()
            F.cross_entropy(net(train_x[batch]), train_y[batch]).backward()
            inner.step()
        change = anchor - nn.utils.parameters_to_vector(net.parameters()).detach()
        anchor.grad, nbytes = mean_change(change, error, args.quantise)
        outer.step()
        nn.utils.vector_to_parameters(anchor.clone(), net.parameters())  # which become views of it
        sent += nbytes
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    same = [torch.empty_like(anchor) for _ in range(size)]
    dist.all_gather(same, anchor)
    assert all(torch.equal(each, anchor) for each in same)
    if rank == 0:
        steps = args.outer * args.inner
        given = f"{sent / 1024:,.0f} KiB given by each rank, {sent / steps:,.0f} B a step"
        print(f"{accuracy:.1%} after {steps} steps; {given}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
