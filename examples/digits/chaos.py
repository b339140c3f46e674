"""Kill ranks at random while they train on the digits, and plot the loss and the kills.

    python examples/digits/chaos.py                     # 3 ranks, 20 epochs, about one second between kills
    python examples/digits/chaos.py --seed 5 --plot out/digits/chaos.png

The program runs ``allranks run -n 3 --elastic 1`` on itself. The plot shows the loss over time, with a mark at each
death of a rank and at each start of a replacement process. At the end the program prints the fingerprint of the
weights. It is the same with every seed, and without any kill (``--every 0``).
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader
from train import LeNet, fingerprint, load_data

import allranks as dist
from allranks.data import DistributedSampler
from allranks.nn.parallel import DistributedDataParallel

RANKS = 3


def note(folder, **facts):
    """Add a line to the record of this process."""
    with open(folder / f"{os.getpid()}.jsonl", "a") as file:
        place = {"at": time.monotonic(), "pid": os.getpid(), "rank": int(os.environ["RANK"])}
        file.write(json.dumps(place | facts) + "\n")


def train(folder, epochs):
    torch.set_num_threads(1)
    note(folder, what="start")
    dist.init_process_group(timeout=60)
    torch.manual_seed(0)
    data, _ = load_data(torch.float32)
    model = LeNet()
    forward = DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.85)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=21, sampler=sampler, drop_last=True)
    state = dist.resilience.State(model=model, optimizer=optimizer)
    for epoch in state.epochs(epochs):
        sampler.set_epoch(epoch)
        for step in state.steps(loader):
            with step:
                images, labels = step.batch
                optimizer.zero_grad()
                loss = F.nll_loss(forward(images), labels)
                loss.backward()
                optimizer.step()
                time.sleep(0.01)  # gives the parent time to kill a rank
            if step.committed:
                note(folder, what="step", step=state.steps_done, loss=loss.item())
    note(folder, what="end", weights=fingerprint(model), lost=state.lost)


def newest(folder):
    """Return the most recently started process of each rank."""
    return {each["rank"]: each["pid"] for each in read(folder) if each["what"] == "start"}


def all_train(folder, dead):
    """Return whether a live process of each rank has finished a step."""
    stepped = {each["pid"] for each in read(folder) if each["what"] == "step"} - dead
    return all(pid in stepped for pid in newest(folder).values())


def read(folder):
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(map(json.loads, lines), key=lambda each: each["at"])


def draw(notes, kills, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [each for each in notes if each["what"] == "step"]
    began = steps[0]["at"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 4.6), layout="constrained", sharex=True, height_ratios=(1, 3)
    )
    for rank in range(RANKS):
        mine, colour = [each for each in steps if each["rank"] == rank], f"C{rank}"
        below.plot([e["at"] - began for e in mine], [e["loss"] for e in mine], ".", ms=2, color=colour, alpha=0.5)
        trains_since = 0
        for at in [at for at, killed in kills if killed == rank]:
            above.plot([trains_since, at - began], [rank, rank], color=colour, lw=3)
            above.plot(at - began, rank, "x", color="black", ms=7)
            trains_since = next((each["at"] - began for each in mine if each["at"] > at), None)
            if trains_since is None:
                break
            above.plot(trains_since, rank, "o", color=colour, ms=6, mfc="white", zorder=3)
        if trains_since is not None:
            above.plot([trains_since, mine[-1]["at"] - began], [rank, rank], color=colour, lw=3, zorder=1)
    ends = [each for each in notes if each["what"] == "end"]
    above.plot([], [], "x", color="black", label="killed")
    above.plot([], [], "o", color="gray", mfc="white", label="another process in its place has done a step")
    above.set(ylim=(RANKS - 0.5, -0.5), yticks=range(RANKS), yticklabels=[f"rank {rank}" for rank in range(RANKS)])
    above.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    above.set_title(f"{len(kills)} kills, weights {ends[0]['weights'] if ends else 'none: the job failed'}", loc="left")
    below.set(xlabel="seconds", ylabel="loss of the rank's batch", yscale="log")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="seconds until the next kill, on average; 0: none")
    parser.add_argument("--kills", type=int, default=-1, help="most kills; -1: no limit")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    parser.add_argument("--plot", type=Path, default=Path("out/digits/chaos.png"))
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.epochs)
        return
    pick, kills, dead = random.Random(args.seed), [], set()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        words = ["-n", str(RANKS), "--elastic", "1", "--respawns", "1000", "--restarts", "3", __file__]
        options = ["--train", name, "--epochs", str(args.epochs)]
        job = subprocess.Popen([sys.executable, "-m", "allranks", "run", *words, *options])
        while job.poll() is None and not any(each["what"] == "step" for each in read(folder)):
            time.sleep(0.05)
        while args.every and len(kills) != args.kills and job.poll() is None:
            # one kill at a time, because one process with the training state must survive
            if not all_train(folder, dead):
                time.sleep(0.05)
                continue
            time.sleep(pick.expovariate(1 / args.every))
            rank, pid = pick.choice(sorted(newest(folder).items()))
            with contextlib.suppress(ProcessLookupError):  # the dead process has not been replaced yet
                os.kill(pid, signal.SIGKILL)
                kills.append((time.monotonic(), rank))
                dead.add(pid)
        code = job.wait()
        notes = read(folder)
    draw(notes, kills, args.plot)
    ends = {each["weights"] for each in notes if each["what"] == "end"}
    print(f"{len(kills)} ranks killed; weights {', '.join(sorted(ends)) or 'none'}; what happened is in {args.plot}")
    sys.exit(code)


if __name__ == "__main__":
    main()
