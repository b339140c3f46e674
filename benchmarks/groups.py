"""Cost of many groups within one host: creation time, memory, descriptors.

    python benchmarks/groups.py --json benchmarks/groups.json

For each case the ranks create a number of groups of all ranks, and then call all_reduce several times on each, so that
all resources of a group exist. Memory is the sum over all ranks of the growth of private memory and of the rank's
share of shared memory (Pss of /proc/PID/smaps_rollup).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import allranks as dist
from allranks._cluster.host import processor, usable_cpus
from allranks.testing import run_ranks

CASES = [  # ranks, groups, numbers in each all_reduce
    (4, 1000, 1),
    (16, 1000, 1),
    (16, 1000, 256),
    (16, 50, 1 << 18),
]
CALLS = 10
LIMIT_S = 900


def memory() -> dict[str, int]:
    """Return the bytes of this process's private memory, and of its share of shared memory."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {name: int(found[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem")}


def rank(count: int, numbers: int) -> dict[str, float]:
    torch.set_num_threads(1)
    everybody = list(range(dist.get_world_size()))
    tensor = torch.ones(numbers)
    dist.all_reduce(tensor)
    dist.barrier()
    before, descriptors = memory(), len(os.listdir("/proc/self/fd"))
    began = time.perf_counter()
    groups = [dist.new_group(everybody) for _ in range(count)]
    made_s = time.perf_counter() - began
    for group in groups:
        for _ in range(CALLS):
            tensor.fill_(1)
            dist.all_reduce(tensor, group=group)
            assert tensor[-1] == len(everybody)
    dist.barrier()
    after = memory()
    found = {name: after[name] - before[name] for name in after}
    dist.barrier()
    return {"made_s": made_s, "descriptors": len(os.listdir("/proc/self/fd")) - descriptors, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("ranks groups   all_reduce  ms per creation MiB in total KiB per group descriptors per rank")
    for ranks, count, numbers in CASES:
        found = run_ranks(ranks, rank, count, numbers, timeout_s=LIMIT_S)
        each_s = max(one["made_s"] for one in found) / count
        nbytes = sum(one["Pss_Anon"] + one["Pss_Shmem"] for one in found)
        descriptors = max(one["descriptors"] for one in found)
        print(
            f"{ranks:5} {count:6} {numbers * 4:10} B {each_s * 1e3:16.1f} {nbytes / 2**20:12.0f}"
            f" {nbytes / count / 1024:13.0f} {descriptors:20.0f}",
            flush=True,
        )
        row = {"ranks": ranks, "groups": count, "nbytes": numbers * 4, "each_s": each_s, "memory": nbytes}
        rows.append({**row, "descriptors": descriptors})
    if options.json:
        about = {"cpus": usable_cpus(), "processor": processor(), "calls": CALLS, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
