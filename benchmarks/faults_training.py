"""The training that benchmarks/faults.py disturbs, and the expected value of each of its steps.

Every process writes a line for each finished step: the step, the number of ranks, and a value that depends on all
weights. ``expected`` recomputes this value in one process and without allranks, only from the number of ranks in each
step. This detects a wrong sum, a repeated or omitted step, a lost or repeated sample, and different random numbers, in
the step in which they occur. It also works for a job that continues with fewer ranks or fails with an error. All
numbers are float64, so the order of sums changes only the last bits (``ROUNDING``).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EVERY", "ROUNDING", "StepDone", "Unlawful", "expected", "expected_end", "identity", "read_steps", "train"]

EVERY = 7  # steps between two checkpoints
STEP_S = 0.014
BIG = 16 << 20  # numbers in the large all_reduce
ROUNDING = 1e-7  # of a sum of 1,500 weights; one sample more or less changes it by more than 1e-4
_SAMPLES, _BATCH, _SEED, _LR = 1200, 8, 7, 1e-2


class Unlawful(Exception):
    """Raised for a sequence of steps that no training can have."""


@dataclass(frozen=True)
class StepDone:
    """The record of a step by one process.

    Attributes:
        done: number of finished steps, including this one.
        epoch: epoch of the training.
        index: index in the epoch.
        size: number of ranks that did it.
        rank: rank of the process.
        value: depends on all weights after the step.
        at: time at which it was finished, on the clock of this machine.
    """

    done: int
    epoch: int
    index: int
    size: int
    rank: int
    value: float
    at: float


def network(rank: int) -> nn.Sequential:
    """Return a network with different weights on each rank, so that a missing synchronization is detected."""
    torch.manual_seed(_SEED + 1 + rank)
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    return net.double()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(_SAMPLES, 20, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


def value_of(net: nn.Module) -> float:
    """Return a number that depends on all weights, or on the weights of this rank's shard."""
    with torch.no_grad():
        flat = torch.cat([getattr(p, "_local_tensor", p).flatten() for p in net.parameters()])
        return float(flat @ torch.linspace(0.5, 1.5, len(flat), dtype=torch.float64))


def train(
    folder: Path, epochs: int, checkpoints: bool, sharded: bool, step_s: float = STEP_S, disk: Path | None = None
) -> None:
    """Entry point of the ranks.

    Args:
        folder: folder of the records of all processes.
        epochs: epochs of the training.
        checkpoints: also write checkpoints.
        sharded: FSDP2 shards the model.
        step_s: seconds that a step sleeps.
        disk: folder of the checkpoints, on a disk that may be full; None: a folder in ``folder``.
    """
    from torch.utils.data import DataLoader, TensorDataset

    import allranks as dist

    start = "-".join(os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "ALLRANKS_START"))
    (folder / f"pid-{start}").write_text(identity(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group(timeout=30)
    net = network(dist.get_rank())
    dist.all_reduce(torch.ones(4))
    model = _shard(net) if sharded else dist.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=_LR)
    data = TensorDataset(*samples())
    sampler = dist.data.DistributedSampler(data, drop_last=True)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=_BATCH, sampler=sampler, drop_last=True)
    on_error = "raise" if disk is None else "warn"
    kept = dist.resilience.Checkpoints(disk or folder / "kept", EVERY, on_error=on_error) if checkpoints else None
    torch.manual_seed(_SEED)
    state = dist.resilience.State(model=model, optimizer=optimizer, checkpoints=kept)
    # Line buffering: each line is written completely or not at all.
    with open(folder / f"steps-{start}", "a", buffering=1) as notes:
        for epoch in state.epochs(epochs):
            sampler.set_epoch(epoch)
            for step in state.steps(loader):
                size, rank, off = dist.get_world_size(), dist.get_rank(), 0.0
                with step:
                    images, labels = step.batch
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images), labels)
                    time.sleep(step_s if step.index % 3 == 0 else 0)
                    loss.backward()
                    if step.index == 20 and epoch % 4 == 0:
                        big = torch.ones(BIG)
                        dist.all_reduce(big)
                        off = float((big - size).abs().max())
                    time.sleep(step_s if step.index % 3 == 1 else 0)
                    optimizer.step()
                    time.sleep(step_s if step.index % 3 == 2 else 0)
                if step.committed:
                    value = (value_of(net) + off).hex()
                    done = state.steps_done + 1
                    notes.write(f"{done} {epoch} {step.index} {size} {rank} {value} {time.monotonic()!r}\n")
    whole = [parameter.full_tensor() if sharded else parameter for parameter in net.parameters()]  # type: ignore[operator]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in whole)
    found = {"weights": hashlib.sha256(weights).hexdigest()[:16], "lost": state.lost}
    (folder / f"end-{os.environ['RANK']}").write_text(json.dumps(found))


def _shard(net: nn.Sequential) -> nn.Module:
    """Shard the model, with equal weights on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import allranks as dist

    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def identity(pid: int) -> str:
    """Return the process id and the start time, because ids are reused; "" if the process has exited."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if facts[0] in "ZX" else f"{pid} {facts[19]}"


def read_steps(path: Path) -> list[StepDone]:
    """Return the complete lines that a process has written."""
    found = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            *numbers, value, at = line.split()
            done, epoch, index, size, rank = map(int, numbers)
            found.append(StepDone(done, epoch, index, size, rank, float.fromhex(value), float(at)))
    return found


def expected(steps: Sequence[StepDone]) -> list[float]:
    """Return the expected values of these steps, from their position in the training and the numbers of ranks.

    Raises:
        Unlawful: the steps cannot follow each other.
    """
    torch.set_num_threads(1)
    net, (x, y) = network(0), samples()
    optimizer = torch.optim.Adam(net.parameters(), lr=_LR)
    order: list[int] = []
    values: list[float] = []
    epoch, index, dealt, before = -1, 0, 0, 1
    for step in steps:
        if (step.epoch, step.index) == (epoch + 1, 0):
            if _has_batches(len(order) - dealt, max(before, step.size)):
                raise Unlawful(f"epoch {epoch} ends after {dealt} of {len(order)} samples")
            epoch, index, dealt = step.epoch, 0, 0
            order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        if (step.done, step.epoch, step.index) != (len(values) + 1, epoch, index):
            raise Unlawful(f"after {len(values)} steps, step {index} of epoch {epoch} is due, not {step}")
        if not _has_batches(len(order) - dealt, step.size):
            raise Unlawful(f"epoch {epoch} has no step {index} with {step.size} ranks")
        optimizer.zero_grad()
        for rank in range(step.size):
            _sow(epoch, index, rank)
            mine = order[dealt + rank :: step.size][:_BATCH]
            (F.cross_entropy(net(x[mine]), y[mine]) / step.size).backward()
        optimizer.step()
        values.append(value_of(net))
        index, dealt, before = index + 1, dealt + step.size * _BATCH, step.size
    return values


def expected_end(epochs: int, ranks: int) -> int:
    """Return the number of steps of a complete training with ``ranks`` ranks."""
    return epochs * (_SAMPLES // ranks // _BATCH)


def _has_batches(left: int, size: int) -> bool:
    return left // size >= _BATCH


def _sow(epoch: int, index: int, rank: int) -> None:
    """Set the random seed of a step to that of ``State``, as an independent implementation."""
    place = repr((_SEED, rank, "step", 1, epoch, 0, index)).encode()  # see _elastic/training/seeds.py
    torch.manual_seed(int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big"))
