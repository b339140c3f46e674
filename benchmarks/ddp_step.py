"""Measure a training step: allranks's DistributedDataParallel against torch's on gloo.

    allranks run -n 2 benchmarks/ddp_step.py --json out/ddp_step.json

All contenders run in the same processes, one step each in turn, because timings on a shared machine drift by more than
the measured difference. Medians are compared. A step is forward, backward and SGD update of an MLP with 10 M
parameters; its time is that of the slowest rank. The floor is the same step without synchronization. Before timing,
the benchmark compares the gradients of all contenders.
"""

import argparse
import copy
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as torch_dist
from rich.console import Console
from rich.table import Table
from torch import nn

import allranks as dist
from allranks.nn.parallel import DistributedDataParallel

WIDTHS = (1024, 2048, 2048, 1664, 256)


def mlp():
    layers = []
    for n_in, n_out in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def init_torch(rank, world_size):
    """Create a gloo group in addition to the allranks world, on an automatically chosen port."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1").partition(":")[0]
    if address in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch_dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([store.port if store else 0])
    dist.broadcast(port, 0)
    store = store or torch_dist.TCPStore(address, int(port), is_master=False)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def step(model, optimizer, data, target):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(data), target).backward()
    optimizer.step()


def require_same_gradients(models, data, target):
    """Require equal gradients of all contenders except the floor."""
    gradients = {}
    for name, model in models.items():
        model.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    reference = gradients["torch"]
    for name, gradient in gradients.items():
        if name != "no sync" and not torch.allclose(gradient, reference, rtol=1e-4, atol=1e-7):
            raise SystemExit(f"the gradients of {name} and torch differ")


def measure(models, steps, data, target):
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    seconds = {name: [] for name in models}
    names = list(models)
    for i in range(-5, steps):
        # Rotate the order, because the position in a round influences the state of the caches.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            step(models[name], optimizers[name], data, target)
            elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if i >= 0:  # earlier rounds warm up
                seconds[name].append(elapsed.item())
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    init_torch(rank, world_size)
    torch.manual_seed(0)
    model = mlp()
    theirs = nn.parallel.DistributedDataParallel
    models = {
        "no sync": copy.deepcopy(model),
        "allranks": DistributedDataParallel(copy.deepcopy(model)),
        "allranks, views": DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True),
        "torch": theirs(copy.deepcopy(model)),
        "torch, views": theirs(copy.deepcopy(model), gradient_as_bucket_view=True),
    }
    torch.manual_seed(1 + rank)
    data, target = torch.randn(args.batch_size, WIDTHS[0]), torch.randn(args.batch_size, WIDTHS[-1])
    require_same_gradients(models, data, target)
    seconds = measure(models, args.steps, data, target)
    torch_dist.destroy_process_group()
    dist.destroy_process_group()
    if rank > 0:
        return

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    floor, ratio = medians["no sync"], medians["torch"] / medians["allranks"]
    parameters = sum(p.numel() for p in model.parameters())
    table = Table("DDP", "step, ms", "quartiles", "of it sync", "against torch")
    result = {}
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        result[name] = {"median_s": medians[name], "quartile_1_s": low, "quartile_3_s": high, "steps": len(values)}
        sync, relative = medians[name] - floor, medians["torch"] / medians[name]
        spread = f"{low * 1e3:.1f} to {high * 1e3:.1f}"
        table.add_row(name, f"{medians[name] * 1e3:.1f}", spread, f"{sync * 1e3:.1f}", f"{relative:.2f} x")
    Console().print(table)
    print(
        f"{parameters / 1e6:.1f} M parameters, {world_size} ranks, batch {args.batch_size} each, {args.threads} thread"
    )
    print(f"a step with allranks is {ratio:.2f} times as fast as with torch on gloo (medians)")
    if args.json:
        setup = {"ranks": world_size, "parameters": parameters, "batch_per_rank": args.batch_size}
        host = {"cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {**setup, "threads": args.threads, **host, "torch_over_allranks": ratio, "contenders": result}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
