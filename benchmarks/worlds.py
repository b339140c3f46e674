"""Cost of a world by its number of ranks, within one host: time of init_process_group, and memory.

    python benchmarks/worlds.py --json benchmarks/worlds.json

Each number of ranks is a job of `allranks run`. Each rank measures its private memory (Private_Dirty of
/proc/self/smaps_rollup) and its share of the memory that ranks map together (Pss_Shmem): after init, after small calls
and after large calls. The time of init is that of the slowest rank. A straight line through the logarithms gives the
exponents, from 4 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = (2, 4, 8, 16, 32, 64, 128, 192)
RUNS = 3
FROM = 4
SMALL, LARGE = 1, 1 << 18  # numbers of float32
MOMENTS = ("init", "4 B", "1 MB")
LIMIT_S = 600


def memory() -> dict[str, int]:
    found = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {"own": int(found["Private_Dirty"].split()[0]) << 10, "shared": int(found["Pss_Shmem"].split()[0]) << 10}


def rank(folder: Path) -> None:
    import torch

    import allranks as dist

    torch.set_num_threads(1)
    before = memory()
    began = time.monotonic()
    dist.init_process_group()
    report: dict[str, object] = {"init_s": time.monotonic() - began}
    for moment, numbers in zip(MOMENTS, (0, SMALL, LARGE), strict=True):
        tensor = torch.ones(numbers)
        for _ in range(3 if numbers else 0):
            tensor.fill_(1)
            dist.all_reduce(tensor)
            assert tensor[-1] == dist.get_world_size()
        dist.barrier()
        now = memory()
        dist.barrier()
        report[moment] = {
            "own": now["own"] - before["own"] - tensor.nbytes,
            "shared": now["shared"] - before["shared"],
        }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def measure(ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "allranks", "run", "-q", "-n", ranks, __file__, "--folder", folder]
        began = time.monotonic()
        subprocess.run([sys.executable, *map(str, words)], check=True, timeout=LIMIT_S)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
        assert len(found) == ranks
        values = {"job_s": time.monotonic() - began, "init_s": max(each["init_s"] for each in found)}
        for moment in MOMENTS:
            values[f"own, {moment}"] = statistics.median(each[moment]["own"] for each in found)
            values[f"shared, {moment}"] = sum(each[moment]["shared"] for each in found)
        return values


def exponent(rows: list[dict[str, float]], name: str) -> float:
    points = [(math.log(row["ranks"]), math.log(max(row[name], 1e-9))) for row in rows if row["ranks"] >= FROM]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=RANKS)
    args = parser.parse_args()
    if args.folder is not None:
        rank(args.folder)
        return
    from allranks._cluster.host import processor, usable_cpus

    rows = []
    for ranks in args.ranks:
        runs = [measure(ranks) for _ in range(RUNS if ranks <= 64 else 1)]
        row = {"ranks": ranks, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}
        rows.append(row)
        print({name: round(value, 3) for name, value in row.items()}, flush=True)
    exponents = {name: exponent(rows, name) for name in rows[0] if name != "ranks"}
    print({name: round(value, 2) for name, value in exponents.items()})
    if args.json is not None:
        found = {"processor": processor(), "cpus": usable_cpus(), "from": FROM, "rows": rows, "exponents": exponents}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
