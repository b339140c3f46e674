"""A file of ``allranks submit`` under a real SLURM."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("slurm", reason="tests/hosts has no SLURM yet")

PROGRAM = """
import os, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
"""


def test_sbatch_takes_it_and_runs_it(slurm, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "show.py").write_text(PROGRAM)
    arguments = ("two words", "$HOME")
    command = [
        sys.executable, "-m", "allranks", "submit", "--to", "slurm", "-n", "2", "--memory", "500M", "--time", "2m",
        "--partition", "tests", "--file", "job.sh", "show.py", *arguments,
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    tried = slurm.run("sbatch", "--test-only", str(tmp_path / "job.sh"))
    assert "to start at" in tried.stderr, tried.stderr
    handed_in = slurm.run("env", "--chdir", str(tmp_path), *command[:-3], "--now", *command[-3:])
    assert handed_in.stdout.strip().isdigit(), handed_in.stderr
    written = tmp_path / f"show-{handed_in.stdout.strip()}.out"
    until = time.monotonic() + 60
    while not (written.exists() and written.read_text().count("rank") == 2):
        assert time.monotonic() < until, written.read_text() if written.exists() else slurm.run("squeue").stdout
        time.sleep(0.1)
    assert sorted(line.partition("rank ")[2] for line in written.read_text().splitlines()) == [
        f"{rank} of 2 {list(arguments)} {tmp_path}" for rank in range(2)
    ]
