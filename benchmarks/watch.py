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
    "all_reduce of one rank, which sends nothing: the calls alone",
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
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    # In some runs, torch 2.13 deadlocks here: the reducer's destructor holds the GIL and joins gloo's thread, which
    # waits for the GIL.
    os._exit(0)


def alone_main() -> None:
    """Measure an all_reduce of one rank, which sends nothing, on one CPU."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    small = torch.ones(4)
    blocks = []
    for _ in range(40):
        began = time.perf_counter()
        for _ in range(300):
            dist.all_reduce(small)
        blocks.append((time.perf_counter() - began) / 300 * 1e6)
    print(json.dumps([statistics.median(blocks)]), flush=True)
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


def _alternate(command: list[str], runs: int, variable: str, on: str) -> list[list[tuple[float, float]]]:
    """Run a command with a variable off and on, in turn. Return the pairs of each figure that it prints."""
    found: dict[str, list[list[float]]] = {"0": [], on: []}
    for number in range(2 * runs):
        # Each pair in another order, so that neither side always runs first.
        value = ("0", on)[(number + number // 2) % 2]
        environ = os.environ | {variable: value, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        found[value].append(json.loads(done.stdout.splitlines()[-1].removeprefix("[0] ")))
        print(variable, value, found[value][-1], flush=True)
    return [list(zip(*each, strict=True)) for each in zip(*map(_columns, found.values()), strict=True)]


def _columns(rows: list[list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    if args.alone:
        alone_main()
    here = [sys.executable, __file__]
    job = [sys.executable, "-m", "allranks", "run", "-n", "2", "--show", "0", __file__]
    both = _alternate(job, args.runs, "ALLRANKS_WATCH", "1")
    one = _alternate(["taskset", "-c", "1", *here, "--alone"], args.runs, "TORCH_FR_BUFFER_SIZE", "2000")
    rows = {}
    for name, pairs in zip(ROWS, [*both, *one], strict=True):
        plain, watched = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(b / a for a, b in pairs)
        rows[name] = {"plain_us": plain, "watched_us": watched, "ratio": ratio}
        print(f"{name}: {plain:.1f} us, watched {watched:.1f} us, median ratio {ratio:.4f}")
    Path(args.json).write_text(json.dumps({"runs": args.runs, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        main()
