"""Ranks whose compute threads, all together, are more than the CPUs: how many rounds of computing and reducing a second.

    make mpi
    $BENCH/bin/python benchmarks/threads.py --json benchmarks/threads.json

A round is 20 products of matrices of 192 x 192 and an all_reduce of 1 KB. Each rank computes with --threads threads of
OpenMP, as torch does in programs that mpirun or srun start: a CPU that a waiting rank keeps is missing to a thread that
computes. allranks, allranks through torch.distributed, gloo and Open MPI run in the same processes, one block each in
turn; a block counts as long as its slowest rank takes. Medians of the blocks. Open MPI is started twice, with and without
`mpi_yield_when_idle`; the better one of a cell counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

PRODUCTS = 20
WIDTH = 192
NUMBERS = 256
BLOCK_S = 0.2


def rank_main(threads: int, blocks: int, products: int) -> None:
    import torch
    import torch.distributed as torch_dist
    from mpi4py import MPI

    import allranks as dist

    torch.set_num_threads(threads)
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    port = world.bcast(os.environ["BENCH_PORT"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch_dist.init_process_group("cpu:gloo", rank=rank, world_size=size)
    ours_of_torch = torch_dist.new_group(backend="allranks")
    ours = dist.init_process_group(
        store=dist.PrefixStore("own", _store(dist, rank, int(port) + 1)), rank=rank, world_size=size
    )
    del ours
    a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    x = torch.zeros(NUMBERS)
    plain = x.numpy()
    contenders: dict[str, Callable[[], Any]] = {
        "allranks": lambda: dist.all_reduce(x),
        "allranks, torch.distributed": lambda: torch_dist.all_reduce(x, group=ours_of_torch),
        "gloo": lambda: torch_dist.all_reduce(x),
        "mpi": lambda: world.Allreduce(MPI.IN_PLACE, plain),
        "no all_reduce": lambda: None,
    }

    def block(reduce: Callable[[], Any], rounds: int) -> float:
        world.Barrier()
        began = time.perf_counter()
        for _ in range(rounds):
            for _ in range(products):
                torch.mm(a, b)
            reduce()
        return float(world.allreduce(time.perf_counter() - began, op=MPI.MAX))

    rounds = {}
    for name, reduce in contenders.items():
        block(reduce, 3)
        rounds[name] = int(world.bcast(max(3, min(5000, round(BLOCK_S / (block(reduce, 5) / 5))))))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(blocks):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(block(contenders[name], rounds[name]) / rounds[name])
    if rank == 0:
        print("FOUND " + json.dumps({name: 1 / statistics.median(each) for name, each in seconds.items()}), flush=True)
    world.Barrier()
    dist.destroy_process_group()
    torch_dist.destroy_process_group()


def _store(dist: Any, rank: int, port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0)


def cell(ranks: int, threads: int, yields: bool, blocks: int, products: int, port: int) -> dict[str, float]:
    environ = os.environ | {
        "OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": str(int(yields)), "BENCH_PORT": str(port),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "ALLRANKS_SECRET": "a" * 32,
    }  # fmt: skip
    mpirun = Path(sys.executable).with_name("mpirun")
    done = subprocess.run(
        [mpirun, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks), sys.executable, __file__, "--rank",
         "--threads", str(threads), "--blocks", str(blocks), "--products", str(products)],
        env=environ, text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return dict(json.loads(line[6:]))
    raise SystemExit(f"{ranks} ranks, {threads} threads: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--threads", default="1,2,4", help="of each rank")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--products", type=int, default=PRODUCTS, help="in each round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(int(given.threads), given.blocks, given.products)
        return
    import torch

    from allranks import __version__
    from allranks._cluster.host import processor, usable_cpus

    cells: list[dict[str, Any]] = []
    port = 29700
    print("rounds a second          allranks  torch.distributed     gloo   mpi  mpi, yields     gloo/  mpi/ (ratios)")
    for ranks in map(int, given.ranks.split(",")):
        for threads in map(int, given.threads.split(",")):
            found = []
            for yields in (False, True):
                found.append(cell(ranks, threads, yields, given.blocks, given.products, port))
                port += 2
            plain, yielding = found
            # Each launch is compared within itself.
            over_gloo = statistics.mean(each["allranks, torch.distributed"] / each["gloo"] for each in found)
            over_mpi = min(each["allranks"] / each["mpi"] for each in found)
            cells.append(
                {
                    "ranks": ranks,
                    "threads": threads,
                    "plain": plain,
                    "yields": yielding,
                    "over gloo": over_gloo,
                    "over mpi": over_mpi,
                }
            )
            print(
                f"{ranks} ranks x {threads} threads  {plain['allranks']:10.0f} {plain['allranks, torch.distributed']:10.0f}"
                f" {plain['gloo']:14.0f} {plain['mpi']:8.0f} {yielding['mpi']:8.0f} {plain['no all_reduce']:8.0f} {over_gloo:12.2f} {over_mpi:7.2f}",
                flush=True,
            )
    if given.json:
        about = {
            "version": __version__, "date": str(date.today()), "torch": torch.__version__, "python": platform.python_version(),
            "processor": processor(), "cpus": usable_cpus(), "products": given.products,
        }  # fmt: skip
        given.json.write_text(json.dumps({"about": about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
