"""Train a small LeNet on scikit-learn's handwritten digits, data-parallel.

    allranks run -n 2 examples/digits/train.py
    allranks run -n 2 --elastic 1 examples/digits/train.py       # survives kill -9 of its ranks
    allranks run -n 2 --restarts 3 examples/digits/train.py --checkpoints out/digits/checkpoints
                                                                 # survives the death of all ranks
    allranks run -n 2 examples/digits/train.py --sync manual     # explicit calls instead of DDP
    python examples/digits/train.py                              # one process
    python examples/digits/train.py --init-method tcp://127.0.0.1:29511 --world-size 2 --rank 0
                                                                 # and --rank 1 in another shell

Every rank processes its part of each *global* batch and the gradients are averaged, so the result does not depend on
the number of ranks (except for rounding: compare with ``--dtype float64``). Two equal runs give the same weights to
the last bit: the last line shows a fingerprint of them. With ``--checkpoints``, an interrupted run continues exactly
where it stopped.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import allranks as dist
from allranks import checkpoint
from allranks.data import DistributedSampler
from allranks.nn.parallel import DistributedDataParallel


class WrongArguments(Exception):
    """Raised for arguments that the program cannot use; shown as one line."""


class LeNet(nn.Module):
    """LeNet-5 for images of 8 x 8 pixels; returns log-probabilities of the ten digits.

    It has no dropout and no batch normalization. With either, the result would depend on how the ranks split a batch.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load_data(dtype):
    """Return 1437 training images and 360 test images, the same on every rank and in every run."""
    digits = load_digits()
    split = train_test_split(digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    mean, std = train_x.mean(), train_x.std()
    train_x, test_x = (((x - mean) / std).to(dtype).unsqueeze(1) for x in (train_x, test_x))
    return TensorDataset(train_x, train_y.long()), TensorDataset(test_x, test_y.long())


def sync_initial_weights(model, rank, world_size):
    """Send rank 0's weights to all other ranks. (DistributedDataParallel does this in its constructor.)"""
    for param in model.parameters():
        if rank == 0:
            for sibling in range(1, world_size):
                dist.send(param.data, dst=sibling)
        else:
            dist.recv(param.data, src=0)


def sync_gradients(model, rank, world_size):
    """Average the gradients over all ranks. (DistributedDataParallel does this inside ``backward()``.)"""
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM)
        # Each rank's loss is the mean over its own part of the batch. The gradient of the mean over the whole batch is
        # the mean of the ranks' gradients. Their sum would act like a learning rate that is world_size times as high,
        # so the result would depend on the number of ranks.
        param.grad.data /= world_size


def evaluate(model, dataset, rank, world_size):
    """Return mean loss and accuracy. Each rank evaluates its share, and each image counts exactly once."""
    # DistributedSampler is unsuitable: it repeats images if the number of ranks does not divide the number of images.
    images, labels = dataset[rank::world_size]
    model.eval()
    with torch.no_grad():
        output = model(images)
        loss = F.nll_loss(output, labels, reduction="sum")
    model.train()
    correct = (output.argmax(1) == labels).sum()
    total = torch.tensor([loss.item(), correct.item(), len(labels)], dtype=torch.float64)
    dist.all_reduce(total)
    loss, correct, count = total.tolist()
    return loss / count, correct / count


def fingerprint(model):
    """Return a fingerprint that is the same for equal weights and differs if any bit differs."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def plot(history, title, path):
    """Plot the loss on the left and the accuracy on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    epochs = range(1, len(history) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title)
    left.plot(epochs, [h["train_loss"] for h in history], "o-", ms=3, label="training")
    left.plot(epochs, [h["test_loss"] for h in history], "o-", ms=3, label="test")
    left.set(ylabel="negative log-likelihood", yscale="log")
    left.legend(frameon=False)
    right.plot(epochs, [h["test_accuracy"] for h in history], "o-", ms=3, color="C1", label="test")
    right.set(ylabel="test accuracy", ylim=(None, 1.0 + 0.002))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        axes.set(xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def show(progress, bar, **what):
    """Show one progress bar on the current rank 0, and none if the output is not a terminal (a file, a pipe)."""
    if dist.get_rank() == 0 and progress.console.is_terminal:
        progress.disable = False
        progress.start()
        progress.update(bar, **what)


def train(args, rank, world_size):
    # Different weights on each rank, so that the first synchronization is needed to make them equal.
    torch.manual_seed(args.seed + rank)
    dtype = getattr(torch, args.dtype)
    train_set, test_set = load_data(dtype)
    model = LeNet().to(dtype)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    # Settings that must be equal to continue exactly with --checkpoints. The world size can differ; it affects
    # rounding.
    settings = {name: getattr(args, name) for name in ("batch_size", "lr", "momentum", "seed", "dtype")}

    if args.sync == "ddp":
        forward = DistributedDataParallel(model)
    else:
        forward = model
        sync_initial_weights(model, rank, world_size)

    # Batch k of all ranks together is elements [k * B, (k + 1) * B) of the epoch's permutation, for any number of
    # ranks. drop_last omits 29 of 1437 images, different ones in each epoch: another number of ranks would split a
    # smaller last batch differently.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler, drop_last=True)

    # With allranks run --elastic, a dead rank is replaced, and the step in which it died is repeated. If all ranks are
    # lost, the next run continues from the newest checkpoint. Its random numbers are those of the sampler and of the
    # steps, which depend on seed, epoch and step. Each rank has a separate sum of losses; the record is the same on
    # all ranks.
    loss_sum, record = torch.zeros(1, dtype=torch.float64), {"history": [], "settings": settings}
    kept = None
    if args.checkpoints:
        kept = dist.resilience.Checkpoints(args.checkpoints, every=args.save_every * (len(loader) + 1))
    state = dist.resilience.State(model=model, optimizer=optimizer, record=record, own=[loss_sum], checkpoints=kept)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=True) as progress:
        bar = progress.add_task("training", total=args.epochs * len(loader))
        for epoch in state.epochs(args.epochs):
            if record["settings"] != settings:
                differ = [f"{k} {v}, not {settings[k]}" for k, v in record["settings"].items() if v != settings[k]]
                raise WrongArguments(f"--checkpoints: {args.checkpoints} was written with {'; '.join(differ)}")
            sampler.set_epoch(epoch)
            for step in state.steps(loader):
                with step:
                    data, target = step.batch
                    optimizer.zero_grad()
                    loss = F.nll_loss(forward(data), target)
                    loss.backward()
                    if args.sync == "manual":
                        sync_gradients(model, dist.get_rank(), dist.get_world_size())
                    loss_sum += loss.detach()
                    optimizer.step()
                show(progress, bar, completed=epoch * len(loader) + step.index + 1)
            for step in state.steps(1):
                with step:
                    mean = loss_sum / len(loader)
                    loss_sum.zero_()
                    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                    test_loss, test_accuracy = evaluate(model, test_set, dist.get_rank(), dist.get_world_size())
                    found = {"train_loss": mean.item(), "test_loss": test_loss, "test_accuracy": test_accuracy}
                    record["history"] = [*record["history"], found]
            # from the record, because this process may have joined later
            accuracy = record["history"][-1]["test_accuracy"]
            show(progress, bar, description=f"epoch {epoch + 1}, test accuracy {accuracy:.1%}")
    return model, record


def positive(kind):
    def parse(text):
        if kind(text) <= 0:
            raise ValueError
        return kind(text)

    parse.__name__ = f"positive {kind.__name__}"
    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=positive(int), default=20)
    parser.add_argument("--batch-size", type=positive(int), default=64, help="total batch size of all ranks")
    parser.add_argument("--lr", type=positive(float), default=0.05)
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--sync", choices=["ddp", "manual"], default="ddp", help="how the gradients are averaged")
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="folder for model.pt and plot")
    parser.add_argument("--plot", type=Path, help="PNG of the curves (default: OUT/curves.png)")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="write checkpoints to this folder, and continue from the newest one"
    )
    parser.add_argument("--save-every", type=positive(int), default=5, metavar="EPOCHS", help="with --checkpoints")
    parser.add_argument("--backend", help="the engine (default: native)")
    parser.add_argument(
        "--threads", type=positive(int), default=1, help="threads per rank; the model is too small for more than one"
    )
    parser.add_argument("--init-method", help="without a launcher: tcp://HOST:PORT or file:///PATH")
    parser.add_argument("--world-size", type=int, default=-1, help="without a launcher: number of ranks")
    parser.add_argument("--rank", type=int, default=-1, help="without a launcher: this rank")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    try:
        dist.init_process_group(args.backend, args.init_method, world_size=args.world_size, rank=args.rank)
    except ValueError as error:
        parser.error(str(error))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        if args.batch_size % world_size:
            raise WrongArguments(f"--batch-size {args.batch_size} cannot be divided among {world_size} ranks")
        start, communicated = time.perf_counter(), dist.stats().seconds
        model, record = train(args, rank, world_size)
        rank, world_size = dist.get_rank(), dist.get_world_size()  # they change if a rank was lost permanently
        seconds = time.perf_counter() - start
        share = (dist.stats().seconds - communicated) / seconds
    except WrongArguments as error:
        parser.error(str(error))
    finally:
        dist.destroy_process_group()

    if rank == 0:
        history = record["history"]
        saved_to = args.out / "model.pt"
        args.out.mkdir(parents=True, exist_ok=True)
        checkpoint.save({"model": model.state_dict(), **record}, saved_to)
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        accuracy = f"test accuracy {history[-1]['test_accuracy']:.2%}"
        picture = args.plot or args.out / "curves.png"
        plot(history, f"LeNet on 8 x 8 digits, {ranks}: {accuracy}", picture)
        print(f"model in {saved_to}, curves in {picture}")
        print(f"{accuracy}, {ranks}, {seconds:.1f} s, {share:.1%} of it communicating, weights {fingerprint(model)}")


if __name__ == "__main__":
    main()
