"""Programs from the documents that define the goals of allranks, with `allranks` instead of `torch.distributed`.

docs/seeds.md has one row for each item of those documents. This file runs the programs that need only CPUs and one
host. The rows for several hosts and for schedulers run in tests/hosts, those for MPI in test_examples.py.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_docs import ENVIRONMENT, ROOT

from support import warm

# "Distributed Training": one program from its parts. Added here: the arguments, the data and the epochs.
TRAINING = """
import argparse

import torch
import torch.multiprocessing as mp
import torch.utils.data.distributed

import allranks as dist


def main_worker(gpu, ngpus_per_node, args):
    args.rank = args.rank * ngpus_per_node + gpu
    torch.manual_seed(args.rank)
    dist.init_process_group(backend=BACKEND,
        init_method=args.dist_url,
        world_size=args.world_size,
        rank=args.rank)

    model = torch.nn.Linear(4, 2)
    model = torch.nn.parallel.DistributedDataParallel(model)

    train_dataset = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)

    train_loader = torch.utils.data.DataLoader(
            train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
            num_workers=args.workers, pin_memory=False, sampler=train_sampler)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if args.distributed: train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
    if args.rank % ngpus_per_node == 0:
        torch.save(model.module.state_dict(), "saved.pt")
    dist.barrier()
    saved = torch.load("saved.pt")
    assert all(torch.equal(saved[name], value) for name, value in model.module.state_dict().items())
    print(f"rank {args.rank} trained\\n", end="")


if __name__ == "__main__":
    args = argparse.Namespace(world_size=1, rank=0, dist_url=DIST_URL, batch_size=2, workers=1, distributed=True)
    ngpus_per_node = 2
    args.world_size = ngpus_per_node * args.world_size
    mp.spawn(main_worker,
        nprocs=ngpus_per_node,
        args=(ngpus_per_node, args))
"""

# The same document: manually synchronized gradients. Added here: the network, the data, and the first lines.
BY_HAND = """
import torch
from torch import optim
import torch.nn.functional as F
import allranks as dist

dist.init_process_group()
rank, world_size, epochs = dist.get_rank(), dist.get_world_size(), 2
torch.manual_seed(rank)
train_loader = [(torch.randn(8, 4), torch.arange(8) % 2)]


def LeNet():
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LogSoftmax(1))


def sync_initial_weights(model, rank, world_size):
    for param in model.parameters():
        if rank == 0:
            # Rank 0 is sending it's own weight
            # to all it's siblings (1 to world_size)
            for sibling in range(1, world_size):
                dist.send(param.data, dst=sibling)
        else:
            # Siblings must recieve the parameters
            dist.recv(param.data, src=0)


def sync_gradients(model, rank, world_size):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM)


model = LeNet()
# first synchronization of initial weights
sync_initial_weights(model, rank, world_size)

optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.85)

model.train()
for epoch in range(1, epochs + 1):
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()

        # The all-reduce on gradients
        sync_gradients(model, rank, world_size)

        optimizer.step()

everyone = [None] * world_size
dist.all_gather_object(everyone, [p.tolist() for p in model.parameters()])
assert everyone[0] == everyone[1]
print("same weights")
"""

# "Writing distributed applications with PyTorch", unchanged except for the import, the lines that import its own
# modules, `run` (defined later in the document) and, through BACKEND, the backend.
WALKTHROUGH = '''
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Literal, Optional

import torch
import allranks as dist
import torch.multiprocessing as mp

def configure_logger(rank: int) -> logging.Logger:
    handlers = [logging.FileHandler(filename=f"process_{rank}.log")] # , RichHandler()]
    logging.basicConfig(
        level="INFO",
        format="%(asctime)s [%(levelname)s]: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=handlers,
    )
    return logging.getLogger(f"Process-{rank}")


def init_env(**kwargs: Dict[str, Any]) -> None:
    """Initialize environment variables."""
    os.environ["MASTER_ADDR"] = kwargs.pop(
        "master_addr", "localhost"
    )  # IP address of the machine
    os.environ["MASTER_PORT"] = kwargs.pop("master_port", PORT)  # port number
    os.environ.update(kwargs)


def init_process(
    rank: int,
    world_size: int,
    backend: str,
    logger: logging.Logger,
    fn: Optional[Callable] = None,
    **kwargs: Dict[str, Any],
) -> None:
    """Initialize the distributed environment via init_process_group."""

    logger = configure_logger(rank)

    dist.init_process_group(backend=backend, rank=rank, world_size=world_size, **kwargs)
    logger.info(f"Initialized process group: Rank {rank} out of {world_size}")

    display_dist_info(rank, world_size, logger)

    if fn is not None:
        fn(rank, world_size)


def display_dist_info(rank: int, world_size: int, logger: logging.Logger) -> None:
    logger.info(f"Explicit Rank: {rank}")
    logger.info(f"Explicit World Size: {world_size}")
    logger.info(f"Machine Hostname: {socket.gethostname()}")
    logger.info(f"PyTorch Distributed Available: {dist.is_available()}")
    logger.info(f"World Size in Initialized Process Group: {dist.get_world_size()}")

    group_rank = dist.get_rank()
    logger.info(f"Rank within Default Process Group: {group_rank}")

def run(rank: int, world_size: int) -> None:
    """Blocking point-to-point communication."""
    tensor = torch.zeros(1)
    print('Rank ', rank, ' has data ', tensor[0])
    if rank == 0:
        tensor += 1
        # Send the tensor to processes other than 0
        for other_rank in range(1, world_size):  # Sending to all other ranks
            dist.send(tensor=tensor, dst=other_rank)
    else:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)

    print('Rank ', rank, ' has data ', tensor[0])


def main(world_size: int) -> None:
    """Main driver function."""
    init_env()
    processes = []
    mp.set_start_method("spawn")
    logger = configure_logger("main")

    for rank in range(world_size):
        p = mp.Process(
            target=init_process,
            args=(rank, world_size, BACKEND, logger, run),
            kwargs={"init_method": "env://"},
        )
        p.start()
        processes.append(p)

    for p in processes:
        p.join()


if __name__ == "__main__":
    main(2)
'''

# The shells of the THD document: this host acts as node0 and as node1.
SHELLS = (
    "export WORLD_SIZE=2 RANK=0 MASTER_PORT={port}\n{python} {folder}/training.py",
    "export WORLD_SIZE=2 RANK=1 MASTER_ADDR=localhost:{port}\n{python} {folder}/training.py",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**ENVIRONMENT, "XDG_CONFIG_HOME": str(folder / "config")}
    return warm.run([sys.executable, *command], cwd=folder, env=environ, timeout=100)


def test_training(tmp_path: Path) -> None:
    text = TRAINING.replace("BACKEND", '"gloo"').replace("DIST_URL", f'"tcp://127.0.0.1:{free_port()}"')
    (tmp_path / "main.py").write_text(text)
    done = run(tmp_path, "main.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["rank 0 trained", "rank 1 trained"]), done.stderr


def test_manually_synchronized_gradients_give_equal_weights(tmp_path: Path) -> None:
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    done = run(tmp_path, "-m", "allranks", "run", "-n", "2", "by_hand.py")
    assert sorted(done.stdout.splitlines()) == ["[0] same weights", "[1] same weights"], done.stderr


def test_walkthrough(tmp_path: Path) -> None:
    (tmp_path / "pbs.py").write_text(WALKTHROUGH.replace("BACKEND", '"gloo"').replace("PORT)", f'"{free_port()}")'))
    done = run(tmp_path, "pbs.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert re.search(rf"Rank +{rank} +has data +tensor\(1\.\)", done.stdout)
        logged = (tmp_path / f"process_{rank}.log").read_text()
        assert f"[INFO]: Initialized process group: Rank {rank} out of 2\n" in logged
        assert "[INFO]: PyTorch Distributed Available: True\n" in logged
        assert logged.endswith(f"[INFO]: Rank within Default Process Group: {rank}\n")


def test_nccl_without_gpus_names_the_backend_to_use(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is available, so nccl may work")
    (tmp_path / "pbs.py").write_text(WALKTHROUGH.replace("BACKEND", '"nccl"').replace("PORT)", f'"{free_port()}")'))
    done = run(tmp_path, "pbs.py")
    assert done.stderr.count("allranks.ConfigError: backend 'nccl'") == 2
    assert done.stderr.count("Pass backend='native', which supports CPU and GPU tensors") == 2


def test_seeds_page_names_existing_tests() -> None:
    page = (ROOT / "docs" / "seeds.md").read_text()
    named = set(re.findall(r"`(\w+/(?:test_\w+\.py)?)`", page))
    assert "house/test_seeds.py" in named
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


def test_two_shells_form_a_world_of_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(
        "import allranks as dist\ndist.init_process_group(timeout=60)\ndist.barrier()\n"
        "print(dist.get_rank(), 'of', dist.get_world_size())\n"
    )
    port = free_port()
    shells = [
        subprocess.Popen(
            ["bash", "-c", shell.format(port=port, python=sys.executable, folder=tmp_path)],
            env={**ENVIRONMENT, "XDG_CONFIG_HOME": str(tmp_path / "config")}, stdout=subprocess.PIPE, text=True,
        )
        for shell in SHELLS
    ]  # fmt: skip
    # The shells exit without a timeout here: the program has one.
    assert [shell.communicate()[0] for shell in shells] == ["0 of 2\n", "1 of 2\n"]
