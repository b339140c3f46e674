"""Dask workers that form a process group and train in it, twice, with other tasks in between.

    python benchmarks/programs/dask_group.py --backend allranks

It needs the package `distributed`. With `--backend gloo` it must print the same output.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster


def train(rank, size, port, backend):
    """Train on one worker. The rank is an argument, because Dask does not assign ranks."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(30):
        x = torch.randn(64, 20, generator=draw)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: value.tolist() for name, value in model.module.state_dict().items()}
    dist.destroy_process_group()
    return rank, loss.item(), weights


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    backend = parser.parse_args().backend
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        workers = sorted(client.scheduler_info()["workers"])
        for turn in range(2):
            port = free_port()
            ranks = [
                client.submit(train, rank, len(workers), port, backend, workers=[worker], pure=False)
                for rank, worker in enumerate(workers)
            ]
            for rank, loss, weights in client.gather(ranks):
                print(f"result: turn {turn}, rank {rank}, loss {loss!r}, {weights}")
            print(f"result: a task in between, {client.submit(sum, [1, 2, 3], pure=False).result()}")


if __name__ == "__main__":
    main()
