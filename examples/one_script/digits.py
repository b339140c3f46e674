"""Train a small LeNet on scikit-learn's handwritten digits, data-parallel, from one script that drives all workers.

    python examples/one_script/digits.py                            # starts two workers
    allranks run --mode master -n 3 examples/one_script/digits.py   # the launcher starts them, also on other hosts

The network is on all workers, under one handle. Each worker processes its part of every batch, and the gradients are
averaged. The script does not wait for the workers until it requests the results of an epoch. examples/digits/train.py
is the same training with a program on each rank.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import allranks as ar


def lenet():
    """Return LeNet-5 for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def load_data():
    """Return 1437 training images and 360 test images."""
    digits = load_digits()
    split = train_test_split(digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    mean, std = train_x.mean(), train_x.std()
    train_x, test_x = (((x - mean) / std).float().unsqueeze(1) for x in (train_x, test_x))
    return train_x, train_y, test_x, test_y


def train(workers, epochs, progress):
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = load_data()
    first = workers.ranks[0]
    with workers:
        net = lenet()
    ar.broadcast_(net.parameters(), src=first)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.85, fused=True)

    @ar.capture  # a step is recorded and verified; afterwards one message of a few bytes replays it
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        ar.all_reduce_([parameter.grad for parameter in net.parameters()], op="avg")
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    test_x, test_y = test_x.to(workers.device), test_y.to(workers.device)
    batch_size = 64 // len(workers) * len(workers)  # each worker receives an equal part
    bar = progress.add_task("training", total=epochs)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(train_x)).split(batch_size)[:-1]:  # omits the last batch, which may be smaller
            losses.append(step(workers.scatter(train_x[batch]), workers.scatter(train_y[batch])))
        loss = workers.gather(torch.stack(losses)).mean().item()
        with torch.no_grad():
            right = net(test_x).argmax(1) == test_y
        accuracy = right.float().mean().shard(first).item()
        progress.update(bar, advance=1, description=f"epoch {epoch + 1}, loss {loss:.4f}, test accuracy {accuracy:.1%}")
    return loss, accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="workers to start if no launcher has started them")
    args = parser.parse_args()
    if min(args.epochs, args.workers) < 1:
        parser.error("--epochs and --workers are at least 1")
    with ar.init_master_worker(workers=None if "RANK" in os.environ else args.workers) as mw:
        console, start = Console(stderr=True), time.perf_counter()
        with Progress(console=console, disable=not console.is_terminal) as progress:
            loss, accuracy = train(mw.group(mw.ranks), args.epochs, progress)
        seconds = time.perf_counter() - start
        print(f"test accuracy {accuracy:.2%}, loss {loss:.4f}, {len(mw.ranks)} workers, {seconds:.1f} s")


if __name__ == "__main__":
    main()
