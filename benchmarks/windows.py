"""Windows and messages: time per step in which every rank passes data to its right neighbor.

    python benchmarks/windows.py --json benchmarks/windows.json      # root, for the hosts

``put``: every rank puts into the window of its right neighbor, and waits for the signal of its left neighbor.
``send``: isend to the right, recv from the left, wait. Blocks of steps with both ways alternate. The figure is the
median of the blocks of the slowest rank. The received data is checked.

The hosts are network namespaces of this machine, with equal parts of its CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import allranks as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster import cluster, trouble  # noqa: E402

PLACES = (("1 host", 1, 2), ("1 host", 1, 8), ("2 hosts", 2, 2), ("2 hosts", 2, 8))  # name, hosts, ranks
SIZES = (8, 64 << 10, 1 << 20, 64 << 20)
BLOCKS = 9
BLOCK_S = 0.1


def rank_main() -> None:
    """Measure every size, the program of a rank. Rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group()
    rows = [measure(nbytes) for nbytes in SIZES]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rows)
    if dist.get_rank() == 0:
        print(json.dumps([max(row[way] for row in rows) for rows in zip(*found, strict=True) for way in rows[0]]))
    dist.destroy_process_group()


def measure(nbytes: int) -> dict[str, float]:
    """Return the seconds of a step of each way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    source = torch.full((nbytes,), rank, dtype=torch.uint8)
    inbox = dist.allocate_tensor(nbytes, torch.uint8)
    received = torch.empty_like(source)
    window = dist.new_window(inbox)

    def put() -> None:
        window.put(source, dst_rank=right, target_offset_nelems=0)
        window.wait_signal(left)

    def send() -> None:
        sent = dist.isend(source, right)
        dist.recv(received, left)
        sent.wait()

    ways: dict[str, Callable[[], None]] = {"put": put, "send": send}
    count = torch.tensor([max(steps_of(way) for way in ways.values())])
    dist.broadcast(count, 0)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(BLOCKS):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(int(count)):
                way()
            times[name].append((time.perf_counter() - begin) / int(count))
    dist.barrier()
    for data in (inbox, received):
        if not bool((data == left).all()):
            raise SystemExit(f"rank {rank} received wrong data of {nbytes} bytes")
    window.tensor_deregister()
    return {name: statistics.median(each) for name, each in times.items()}


def steps_of(way: Callable[[], None]) -> int:
    """Return how many steps last about BLOCK_S."""
    way()
    begin = time.perf_counter()
    for _ in range(3):
        way()
    return max(1, min(20_000, int(BLOCK_S * 3 / (time.perf_counter() - begin))))


def run(hosts: int, ranks: int) -> list[dict[str, float]]:
    """Run the program on this many hosts. Return the results by size."""
    if hosts == 1:
        command = [sys.executable, "-m", "allranks", "run", "-n", str(ranks), "--show", "0"]
        printed = subprocess.run([*command, __file__, "--rank"], check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        printed = run_on_hosts(hosts, ranks)
    figures = json.loads(printed.splitlines()[-1])
    return [{"put": figures[i], "send": figures[i + 1]} for i in range(0, len(figures), 2)]


def run_on_hosts(hosts: int, ranks: int) -> str:
    cpus = sorted(os.sched_getaffinity(0))
    with cluster(hosts) as made:
        environ = {
            **os.environ,
            "MASTER_ADDR": made.hosts[0].address,
            "MASTER_PORT": "29517",
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "ALLRANKS_SECRET": secrets.token_hex(32),
        }
        running = []
        for rank in range(ranks):
            host = rank * hosts // ranks
            command = ["taskset", "--cpu-list", str(cpus[host % len(cpus)]), sys.executable, __file__, "--rank"]
            running.append(
                subprocess.Popen(
                    made.hosts[host].inside(*command),
                    env={**environ, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        printed = [each.communicate(timeout=600)[0] for each in running]
    if any(each.returncode for each in running):
        sys.exit("a rank failed")
    return printed[0]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(words)
    if args.rank:
        rank_main()
        return
    if reason := trouble():
        sys.exit(f"this machine cannot create hosts: {reason}")
    rows = []
    for place, hosts, ranks in PLACES:
        for nbytes, row in zip(SIZES, run(hosts, ranks), strict=True):
            rows.append({"place": place, "ranks": ranks, "nbytes": nbytes, **row})
            print(
                f"{place}, {ranks} ranks, {nbytes:9} bytes: put {row['put'] * 1e6:10.1f} us, "
                f"send {row['send'] * 1e6:10.1f} us, {row['send'] / row['put']:.2f}x",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
