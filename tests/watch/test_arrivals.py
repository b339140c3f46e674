"""Which rank begins collectives last: constructed times, and a job on gloo with a slow rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks._trace.notes import Notes, notes_of
from allranks._watch.arrivals import Arrivals, ArrivalStats, GroupArrivals

MACHINES = {0: "a", 1: "a", 2: "b"}
HOSTS = {0: "one", 1: "one", 2: "two"}
MS = 1_000_000


def _rank(
    times: dict[int, int], site: str = "train.py:1", title: str = "", ranks: tuple[int, ...] = (0, 1, 2)
) -> Arrivals:
    return Arrivals((GroupArrivals(title, ranks, {number: (at, 0) for number, at in times.items()}),), (site,))


def _steps(count: int, late_ms: float = 0.0, first: int = 1) -> dict[int, int]:
    return {number: round((number * 10 + late_ms) * MS) for number in range(first, first + count)}


@pytest.mark.quick
def test_a_rank_that_is_usually_last_is_named_with_host_and_line() -> None:
    found = ArrivalStats()
    found.add({0: _rank(_steps(100)), 1: _rank(_steps(100, 0.1)), 2: _rank(_steps(100, 4), "slow.py:7")}, MACHINES)
    (line,) = found.warnings(HOSTS)
    assert line == (
        "rank 2 (two) began 100 of 100 compared collectives of group 'world' last, by 0.4 s in total: 39% of their"
        " time, 100% of it in calls at slow.py:7"
    )


@pytest.mark.quick
def test_each_call_is_compared_once_and_only_if_all_ranks_have_it() -> None:
    found = ArrivalStats()
    for first in (1, 31, 61):  # overlapping samples
        ranks = {rank: _rank(_steps(50, 4 * (rank == 1), first)) for rank in (0, 1)}
        found.add({**ranks, 2: _rank(_steps(40, 0, first))}, MACHINES)
    (group,) = found.stats(0, "one").groups
    assert group.compared == 100
    assert group.late == {1: (100, pytest.approx(0.4))}
    found.add({0: _rank(_steps(400)), 1: _rank(_steps(400, 4))}, MACHINES)  # rank 2 has not answered
    assert found.stats(0, "one").groups[0].compared == 100


@pytest.mark.quick
def test_differences_below_the_error_of_the_clocks_do_not_count() -> None:
    found = ArrivalStats()
    found.add({0: _rank(_steps(100)), 1: _rank(_steps(100)), 2: _rank(_steps(100, 1.5))}, MACHINES)
    assert found.stats(0, "one").groups[0].late == {}  # of other hosts
    found = ArrivalStats()
    found.add({0: _rank(_steps(100)), 1: _rank(_steps(100, 0.01)), 2: _rank(_steps(100))}, MACHINES)
    assert found.stats(0, "one").groups[0].late == {}
    assert found.warnings(HOSTS) == []


@pytest.mark.quick
def test_ranks_that_are_last_in_turn_are_not_named() -> None:
    found = ArrivalStats()
    turns = [{n: round((n * 10 + 4 * (n % 3 == rank)) * MS) for n in range(300)} for rank in range(3)]
    found.add({rank: _rank(times) for rank, times in enumerate(turns)}, MACHINES)
    assert found.stats(0, "one").groups[0].compared == 299  # call 0 is a message
    assert found.warnings(HOSTS) == []


@pytest.mark.quick
def test_groups_are_compared_apart() -> None:
    found = ArrivalStats()
    pair = {"title": "mesh_tp", "ranks": (0, 1)}
    found.add({0: _rank(_steps(50, 0), **pair), 1: _rank(_steps(50, 5), **pair)}, MACHINES)  # type: ignore[arg-type]
    (line,) = found.warnings(HOSTS)
    assert "rank 1 (one) began 50 of 50 compared collectives of group 'mesh_tp' last" in line


@pytest.mark.quick
def test_notes_are_read_by_pid_and_replaced() -> None:
    notes = Notes()
    notes.write([])
    assert notes_of(os.getpid()) == ()
    notes.write(["a long line", "another"])
    assert notes_of(os.getpid()) == ("a long line", "another")
    notes.write(["short"])
    assert notes_of(os.getpid()) == ("short",)
    assert notes_of(1 << 22) == ()


PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
import allranks._watch.watcher as watcher

watcher._FIRST_SAMPLE_S = 1.0
dist.init_process_group("gloo")
x = torch.ones(4)
stop = torch.zeros(1)
while not stop:
    if dist.get_rank() == 1:
        time.sleep(0.01)
    dist.all_reduce(x)  # reduces
    stop.fill_(os.path.exists(sys.argv[1]))
    dist.broadcast(stop, 0)
dist.destroy_process_group()
"""


def test_a_slow_rank_of_a_gloo_job_is_reported_live_and_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(PROGRAM)
    line = next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if "# reduces" in text)
    allranks = [sys.executable, "-m", "allranks"]
    command = [*allranks, "run", "-n", "2", script, tmp_path / "stop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        shown, until = "", time.monotonic() + 60
        while "compared collectives" not in shown and time.monotonic() < until and job.poll() is None:
            done = subprocess.run(
                [*allranks, "top", str(job.pid), "-n", "1", "-d", "0.5"], capture_output=True, text=True, check=False
            )
            shown = done.stdout
        (tmp_path / "stop").touch()
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    for text in (shown, output):
        assert "rank 1" in text, text
        assert "compared collectives of group 'world' last" in text
        assert f"slow.py:{line} in <module>" in text
