"""``python benchmarks/goals resilience``: the cost of losing a rank, compared with its goals and torchft.

====================  ================================================================================================
survivors' pause      one of three ranks is killed in a step of an 8 MB model: the longest time between two steps of
                      another rank, minus the time of a normal step; without a replacement (``shrink``), and with a
                      replacement process (``replace``)
replaced              from the kill until the replacement process has finished a step with all ranks; and the part of
                      this after its program started: its imports were done, in the launcher's template process
                      beforehand
right all_reduce      one of ``-n`` ranks is killed: time until each other rank has the right sum of the survivors
state                 rate at which a model moves from one rank's memory to another's on the same host, as for a
                      process that replaces a rank
first steps           cost of observing them, once: copies and hashes of everything, and the search for changes
                      outside the state
being prepared        an empty step of ``State``, of two ranks: the vote and the bookkeeping
torchft               its replicas on its gloo group, with a lighthouse on this host whose join timeout is 1 s; the
                      bench restarts a killed replica immediately
====================  ================================================================================================

Figures are medians of ``5 * budget`` deaths (at least one).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import results
import torch
from losses import DYING, PROCESSES, Pauses, pauses
from results import Goal, GoalReport, of
from spent import spent_s
from torch import nn

import allranks
from allranks._cluster.host import cores
from allranks._elastic.training import handover
from allranks.resilience import State
from allranks.testing import run_ranks
from allranks.tools.bench import text
from allranks.tools.progress import TerminalProgress
from allranks.tools.quiet import MeasurementWindow, current_conditions

__all__ = ["main"]

_LOSSES = str(Path(__file__).with_name("losses.py"))
_DEATHS = 5  # deaths for each second of the budget
_LIMIT_S = 300
_PARAMETERS = 16
_STEPS, _BLOCKS, _ROUNDS = 2000, 3, 3
_UNSEEDED, _NORMED = 1, 2  # kinds of empty steps
_SHARE_S = 0.01 * 0.005  # 1 % of a step of 5 ms
_TORCHFT = "torchft"


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the results."""
    deaths = max(1, round(_DEATHS * options.budget))
    report = GoalReport(
        budget_s=options.budget,
    )
    peer = None
    if importlib.util.find_spec(_TORCHFT) is None:
        report.left_out.append("torchft: it is not installed here (make torchft makes an environment that has it)")
    else:
        report.versions[_TORCHFT] = importlib.metadata.version("torchft-nightly")
    window, own_s, cpus = MeasurementWindow(), spent_s(), cores(os.sched_getaffinity(0))
    with TerminalProgress("benchmarks/goals") as progress:
        progress.put(results.head(report, "the loss of a rank"))
        progress.put(text.conditions(current_conditions(), PROCESSES, cpus))
        for each in report.left_out:
            progress.put(f"# left out: {each}")
        if _TORCHFT in report.versions:
            progress.at(f"{_TORCHFT}, {deaths} deaths")
            peer = _replicas(deaths)
        measures: list[tuple[str, Callable[[], list[Goal]]]] = [
            (f"a training that loses a rank, {deaths} times", partial(_losses, deaths, peer)),
            (f"{options.nproc} ranks of which one dies, {deaths} times", partial(_many, options.nproc, deaths)),
            ("a state from one rank to another", partial(_states, options.sizes)),
            ("steps in which nothing is done", _prepared),
        ]
        for what, measure in measures:
            progress.at(what)
            found = measure()
            report.goals += found
            progress.put(results.lines(found))
        report.conditions = window.end(spent_s() - own_s)
        progress.put(text.conditions(report.conditions, PROCESSES, cpus))
    if options.json:
        results.write(report, options.json)
    return 0


# One rank of three is lost.


def _losses(deaths: int, peer: Pauses | None) -> list[Goal]:
    shrunk = [_job("--respawns", "0", deaths=1) for _ in range(deaths)]
    replaced = _job("--respawns", str(deaths), deaths=deaths)
    beside = peer or Pauses()
    return [
        of(
            "survivors' pause, shrink",
            "s",
            [paused for found in shrunk for paused in found.paused],
            most=0.2,
            peer=_TORCHFT,
            beside=beside.paused,
        ),
        of("survivors' pause, replace", "s", replaced.paused),
        of("replaced", "s", replaced.replaced, most=1.0, peer=_TORCHFT, beside=beside.replaced),
        of("replaced, from the new program on", "s", replaced.began, peer=_TORCHFT, beside=beside.began),
        of("a normal step", "s", replaced.step, peer=_TORCHFT, beside=beside.step),
        of("observing the first steps", "s", replaced.observing),
    ]


def _job(*options: str, deaths: int) -> Pauses:
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
        command = [sys.executable, "-m", "allranks", "run", "-n", str(PROCESSES), "--elastic", str(PROCESSES - 1)]
        program = [_LOSSES, "train", folder, str(deaths)]
        done = subprocess.run(
            [*command, *options, *program], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"benchmarks/goals: a job exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return pauses(Path(folder))


def _replicas(deaths: int) -> Pauses:
    """Measure torchft's replicas, with its process group on gloo."""
    program = [sys.executable, _LOSSES]
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder, open(f"{folder}/log", "w+") as log:
        running: dict[int, subprocess.Popen[str]] = {}
        lighthouse = subprocess.Popen(
            [*program, "lighthouse"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert lighthouse.stdin is not None
        assert lighthouse.stdout is not None
        try:
            environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.stdout.readline().strip()}

            def start(number: int, turn: int) -> None:
                words = [*program, "replica", folder, str(deaths), str(number), str(turn)]
                running[number] = subprocess.Popen(words, stdout=log, stderr=log, env=environ, text=True)

            for number in range(PROCESSES):
                start(number, 0)
            for turn in range(deaths):
                if running[DYING].wait(_LIMIT_S) != -signal.SIGKILL:
                    raise SystemExit(f"allranks bench: a replica of torchft did not exit:\n{_end_of(log.name)}")
                start(DYING, turn + 1)
            if any(replica.wait(_LIMIT_S) for replica in running.values()):
                raise SystemExit(f"allranks bench: a replica of torchft failed:\n{_end_of(log.name)}")
            return pauses(Path(folder))
        finally:
            for replica in running.values():
                replica.kill()
                replica.wait()
            lighthouse.stdin.close()
            lighthouse.wait()
            lighthouse.stdout.close()


def _end_of(log: str) -> str:
    return Path(log).read_text()[-4000:]


# A rank of a large group is lost.


def _many(ranks: int, deaths: int) -> list[Goal]:
    took = []
    for _ in range(deaths):
        with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
            file = Path(folder) / "died"
            done = run_ranks(ranks, _shrunk, file, may_die=[ranks // 2], timeout_s=_LIMIT_S)
            took.append(max(moment for moment in done if moment is not None) - float(file.read_text()))
    return [of(f"{ranks} ranks, right all_reduce", "s", took, most=0.5)]


def _shrunk(file: Path) -> float:
    """Run one rank. Return the time at which it had the right sum."""
    torch.set_num_threads(1)
    size = allranks.get_world_size()
    tensor = torch.ones(1)
    for _ in range(3):
        allranks.all_reduce(tensor)
    allranks.barrier()
    if allranks.get_rank() == size // 2:
        time.sleep(0.5)  # gives the other ranks time to enter their call
        file.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        allranks.barrier()
    except allranks.PeerLostError:
        allranks.shrink_group([])
    tensor = torch.ones(1)
    allranks.all_reduce(tensor)
    if tensor.item() != size - 1:
        raise AssertionError(f"the sum of {size - 1} ranks is {tensor.item()}")
    return time.monotonic()


# Transfer of a state, and empty steps.


def _states(sizes: list[int]) -> list[Goal]:
    found = []
    for nbytes in sizes:
        rates = run_ranks(2, _hand_over, nbytes, timeout_s=_LIMIT_S)[0]
        assert rates is not None
        found.append(of(f"state of {text.human(nbytes)}, same host", "GB/s", rates, least=4e9))
    return found


def _hand_over(nbytes: int) -> list[float]:
    torch.set_num_threads(1)
    group = allranks.group.WORLD
    assert group is not None
    parts = {
        "model": nn.ParameterList(nn.Parameter(torch.randn(nbytes // 4 // _PARAMETERS)) for _ in range(_PARAMETERS))
    }
    moved = sum(parameter.numel() * 4 for parameter in parts["model"])
    rates, donors = [], handover.Donors(1, [0], [member.machine for member in group.members], False)
    for _ in range(_DEATHS):
        group.barrier()
        began = time.monotonic()
        if group.rank() == 0:
            handover.send(parts, None, group, donors)
        else:
            handover.receive(parts, group, donors)
        group.barrier()
        rates.append(moved / (time.monotonic() - began))
    return rates


def _prepared() -> list[Goal]:
    names = ["being prepared, a step of 2 ranks", "being prepared, without seeds", "being prepared, with BatchNorm"]
    samples: list[list[float]] = [[] for _ in names]
    for _ in range(_ROUNDS):  # a process has one State, so each kind runs as a separate job
        for kind, found in enumerate(samples):
            blocks = run_ranks(2, _empty_steps, kind, timeout_s=_LIMIT_S)[0]
            assert blocks is not None
            found += blocks
    limits = [_SHARE_S, None, None]
    return [of(name, "us", found, most=most) for name, found, most in zip(names, samples, limits, strict=True)]


def _empty_steps(kind: int) -> list[float]:
    """Return the seconds of an empty step, by block.

    Args:
        kind: 0: the default step. `_UNSEEDED`: without reseeding. `_NORMED`: with buffers that another rank keeps.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.BatchNorm1d(64) if kind == _NORMED else nn.Linear(10, 10)
    state = State(net=net, reseed=kind != _UNSEEDED)
    found = []
    for _ in range(1 + _BLOCKS):
        began = time.perf_counter()
        for step in state.steps(_STEPS):
            with step:
                pass
        found.append((time.perf_counter() - began) / _STEPS)
    return found[1:]  # State observes the first steps, so they are not counted
