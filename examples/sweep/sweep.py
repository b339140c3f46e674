"""Search for a learning rate in master-worker mode: each worker trains with a different rate.

    python examples/sweep/sweep.py                                  # starts two workers
    allranks run --mode master -n 5 examples/sweep/sweep.py         # the launcher starts four

The master queues the steps of all trainings and waits only for their losses, so the workers compute concurrently.
After each round the worse half of the remaining trainings is dropped (successive halving).
"""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import allranks as ar


class Trial:
    """One training, on one worker."""

    def __init__(self, device, lr, x, y):
        torch.manual_seed(0)
        self.lr, self.x, self.y = lr, x.to(device), y.to(device)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)

    def train(self, steps):
        """Queue the steps. Return the loss as a tensor on the worker, without waiting."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(self.x), self.y)
            loss.backward()
            self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="steps of each training in each round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    launched = "WORLD_SIZE" in os.environ
    with ar.init_master_worker(workers=None if launched else 2) as mw:
        digits = load_digits()
        x, y = torch.tensor(digits.images).float().flatten(1) / 16, torch.tensor(digits.target)
        rates = [10.0**exponent for exponent in (-4, -3, -2, -1.5, -1, -0.5, 0, 1)]
        trials = [Trial(f"worker:{mw.ranks[i % len(mw.ranks)]}", rate, x, y) for i, rate in enumerate(rates)]
        while len(trials) > 1:
            losses = [trial.train(args.steps) for trial in trials]  # all trainings are queued before the first wait
            found = sorted(zip([loss.item() for loss in losses], trials, strict=True), key=lambda pair: pair[0])
            print("  ".join(f"{trial.lr:.2g}: {loss:.3f}" for loss, trial in found))
            trials = [trial for _, trial in found[: len(found) // 2]]
        print(f"best learning rate: {trials[0].lr:.2g}")


if __name__ == "__main__":
    main()
