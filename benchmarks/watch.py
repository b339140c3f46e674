"""Measures the cost of the watcher on torch's gloo: ``python benchmarks/watch.py --json benchmarks/watch.json``.

Two ranks run with and without ALLRANKS_WATCH, in turn. Each run measures an all_reduce of 16 bytes, and a step of
DistributedDataParallel with a small model. A watched run has the Flight Recorder, the record of messages, and the
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 12
ROWS = (
    "all_reduce of 16 bytes, 2 ranks",
    "a step of DistributedDataParallel, 2 ranks",
    "CPU time of an all_reduce in a group of one rank",
)
CALLS = 2000
STEPS = 100


def rank_main() -> None:
    """Measure in one rank. Rank 0 prints the medians in microseconds."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    small = torch.ones(4)
    batch = torch.randn(256, 784)
    layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    found = [_median_us(lambda: dist.all_reduce(small), CALLS), _median_us(step, STEPS)]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    began, count = time.process_time(), 5 * CALLS
    for _ in range(count):
        dist.all_reduce(small, group=alone)
    found.append((time.process_time() - began) / count * 1e6)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    # In some runs, torch 2.13 deadlocks here: the reducer's destructor holds the GIL while it joins gloo's thread, which
    # waits for the GIL.
    os._exit(0)


def _median_us(call: object, count: int) -> float:
    for _ in range(count // 10):
        call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {"0": [], "1": []}
    for number in range(2 * args.runs):
        # Each pair in another order, so that neither side always runs first.
        watch = "01"[(number + number // 2) % 2]
        environ = os.environ | {"ALLRANKS_WATCH": watch, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "allranks", "run", "-n", "2", "--show", "0", __file__]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        found[watch].append(json.loads(done.stdout.splitlines()[-1].partition("] ")[2] or done.stdout))
        print(watch, found[watch][-1], flush=True)
    rows = {}
    for place, name in enumerate(ROWS):
        plain, watched = (statistics.median(run[place] for run in found[side]) for side in "01")
        ratios = [b[place] / a[place] for a, b in zip(found["0"], found["1"], strict=True)]
        rows[name] = {"plain_us": plain, "watched_us": watched, "ratio": statistics.median(ratios)}
        print(f"{name}: {plain:.1f} us, watched {watched:.1f} us, median ratio {rows[name]['ratio']:.4f}")
    Path(args.json).write_text(json.dumps({"runs": args.runs, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        main()
