"""Ranks that leave on a signal: their backup ranks inherit their tensors, and no step is repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import allranks as dist
from allranks.testing import run_ranks


def test_backup_ranks_inherit_the_tensors_of_departed_ranks() -> None:
    """Request ranks 1 and 2 to leave in one step, and then kill rank 3.

    Rank 2 is the backup rank of rank 1, so it leaves later.
    """

    def main() -> Any:
        first = dist.get_rank()
        norm, count = torch.nn.BatchNorm1d(3), torch.zeros(4, dtype=torch.int64)
        small, total = torch.zeros(3, dtype=torch.uint8), torch.zeros((), dtype=torch.float64)

        def inherit(theirs: list[torch.Tensor]) -> None:
            count.add_(theirs[1])
            total.add_(theirs[2])

        state = dist.resilience.State(norm=norm, own=[small, count, total], inherit=inherit, leave_on=[signal.SIGTERM])
        for step in state.steps(12):
            with step:
                if first in (1, 2) and step.index == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                norm(torch.randn(8, 3))
                dist.barrier()
                small.add_(1)
                count[first] += 1
                total.add_(0.5)
                if first == 3 and step.index == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
        return count.tolist(), total.item(), small.tolist(), dist.get_world_size()

    def until_the_end() -> Any:
        try:
            return main()
        except SystemExit as end:
            return end.code

    assert run_ranks(4, until_the_end, may_die=[3]) == [([12, 5, 6, 8], (12 + 5 + 6 + 8) / 2, [12] * 3, 1), 0, 0, None]


PROGRAM = """
import os, signal, sys
import torch
import allranks as dist

dist.init_process_group(timeout=30)
slot = int(os.environ["RANK"])
mine = torch.zeros(1)
state = dist.resilience.State(
    own=[mine],
    inherit=lambda theirs: mine.add_(theirs[0]),
    leave_on=[signal.SIGTERM, signal.SIGUSR1],
    checkpoints=dist.resilience.Checkpoints("checkpoints"),
    counts=(counts := {"steps": []}),
)
print("pid", slot, os.getpid(), flush=True)
ran = 0
try:
    for step in state.steps(1000000):
        with step:
            counts["steps"].append(dist.get_world_size())
            mine += 10.0**slot
            done = torch.tensor([os.path.exists("enough")])
            dist.all_reduce(done, op=dist.ReduceOp.MAX)
        ran += 1
        if ran == 20:
            print("up", flush=True)
        if done and sys.argv[1] == "one":
            break
finally:
    print("end", slot, mine.item(), sorted(set(counts["steps"])), len(counts["steps"]), state.leaving, flush=True)
"""


def _job(folder: Path, how: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "allranks", "run", "-n", "3", "--elastic", "3" if how == "all" else "2"]
    words += ["program.py", how]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _until_up(job: subprocess.Popen[str]) -> dict[int, int]:
    """Wait until all ranks train, and return their pids."""
    pids, ready = {}, 0
    assert job.stdout is not None
    while ready < 3:
        line = job.stdout.readline()
        assert line, job.communicate()
        words = line.split()
        ready += "up" in words
        if "pid" in words:
            pids[int(words[-2])] = int(words[-1])
    return pids


def _ends(out: str) -> list[str]:
    return sorted(line.partition("end ")[2] for line in out.splitlines() if "end " in line)


def test_job_continues_after_one_rank_leaves_on_sigterm(tmp_path: Path) -> None:
    with _job(tmp_path, "one") as job:
        os.kill(_until_up(job)[1], signal.SIGTERM)
        assert job.stdout is not None
        until = time.monotonic() + 60
        while "end 1" not in (line := job.stdout.readline()):
            assert time.monotonic() < until
        left = line.partition("end ")[2].split(" ", 2)
        (tmp_path / "enough").touch()
        out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert errors == ""
    assert left[2].startswith("[3] ")
    ends = _ends(out)
    assert [end.split()[0] for end in ends] == ["0", "2"]
    steps = int(ends[0].split()[-2])
    assert [end.partition(" ")[2].partition(" ")[2] for end in ends] == [f"[2, 3] {steps} False"] * 2
    # Rank 2, the backup rank of rank 1, has inherited its tensor.
    assert [float(end.split()[1]) for end in ends] == [steps, 100 * steps + float(left[1])]


def test_whole_job_leaves_on_a_signal_and_continues_when_restarted(tmp_path: Path) -> None:
    """Send the signal to the launcher, as ``sbatch --signal=USR1@120`` does. All ranks leave in one step.

    The job needs all of its ranks. The second run continues from the checkpoint of the first run.
    """
    seen = []
    for _ in range(2):
        with _job(tmp_path, "all") as job:
            _until_up(job)
            job.send_signal(signal.SIGUSR1)
            out, errors = job.communicate(timeout=60)
        assert (job.returncode, errors) == (0, ""), errors
        ends = [end.split() for end in _ends(out)]
        assert [end[0] for end in ends] == ["0", "1", "2"]
        assert len({tuple(end[2:]) for end in ends}) == 1
        seen.append(int(ends[0][-2]))
        assert [float(end[1]) for end in ends] == [seen[-1] * 10.0**slot for slot in range(3)]
    assert seen[0] < seen[1]
