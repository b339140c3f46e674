"""The program of each rank of ``allranks tune``: it times the choices in turn, on separate process groups."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import allranks
from allranks._base.console import put
from allranks._cluster.host import usable_cpus
from allranks._engines.native.tuning import NEVER
from allranks.tools.progress import TerminalProgress
from allranks.tools.quiet import MeasurementWindow, noise_reasons
from allranks.tools.tune import parse
from allranks.tools.tune.selection import TunedValues, choose_tuning

_GROUPS = (4, 8, 16)
_GROUP_BYTES = (8, 16 << 10)  # bytes: one that needs a single meeting, one that needs several
_ONE_SHOT_BYTES = tuple((4 << 10) << i for i in range(6))  # up to a chunk of the ring
_BLOCK_S = 0.004  # seconds that the calls of a block take together, about


class _Rank:
    """The measurements of one rank."""

    def __init__(self, options: Any) -> None:
        torch.set_num_threads(1)
        allranks.init_process_group()
        self._options = options
        self._rank, self._ranks = allranks.get_rank(), allranks.get_world_size()
        self._found = TunedValues(usable_cpus())

    def run(self) -> None:
        window, began_s = MeasurementWindow(), time.process_time()
        with tempfile.TemporaryDirectory(prefix="allranks-tune-") as folder:
            for ranks in self._rank_counts():
                self._measure_groups(ranks, Path(folder))
                if ranks <= max(8, self._found.cpus):
                    self._measure_one_shot(ranks, Path(folder))
                allranks.barrier()
            own_s = torch.tensor([time.process_time() - began_s], dtype=torch.float64)
            allranks.all_reduce(own_s)
            if self._rank == 0:
                self._write_result(noise_reasons(window.end(own_s.item())))
            allranks.destroy_process_group()

    def _rank_counts(self) -> list[int]:
        """Return the numbers of ranks to measure: powers of two, and all ranks."""
        return sorted({1 << i for i in range(1, self._ranks.bit_length()) if 1 << i < self._ranks} | {self._ranks})

    def _measure_groups(self, ranks: int, folder: Path) -> None:
        # At least two groups: one group of all ranks is the same as no groups.
        sizes = [0, *(size for size in _GROUPS if 2 * size <= ranks)]
        # 3 is below all numbers of ranks that are measured with groups, so the groups always apply.
        tables = [
            {"levels_from": NEVER, "crowded_levels_from": NEVER}
            if size == 0
            else {"levels_from": 3, "crowded_levels_from": 3, "group": size}
            for size in sizes
        ]
        times = self._times(ranks, tables, _GROUP_BYTES, folder)
        self._found.group_times[ranks] = {
            size: {n: times[n][i] for n in _GROUP_BYTES} for i, size in enumerate(sizes) if times
        }
        if self._rank == 0:
            for i, size in enumerate(sizes):
                how = f"groups of {size}" if size else "all with all"
                put(f"{ranks:4} ranks, {how:12} " + _cells(_GROUP_BYTES, [times[n][i] for n in _GROUP_BYTES]) + "\n")

    def _measure_one_shot(self, ranks: int, folder: Path) -> None:
        # The first limits are above all measured sizes, and the last is below, so each table fixes one choice.
        tables = [{"one_shot": 1 << 20, "one_shot_of_all": 1 << 24}, {"one_shot": 0}]
        times = self._times(ranks, tables, _ONE_SHOT_BYTES, folder)
        self._found.one_shot_times[ranks] = {n: (times[n][0], times[n][1]) for n in _ONE_SHOT_BYTES if times}
        if self._rank == 0:
            for i, how in enumerate(("one shot", "in shards")):
                put(
                    f"{ranks:4} ranks, {how:12} "
                    + _cells(_ONE_SHOT_BYTES, [times[n][i] for n in _ONE_SHOT_BYTES])
                    + "\n"
                )

    def _times(
        self, ranks: int, tables: Sequence[Mapping[str, int]], sizes: Sequence[int], folder: Path
    ) -> dict[int, list[float]]:
        """Return the times of an all_reduce of the first ranks, by size and table. Empty on the other ranks."""
        with TerminalProgress("allranks tune", self._rank == 0) as progress:
            progress.at(f"{len(tables)} variants for {ranks} ranks, {len(sizes)} sizes each")
            return self._timed(ranks, tables, sizes, folder)

    def _timed(
        self, ranks: int, tables: Sequence[Mapping[str, int]], sizes: Sequence[int], folder: Path
    ) -> dict[int, list[float]]:
        groups = []
        for table in tables:
            path = folder / ("-".join(f"{name}-{value}" for name, value in table.items()) + ".json")
            path.write_text(json.dumps({"tuning": table}))
            os.environ["ALLRANKS_TUNING"] = str(path)
            # A group reads its tuning table when it is created.
            groups.append(allranks.new_group(list(range(ranks))))
        del os.environ["ALLRANKS_TUNING"]
        found = {}
        if self._rank < ranks:
            for nbytes in sizes:
                found[nbytes] = self._time_in_rotation(groups, nbytes)
        for group in groups:
            if self._rank < ranks:
                allranks.destroy_process_group(group)
        return found

    def _time_in_rotation(self, groups: Sequence[Any], nbytes: int) -> list[float]:
        x = torch.zeros(nbytes // 4)
        samples: list[list[float]] = [[] for _ in groups]
        counts = [self._count(group, x) for group in groups]
        spent, turn = 0.0, 0
        while turn < 5 or (spent < self._options.budget and turn < 50):
            # The order rotates, so that a drift of the machine's speed affects all choices alike.
            for i in range(len(groups)):
                i = (i + turn) % len(groups)
                samples[i].append(self._block(groups[i], x, counts[i]))
                spent += samples[i][-1] * counts[i]
            turn += 1
        return [statistics.median(each) * 1e6 for each in samples]

    def _count(self, group: Any, x: Any) -> int:
        self._block(group, x, 3)
        # Equal on all ranks, because `_block` returns the time of the slowest rank.
        return max(1, min(1000, math.ceil(_BLOCK_S / self._block(group, x, 3))))

    def _block(self, group: Any, x: Any, calls: int) -> float:
        """Return the seconds per call, of the slowest rank."""
        allranks.barrier(group)
        began = time.perf_counter()
        for _ in range(calls):
            allranks.all_reduce(x, group=group)
        took = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64)
        allranks.all_reduce(took, allranks.ReduceOp.MAX, group=group)
        return float(took)

    def _write_result(self, noise: Sequence[str]) -> None:
        table = choose_tuning(self._found)
        path: Path = self._options.output
        measured = {"meetings": self._found.group_times, "shots": self._found.one_shot_times}
        whole = {"tuning": table, "host": socket.gethostname(), "cpus": self._found.cpus, "measured_us": measured}
        whole["noise"] = list(noise)
        path.write_text(json.dumps(whole, indent=1) + "\n")
        for name, value in table.items():
            put(f"{name:20} {'never' if value == NEVER else value}\n")
        if noise:
            print(
                f"allranks tune: warning: {'; '.join(noise)}: the results may be noise.\n"
                "  Run it again on an idle host.",
                file=sys.stderr,
            )
        put(f"Written to {path}. To use it: export ALLRANKS_TUNING={path.resolve()}\n")


def _cells(sizes: Sequence[int], times: Sequence[float]) -> str:
    return "  ".join(f"{_size(n)} {time_us:.1f} us" for n, time_us in zip(sizes, times, strict=True))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


if __name__ == "__main__":
    _Rank(parse(sys.argv[1:])).run()
