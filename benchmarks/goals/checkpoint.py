"""``python benchmarks/goals checkpoint``: the cost of saving and loading, compared with the disk and with torch.

===============  =====================================================================================================
stall            time that the training waits for ``save_async``, compared with a memcpy of this rank's share, and
                 with ``async_save`` of torch's distributed checkpoint (DCP), with threads and with processes
save             time until the checkpoint is on the disk, compared with a write and fsync of the same bytes by each
                 rank, DCP's ``save``, and ``torch.save`` by rank 0 with fsync
load             time to load into existing memory, with all hashes checked, compared with reading the files, DCP's
                 ``load``, and ``torch.load`` on each rank
===============  =====================================================================================================

All ranks have the same tensors, 16 of float32, and load into their memory. The figures are medians of 3 to 12 rounds
for each second of the budget; small states have more rounds. Every round measures all operations in turn. Each figure
is that of the slowest rank. The page cache is warm for all reads, and no writes to the disk are pending. If the copies
of an operation do not fit into memory, the operation is skipped, and the report names it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from results import Goal, GoalReport, of
from spent import spent_s

import allranks
from allranks import checkpoint
from allranks._call.bytes import view_of
from allranks._cluster.host import cores
from allranks.testing import run_ranks
from allranks.tools.bench import text
from allranks.tools.bench.plot import drawing
from allranks.tools.progress import TerminalProgress
from allranks.tools.quiet import MeasurementWindow, current_conditions

__all__ = ["main"]

_ROUNDS = (3, 12)  # minimum and maximum number of rounds for each second of the budget
_ROUNDS_OF = 8 << 30  # bytes of all rounds for each second; _ROUNDS limits the result
_TENSORS = 16
_LIMIT_S = 1800
_CHUNK = 4 << 20
_COPIED = 64 << 20  # elements: the memcpy is split into parts of this size
_SPARE = 1 << 30  # bytes that stay free in addition to the states and their copies
_HEADS = 1 << 18  # elements: room for file contents other than tensors

Samples = dict[str, list[float]]

_PEERS = {"stall": "save_async", "DCP save": "DCP", "DCP stall": "DCP in the background",
          "DCP process stall": "DCP with processes", "torch.load": "torch.load"}  # fmt: skip
"""Measurements that are skipped if their copies do not fit into memory: key in the samples, and displayed name."""


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the results."""
    report = GoalReport(
        budget_s=options.budget,
    )
    medians: dict[int, dict[str, float]] = {}
    window, own_s, cpus = MeasurementWindow(), spent_s(), cores(os.sched_getaffinity(0))
    with TerminalProgress("benchmarks/goals") as progress:
        progress.put(results.head(report, "checkpoints"))
        progress.put(text.conditions(current_conditions(), options.nproc, cpus))
        for nbytes in options.sizes:
            fewest, most = _ROUNDS
            rounds = max(1, round(min(max(_ROUNDS_OF // nbytes, fewest), most) * options.budget))
            progress.at(f"{text.human(nbytes)}, {rounds} rounds")
            with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
                found = run_ranks(options.nproc, _measure, Path(folder), nbytes, rounds, timeout_s=_LIMIT_S)
            slowest = _slowest([each for each in found if each])
            medians[nbytes] = {name: statistics.median(times) for name, times in slowest.items()}
            cells = _goals(f"{text.human(nbytes)}, {options.nproc} rank{'s' * (options.nproc > 1)}", slowest)
            report.goals += cells
            progress.put(results.lines(cells))
            if missing := [what for name, what in _PEERS.items() if name not in slowest]:
                report.left_out.append(f"{text.human(nbytes)}: {', '.join(missing)}, for want of memory")
                progress.put(f"# left out: {report.left_out[-1]}")
        report.conditions = window.end(spent_s() - own_s)
        progress.put(text.conditions(report.conditions, options.nproc, cpus))
    if options.json:
        results.write(report, options.json)
    if options.plot:
        _draw(medians, f"{options.nproc} rank{'s' * (options.nproc > 1)} on {report.cpus} CPUs", options.plot)
    return 0


_PANELS = {
    "the training waits": {
        "stall": "save_async",
        "memcpy": "memcpy",
        "DCP stall": "DCP",
        "DCP process stall": "DCP, processes",
    },
    "save": {"save": "save", "write": "write + fsync", "DCP save": "DCP", "torch.save": "torch.save"},
    "load": {"load": "load", "read": "read", "DCP load": "DCP", "torch.load": "torch.load"},
}


def _draw(medians: dict[int, dict[str, float]], title: str, file: Path) -> None:
    """Draw time against size."""
    plt = drawing()
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(12, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    sizes = sorted(medians)
    for panel, (name, systems) in zip(axes, _PANELS.items(), strict=True):
        for number, (what, label) in enumerate(systems.items()):
            there = [size for size in sizes if what in medians[size]]
            width = 3.0 if number == 0 else 1.5
            panel.plot(there, [medians[size][what] for size in there], "o-", ms=4, lw=width, label=label)
        panel.set(title=name, xscale="log", yscale="log", ylabel="seconds")
        panel.set_xticks(sizes, [text.human(size) for size in sizes], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _slowest(found: list[Samples]) -> Samples:
    """Return the time of the slowest rank in each round."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in found), strict=True)] for name in found[0]}


def _goals(what: str, found: Samples) -> list[Goal]:
    """Return the measured figures together with those of the peers."""
    cells = [
        ("stall of save_async", "stall", "memcpy", "memcpy", 1 / 1.3),
        ("stall of save_async", "stall", "DCP", "DCP stall", 2.0),
        ("stall of save_async", "stall", "DCP with processes", "DCP process stall", 2.0),
        ("save_async until complete", "background", "DCP with processes", "DCP process background", None),
        ("save_async until complete", "background", "DCP", "DCP background", None),
        ("save", "save", "write and fsync", "write", 0.9),
        ("save", "save", "DCP", "DCP save", None),
        ("save", "save", "torch.save", "torch.save", None),
        ("load", "load", "reading", "read", 0.8),
        ("load", "load", "DCP", "DCP load", None),
        ("load", "load", "torch.load", "torch.load", None),
    ]
    return [
        of(f"{name} beside {peer}, {what}", "s", found[mine], peer=peer, beside=found[beside], least_ratio=least_ratio)
        for name, mine, peer, beside, least_ratio in cells
        if mine in found and beside in found
    ]


def _measure(folder: Path, nbytes: int, rounds: int) -> Samples:
    """Measure on one rank."""
    import torch.distributed as torchs
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # DCP warns about its own interfaces
    rank, ranks = allranks.get_rank(), allranks.get_world_size()
    torchs.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    each = nbytes // 4 // _TENSORS // 16 * 16  # whole cache lines, like tensors of most shapes
    memory = torch.randn(each * _TENSORS + _HEADS)
    state = {f"w{number}": memory[number * each : (number + 1) * each] for number in range(_TENSORS)}
    share = memory[: nbytes // 4 // ranks]
    copy = torch.ones(min(len(share), _COPIED))
    fitting = _fitting(nbytes, ranks)
    found: Samples = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        allranks.barrier()
        began = time.perf_counter()
        outcome = act()
        found.setdefault(name, []).append(time.perf_counter() - began)
        return outcome

    for number in range(-1, rounds):
        if number == 0:
            found.clear()  # the first round allocates memory and creates groups
        os.sync()  # pending writes would slow down the next operations
        timed("memcpy", lambda: [copy[: len(part)].copy_(part) for part in torch.split(share, _COPIED)])
        _ours(timed, folder / "ours", state, memory, number + 1, "stall" in fitting)
        timed("write", lambda: _write(folder / f"written-{rank}", share))
        os.unlink(folder / f"written-{rank}")
        _dcp(timed, dcp, folder, state, number + 1, fitting)
        timed("torch.save", lambda: _torch_save(folder / "torch.pt", state) if rank == 0 else None)
        allranks.barrier()
        if "torch.load" in fitting:
            timed("torch.load", lambda: torch.load(folder / "torch.pt"))
    torchs.destroy_process_group()
    return found


def _ours(
    timed: Callable[..., Any], folder: Path, state: Any, memory: torch.Tensor, step: int, in_background: bool
) -> None:
    alike = list(state)  # data-parallel training guarantees it
    if in_background:
        saving = timed("stall", lambda: checkpoint.save_async(state, folder, step=2 * step, alike=alike))
        _remove(timed("background", saving.wait))
        os.sync()
    path = timed("save", lambda: checkpoint.save(state, folder, step=2 * step + 1, alike=alike))
    os.sync()
    timed("load", lambda: checkpoint.load(folder, into=state))
    timed("read", lambda: _read(path, memory))
    _remove(path)


def _remove(folder: Path) -> None:
    """Delete a checkpoint after all ranks have finished with it."""
    allranks.barrier()
    if allranks.get_rank() == 0:
        shutil.rmtree(folder)


def _dcp(timed: Callable[..., Any], dcp: Any, folder: Path, state: Any, step: int, fitting: set[str]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kinds = [(AsyncCheckpointerType.THREAD, "DCP"), (AsyncCheckpointerType.PROCESS, "DCP process")]
    for kind, name in kinds:
        if f"{name} stall" not in fitting:
            continue
        made = partial(
            dcp.async_save, state, checkpoint_id=folder / f"{kind.name}-{step}", async_checkpointer_type=kind
        )
        with _silent() if step == 0 else contextlib.nullcontext():
            future = timed(f"{name} stall", made)
            timed(f"{name} background", future.result)
        _remove(folder / f"{kind.name}-{step}")
    if "DCP save" not in fitting:
        return
    timed("DCP save", lambda: dcp.save(state, checkpoint_id=folder / f"dcp-{step}"))
    timed("DCP load", lambda: dcp.load(state, checkpoint_id=folder / f"dcp-{step}"))
    _remove(folder / f"dcp-{step}")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard the stderr of processes that start inside: DCP's process reports each save."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _fitting(nbytes: int, ranks: int) -> set[str]:
    """Return the keys of ``_PEERS`` whose copies fit into memory beside the states of the ranks.

    The result is the same on all ranks.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) << 10
    least = torch.tensor([free - _SPARE])
    allranks.all_reduce(least, op=allranks.ReduceOp.MIN)
    room = int(least)
    fitting = {"stall"} if nbytes <= room else set()
    room -= nbytes * len(fitting)  # save_async keeps a copy of each rank's share
    # Copies of each rank's state. DCP loads one tensor at a time. With processes, the files count, too.
    copies = {"DCP save": 0.5, "DCP stall": 2, "DCP process stall": 4, "torch.load": 1}
    return fitting | {name for name, count in copies.items() if count * ranks * nbytes <= room}


def _write(path: Path, share: torch.Tensor) -> None:
    view = view_of(share)
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(view), _CHUNK):
            file.write(view[begin : begin + _CHUNK])
        os.fsync(file.fileno())


def _torch_save(path: Path, state: Any) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path, memory: torch.Tensor) -> None:
    """Read all files on each rank into existing memory, like its load does."""
    view, at = view_of(memory, writable=True), 0
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(view[at : at + _CHUNK]):
                at += got
