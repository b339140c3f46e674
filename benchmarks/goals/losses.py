"""Processes of ``python benchmarks/goals resilience``: a training in which the last of three ranks is killed.

    python benchmarks/goals/losses.py train FOLDER DEATHS                  a rank, under ``allranks run --elastic``
    python benchmarks/goals/losses.py replica FOLDER DEATHS NUMBER START   a replica of torchft, on its gloo group
    python benchmarks/goals/losses.py lighthouse                           torchft's; prints its address

All use the same model, 8 MB. A process records when it started, when it finished each step, and when it killed itself.
The replicas of torchft receive the address of the lighthouse in TORCHFT_LIGHTHOUSE, a variable of torchft.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import allranks

__all__ = ["DYING", "PROCESSES", "Life", "Pauses", "pauses"]

PROCESSES = 3
DYING = 2
_STEPS = 25  # steps before each death, and after the last one
_NEAR = 3  # the pause precedes one of this many steps finished after the death
_WIDTH = 1024
_c10d: Any = torch.distributed
_TIMEOUT = timedelta(seconds=60)
_JOIN_MS, _TICK_MS = 1000, 100  # join timeout and quorum tick of the lighthouse


@dataclass
class Life:
    """The record of a process, in seconds of a clock that all processes of the host share.

    Attributes:
        number: The rank slot, or the number of the replica.
        start: The number of earlier processes with the same ``number``.
        began: When its program started; its imports were already done.
        finished: When each step was finished.
        whole: The entries of ``finished`` for steps in which all processes took part.
        died: When it killed itself.
        observing: Seconds that it spent on observing its first steps.
    """

    number: int
    start: int
    began: float
    finished: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    died: float | None = None
    observing: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the record to a file for ``pauses``."""
        (folder / f"{self.number}-{self.start}.json").write_text(json.dumps(asdict(self)))

    def die(self, folder: Path) -> None:
        """Record the time and kill this process. Does not return."""
        self.died = time.monotonic()
        self.write(folder)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Pauses:
    """The cost of deaths, in seconds, one entry for each death.

    Attributes:
        paused: The longest time between two steps of a survivor, minus the time of a normal step.
        replaced: From the death until the replacement process has finished a step with all processes.
        began: The part of ``replaced`` after the program of the replacement process started.
        step: A normal step; one entry.
        observing: The cost of observing the first steps, one entry for each survivor.
    """

    paused: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    observing: list[float] = field(default_factory=list)


def pauses(folder: Path) -> Pauses:
    """Compute the pauses from the records in the folder."""
    lives = [Life(**json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    survivors = [life for life in lives if life.number != DYING]
    chain = sorted((life for life in lives if life.number == DYING), key=lambda life: life.start)
    steps = [b - a for life in survivors for a, b in pairwise(life.finished)]
    step = statistics.median(steps)
    found = Pauses(step=[step], observing=[life.observing for life in survivors])
    for turn, dead in enumerate(chain):
        if dead.died is None:
            break
        found.paused.append(max(_longest(life.finished, dead.died) for life in survivors) - step)
        if turn + 1 < len(chain):
            following = chain[turn + 1]
            found.replaced.append(following.whole[0] - dead.died)
            found.began.append(following.whole[0] - following.began)
    return found


def _longest(finished: list[float], died: float) -> float:
    """Return the longest time between two steps near the death.

    A survivor can finish a step after the death and before the pause, so the first ``_NEAR`` intervals are compared.
    """
    first = next(place for place, moment in enumerate(finished) if moment > died)
    near = finished[first - 1 : first + _NEAR]
    return max(b - a for a, b in pairwise(near))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))


def _train(folder: Path, deaths: int) -> None:
    life = Life(int(os.environ["RANK"]), int(os.environ["ALLRANKS_START"]), time.monotonic())
    life.whole = life.finished
    allranks.init_process_group()
    model: Any = allranks.nn.parallel.DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = allranks.resilience.State(model=model, optimizer=optimizer, local=["life"])
    batch = torch.ones(4, _WIDTH)
    for step in state.steps(_STEPS * (deaths + 1)):
        with step:
            if life.number == DYING and life.start < deaths and step.index == _STEPS * (life.start + 1):
                life.die(folder)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if step.committed:  # otherwise the step was rolled back and is repeated
            life.finished.append(time.monotonic())
    life.observing = state.observing_s
    life.write(folder)


def _replicate(folder: Path, deaths: int, number: int, start: int) -> None:
    import torchft  # type: ignore[import-not-found,unused-ignore] # installed in a separate environment

    life = Life(number, start, time.monotonic())
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    whole = {"steps": 0}  # transferred with the weights, so that all processes end with the same step

    def load(state: dict[str, Any]) -> None:
        whole.update(state["whole"])
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    store = _c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(_TIMEOUT),
        state_dict=lambda: {"whole": dict(whole), "net": net.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=load,
        min_replica_size=PROCESSES - 1,
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=_TIMEOUT,
    )
    model, wrapped = torchft.DistributedDataParallel(manager, net), torchft.Optimizer(manager, optimizer)
    batch = torch.ones(4, _WIDTH)
    while whole["steps"] < _STEPS * (deaths + 1):
        if number == DYING and start < deaths and whole["steps"] >= _STEPS * (start + 1):
            life.die(folder)
        done = manager.current_step()
        wrapped.zero_grad()
        model(batch).square().mean().backward()
        wrapped.step()
        if manager.current_step() > done:
            life.finished.append(time.monotonic())
            if manager.num_participants() == PROCESSES:
                whole["steps"] += 1
                life.whole.append(life.finished[-1])
    life.write(folder)
    manager.shutdown()


def _lighthouse() -> None:
    """Run a lighthouse of torchft until standard input is closed."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]

    server = LighthouseServer(
        bind="[::]:0", min_replicas=PROCESSES - 1, join_timeout_ms=_JOIN_MS, quorum_tick_ms=_TICK_MS
    )
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()


def _main(role: str, *words: str) -> None:
    torch.set_num_threads(1)
    if role == "lighthouse":
        _lighthouse()
        return
    roles: dict[str, Callable[..., None]] = {"train": _train, "replica": _replicate}
    roles[role](Path(words[0]), *map(int, words[1:]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
