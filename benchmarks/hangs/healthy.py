"""Checks that healthy programs cause no report, and that longer pauses cause true ones.

    python benchmarks/hangs/healthy.py --json benchmarks/healthy.json

Each of several jobs of two ranks makes many pauses on one rank while the other rank waits: evaluation, computation,
writing a file, loading data, compiling source text. With a limit of 2 s, pauses take up to 1.8 s, the same share of the
limit as 9 s of 10 s. Then pauses of 3 s must be reported, with the rank that pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT_S = 2.0
LONGEST_S = 1.8
LONG_S = 3.0
LONG_PAUSES = 5


def rank_main(pauses: int, seed: int) -> None:
    """Make the pauses in one rank of a job."""
    import random
    import time

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(64)

    def evaluate(seconds: float) -> None:
        time.sleep(seconds)

    def compute(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.randn(64, 64) @ torch.randn(64, 64)

    def write(seconds: float) -> None:
        until = time.monotonic() + seconds
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < until:
                file.write(bytes(1 << 16))
                os.fsync(file.fileno())
                time.sleep(0.01)

    def load(seconds: float) -> None:
        for _ in DataLoader([1.0, 2.0], num_workers=1, worker_init_fn=lambda _: time.sleep(seconds * 0.8)):
            pass

    def compiles(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            compile("x = [" + "1, " * 10_000 + "]", "generated", "exec")

    choice = random.Random(seed)  # the same on both ranks
    for _ in range(pauses):
        late, pause = choice.randrange(2), choice.choice((evaluate, compute, write, load, compiles))
        seconds = choice.uniform(0.1, LONGEST_S)
        if rank == late:
            pause(seconds)
        dist.all_reduce(x)
        x.fill_(1)
    for number in range(LONG_PAUSES):
        if rank == number % 2:
            print(f"long pause of rank {rank}", flush=True)
            time.sleep(LONG_S)
        dist.all_reduce(x)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def job(seed: int, pauses: int) -> dict[str, int]:
    """Run one job. Return the numbers of false reports, and of right and missing reports of long pauses."""
    environ = os.environ | {"ALLRANKS_WATCH": "1", "ALLRANKS_NOTICE_AFTER": f"{LIMIT_S:g}s", "OMP_NUM_THREADS": "1"}
    command = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "--standalone",
        __file__,
        "--rank",
        str(pauses),
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, env=environ, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True)
    before, *parts = re.split(r"long pause of rank (\d)\n", done.stdout)
    false = len(re.findall("allranks watch: .* waited", before))
    right = wrong = 0
    for late, text in zip(parts[::2], parts[1::2], strict=True):
        reports = re.findall(r"allranks watch: .* waited .* for rank (\d)", text)
        right += reports == [late]
        wrong += any(each != late for each in reports)
    return {"false": false, "right": right, "wrong": wrong, "missing": LONG_PAUSES - right - wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--pauses", type=int, default=84)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.seed)
    with ThreadPoolExecutor(args.parallel) as pool:
        results = list(pool.map(lambda seed: job(seed, args.pauses), range(args.jobs)))
    total = {name: sum(result[name] for result in results) for name in results[0]}
    total |= {"pauses": args.jobs * args.pauses, "long_pauses": args.jobs * LONG_PAUSES}
    print(total)
    if args.json:
        Path(args.json).write_text(json.dumps(total, indent=1) + "\n")
    return 1 if total["false"] or total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
