"""Train a network in two halves on two workers, micro-batch by micro-batch.

    python examples/pipeline/train.py                              # starts two workers
    allranks run --mode master -n 3 examples/pipeline/train.py     # the launcher starts them, also on two hosts

The output of the first half moves directly from worker 1 to worker 2. The gradients return the same way, in one
backward() for each micro-batch. All forwards are queued, then all backwards (the order of GPipe): while worker 2
computes one micro-batch, worker 1 computes the next. For comparison, a second run waits after each micro-batch.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import allranks as ar

WIDTH = 768
IMAGES = 1792  # of 1797, because 1792 has many divisors


def make_halves(devices):
    """Return the two halves of a network, each on its device, with the same weights in every run."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    second = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
    return first.to(devices[0]), second.to(devices[1])


def load_data():
    """Return images of handwritten digits and their labels."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1)
    return (images / 16)[:IMAGES], torch.from_numpy(digits.target)[:IMAGES]


def train(devices, steps, micro_batches, in_flight, wait):
    """Train, with ``in_flight`` micro-batches queued before `wait` is called.

    Returns:
        Both halves, the loss of each step, and the duration in seconds.
    """
    halves = make_halves(devices)
    optimizers = [torch.optim.AdamW(half.parameters(), lr=1e-3, fused=True) for half in halves]
    batch = [each.to(device).chunk(micro_batches) for each, device in zip(load_data(), devices, strict=True)]
    parts = list(zip(*batch, strict=True))
    losses, start = [], time.perf_counter()

    def forward(x, y):
        between = halves[0](x).to(devices[1])  # directly between the workers
        return F.cross_entropy(halves[1](between), y) / micro_batches

    for _ in range(steps):
        queued = []
        for i in range(0, micro_batches, in_flight):
            queued += [forward(x, y) for x, y in parts[i : i + in_flight]]
            for loss in queued[i:]:
                loss.backward()
            wait()
        losses.append(torch.stack(queued).detach().sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return halves, torch.stack(losses).tolist(), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    args = parser.parse_args()
    count = args.micro_batches
    if args.steps < 1 or count < 1 or IMAGES % count:
        parser.error(f"--steps is at least 1, --micro-batches a divisor of {IMAGES}")
    with ar.init_master_worker(workers=None if "RANK" in os.environ else 2) as mw:
        workers = ["worker:1", "worker:2"]
        train(workers, 1, count, count, mw.synchronize)  # the first call of an operator is slower
        _, losses, seconds = train(workers, args.steps, count, count, mw.synchronize)
        print(f"pipelined:     loss {losses[0]:.4f} to {losses[-1]:.4f} in {seconds:.2f} s")
        _, others, slower = train(workers, args.steps, count, 1, mw.synchronize)
        print(f"one at a time: loss {others[0]:.4f} to {others[-1]:.4f} in {slower:.2f} s")
        same = "the same" if others == losses else "OTHER"
        print(f"{count} micro-batches, 2 workers: {slower / seconds:.2f} times as fast, {same} losses")


if __name__ == "__main__":
    main()
