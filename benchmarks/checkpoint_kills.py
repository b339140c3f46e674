"""Jobs that save, and are killed while they do: is the newest checkpoint that was announced there, to the last bit?

    python benchmarks/checkpoint_kills.py --seeds 0:200            # a kill per seed
    python benchmarks/checkpoint_kills.py --seeds 17:18 --verbose  # one again
    python benchmarks/checkpoint_kills.py --seeds 0:200 --apart    # each rank has a folder of its own

A seed decides who is killed (a rank, two, the launcher) and when, how large the state is, and whether saves go on in
the background. The job writes down each step that a save has announced; afterwards the newest complete checkpoint must
be of that step or a later one, and every byte of it right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
SIZES = (1_000, 300_000, 3_000_000)  # numbers in the state


def value(step: int, size: int) -> Any:
    """What the tensor of a step is."""
    import torch

    return torch.arange(size, dtype=torch.float32) * 0.5 + step


def work(folder: Path, size: int, background: bool, apart: bool) -> None:
    """What the ranks run: saves without end."""
    import torch

    import allranks as dist
    from allranks import checkpoint

    torch.set_num_threads(1)
    dist.init_process_group(timeout=20)
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    saved = folder / (f"saved-{rank}" if apart else "saved")
    tensors = {"x": value(0, size), "mine": torch.tensor(float(rank))}
    state = {"tensors": tensors, "step": 0}
    for step in range(1, 1_000_000):
        state["step"] = step
        tensors["x"] += 1
        tensors["mine"].fill_(step * 10 + rank)
        if background:
            saving = checkpoint.save_async(state, saved, step=step, keep=2)
            tensors["x"] *= 1  # the program goes on
            saving.wait()
        else:
            checkpoint.save(state, saved, step=step, keep=2)
        if rank == 0:
            with open(folder / "announced", "w") as file:
                file.write(f"{step} ")
                file.flush()


def run(seed: int, verbose: bool = False, apart: bool = False) -> str:
    """One job and one kill. What is wrong; "" for nothing."""
    from allranks import checkpoint

    pick = random.Random(seed)
    size, background = pick.choice(SIZES), pick.random() < 0.5
    victims = pick.choice(["0", "1", "both", "launcher"])
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        job = subprocess.Popen(
            [sys.executable, "-m", "allranks", "run", "-n", str(RANKS), __file__, "--work", name, str(size)]
            + (["--background"] if background else [])
            + (["--apart"] if apart else []),
            stdout=None if verbose else subprocess.DEVNULL,
            stderr=None if verbose else subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 60
        while len(list(folder.glob("pid-*"))) < RANKS and time.monotonic() < until and job.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05 + pick.random() * 0.7)
        pids = {path.name[4:]: int(path.read_text() or 0) for path in folder.glob("pid-*")}
        chosen = {"both": list(pids.values()), "launcher": [job.pid]}.get(victims) or [pids[victims]]
        if verbose:
            print(f"seed {seed}: {size} numbers, background: {background}, killed: {victims}")
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        job.wait(60)
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()) and time.monotonic() < until + 30:
            time.sleep(0.01)
        return judge_apart(folder, size) if apart else judge(folder, size, checkpoint)


def judge_apart(folder: Path, size: int) -> str:
    """Compares what the ranks find together with what was announced, by rank."""
    import warnings

    import allranks as dist
    from allranks import checkpoint
    from allranks.testing import run_ranks

    def body() -> str:
        warnings.simplefilter("ignore")
        own = folder / f"saved-{dist.get_rank()}"
        return judge(folder, size, checkpoint, own, dist.group.WORLD, dist.get_rank())

    return next((words for words in run_ranks(RANKS, body) if words), "")


def judge(folder: Path, size: int, checkpoint: Any, saved: Path | None = None, group: Any = None, rank: int = 0) -> str:
    """Compares what is there with what was announced."""
    import torch

    text = (folder / "announced").read_text() if (folder / "announced").exists() else ""
    announced = int(text.split()[0]) if text.split() else 0
    newest = checkpoint.latest(saved or folder / "saved", group=group)
    if newest is None:
        return f"step {announced} was announced, and there is none" if announced else ""
    if newest.step < announced:
        return f"step {announced} was announced, and the newest is {newest.step}"
    if problems := checkpoint.verify(newest):
        return str(problems)
    found = checkpoint.load(newest)
    right = found["step"] == newest.step and torch.equal(found["tensors"]["x"], value(newest.step, size))
    return (
        ""
        if right and found["tensors"]["mine"] == newest.step * 10 + rank
        else f"step {newest.step} is not what it was"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help="each rank has a folder of its own")
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Path(options.work[0]), int(options.work[1]), options.background, options.apart)
        return
    first, end = map(int, options.seeds.split(":"))
    wrong = {}
    for seed in range(first, end):
        if outcome := run(seed, options.verbose, options.apart):
            wrong[seed] = outcome
            print(f"seed {seed}: {outcome}", flush=True)
    print(f"{end - first} kills, {len(wrong)} wrong")
    if options.json:
        options.json.write_text(json.dumps({"kills": end - first, "wrong": wrong}, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
