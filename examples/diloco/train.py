"""Train over a slow network: many local steps on each rank, then one all_reduce of the changes.

    allranks run -n 4 examples/diloco/train.py                    # 20 inner steps, outer steps in float32
    allranks run -n 4 examples/diloco/train.py --quantise         # changes as int8, with error feedback
    allranks run -n 4 examples/diloco/train.py --inner 1 --plain  # what DistributedDataParallel sends

The outer step takes the mean change of all ranks as a gradient, with Nesterov momentum (Douillard et al., DiLoCo,
2023). With --quantise a change is sent as one byte for each weight, to the rank that adds it up and back. This is a
quarter of the bytes of an all_reduce of float32, for any number of ranks. The rounding error is added to the next
change. benchmarks/diloco.py counts the bytes on the wire.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import allranks as dist


def mean_change(change, error, quantise):
    """Return the mean over all ranks of a flat tensor. Updates `error`, the accumulated rounding error of this rank."""
    if not quantise:
        dist.all_reduce(change, op=dist.ReduceOp.AVG)
        return change
    rank, size = dist.get_rank(), dist.get_world_size()
    change = F.pad(change + error, (0, -len(change) % size))
    scale = change.abs().max() / 127
    dist.all_reduce(scale, op=dist.ReduceOp.MAX)  # one scale for all ranks, so that bytes can be added
    scale.clamp_(min=1e-12)
    small = (change / scale).round().to(torch.int8)
    owed = change - small * scale

    # Each rank adds up one part of the weights and sends its mean, rounded once more, to all ranks.
    parts = torch.empty_like(small)
    dist.all_to_all_single(parts, small)
    mean = parts.view(size, -1).sum(0, dtype=torch.int32) / size
    rounded = mean.round().to(torch.int8)
    owed.view(size, -1)[rank] += (mean - rounded) * scale * size  # a mean: one rank's change counts 1/size
    dist.all_gather_into_tensor(small, rounded)
    error.copy_(owed[: len(error)])
    return small[: len(error)] * scale


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer", type=int, default=15, help="outer steps")
    parser.add_argument("--inner", type=int, default=20, help="steps of each rank between two outer steps")
    parser.add_argument("--quantise", action="store_true", help="send int8")
    parser.add_argument("--plain", action="store_true", help="use the mean as the outer step")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.images).float().flatten(1) / 16, torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1400][rank::size], y[:1400][rank::size], x[1400:], y[1400:]

    torch.manual_seed(0)  # the same weights on all ranks
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.AdamW(net.parameters(), lr=2e-3)
    anchor = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    options = {"lr": 1.0} if args.plain else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    outer = torch.optim.SGD([anchor], **options)
    error = torch.zeros_like(anchor)
    torch.manual_seed(rank)
    began = time.monotonic()
    for _ in range(args.outer):
        for _ in range(args.inner):
            batch = torch.randint(len(train_x), (64,))
            inner.zero_grad()
            F.cross_entropy(net(train_x[batch]), train_y[batch]).backward()
            inner.step()
        change = anchor - nn.utils.parameters_to_vector(net.parameters()).detach()
        anchor.grad = mean_change(change, error, args.quantise)
        outer.step()
        nn.utils.vector_to_parameters(anchor.clone(), net.parameters())  # the parameters become views of this clone
    took = time.monotonic() - began
    accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    same = [torch.empty_like(anchor) for _ in range(size)]
    dist.all_gather(same, anchor)
    assert all(torch.equal(each, anchor) for each in same)
    if rank == 0:
        print(f"{accuracy:.1%} after {args.outer * args.inner} steps in {took:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
