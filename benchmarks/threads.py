"""More ranks and compute threads than CPUs: the rounds of computing and reducing per second.

    make mpi
    build/bench-venv/bin/python benchmarks/threads.py --json benchmarks/threads.json

A round is 20 matrix products and an all_reduce of 1 KB. Each rank computes with --threads threads of OpenMP. A CPU
that a waiting rank occupies is not available to a computing thread. allranks, allranks through torch.distributed, gloo
and Open MPI run in the same processes, one block each in turn. The time of a block is that of its slowest rank. The
figures are medians of the blocks. Open MPI is started twice, with and without `mpi_yield_when_idle`; each ratio
belongs to one of the starts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("allranks", "through torch", "gloo", "mpi", "no all_reduce")
NUMBERS = 256
BLOCK_S = 0.2
_FOUND = "FOUND "


def rank_main(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as torch_dist
    from mpi4py import MPI

    import allranks as dist

    threads, blocks, products, width = int(given.threads), given.blocks, given.products, given.width
    torch.set_num_threads(threads)
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    ports = os.environ["BENCH_PORTS"].split(",")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    os.environ["MASTER_PORT"] = ports[0]
    torch_dist.init_process_group("gloo", rank=rank, world_size=size)
    ours_of_torch = torch_dist.new_group(backend="allranks")
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=size)
    a, b = torch.randn(width, width), torch.randn(width, width)
    x = torch.zeros(NUMBERS)
    plain = x.numpy()
    contenders: dict[str, Callable[[], Any]] = {
        "allranks": lambda: dist.all_reduce(x),
        "through torch": lambda: torch_dist.all_reduce(x, group=ours_of_torch),
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
        print(_FOUND + json.dumps({name: 1 / statistics.median(each) for name, each in seconds.items()}), flush=True)
    world.Barrier()
    dist.destroy_process_group()
    torch_dist.destroy_process_group()


def cell(given: argparse.Namespace, ranks: int, threads: int, yields: bool) -> dict[str, float]:
    """Return the rounds per second of each contender."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = f"{first.getsockname()[1]},{second.getsockname()[1]}"
    environ = os.environ | {
        "OMP_NUM_THREADS": str(threads), "OMPI_MCA_mpi_yield_when_idle": str(int(yields)), "BENCH_PORTS": ports,
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "ALLRANKS_SECRET": os.urandom(16).hex(),
    }  # fmt: skip
    mpirun = [Path(sys.executable).with_name("mpirun"), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    program = [sys.executable, "-W", "ignore", __file__, "--rank", "--threads", str(threads)]
    sizes = ["--blocks", str(given.blocks), "--products", str(given.products), "--width", str(given.width)]
    done = subprocess.run(
        [*mpirun, "-n", str(ranks), *program, *sizes], env=environ, text=True, capture_output=True, timeout=900
    )
    for line in done.stdout.splitlines():
        if line.startswith(_FOUND):
            return dict(json.loads(line.removeprefix(_FOUND)))
    raise SystemExit(f"{ranks} ranks, {threads} threads: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--threads", default="1,2,4", help="threads of each rank")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--products", type=int, default=20, help="products in each round")
    parser.add_argument("--width", type=int, default=64, help="width of the matrices")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given)
        return
    cells: list[dict[str, Any]] = []
    print(
        "rounds a second       "
        + "".join(f"{name:>14}" for name in [*NAMES, "mpi, yields"])
        + "   to gloo, mpi, mpi, yields"
    )
    for ranks in map(int, given.ranks.split(",")):
        for threads in map(int, given.threads.split(",")):
            plain, yielding = (cell(given, ranks, threads, yields) for yields in (False, True))
            ratios = {
                "gloo": statistics.mean(each["through torch"] / each["gloo"] for each in (plain, yielding)),
                "mpi": plain["allranks"] / plain["mpi"],
                "mpi, yields": yielding["allranks"] / yielding["mpi"],
            }
            cells.append({"ranks": ranks, "threads": threads, "plain": plain, "yields": yielding, "ratios": ratios})
            row = "".join(f"{value:14.0f}" for value in [*(plain[name] for name in NAMES), yielding["mpi"]])
            print(
                f"{ranks} ranks x {threads} threads{row}   " + ", ".join(f"{value:.2f}" for value in ratios.values()),
                flush=True,
            )
    if given.json:
        found = {"products": given.products, "width": given.width, "cells": cells}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
