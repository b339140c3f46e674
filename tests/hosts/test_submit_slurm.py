"""A file of ``allranks submit`` under a real SLURM."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from slurm import Slurm

FIRST = Path(__file__).parents[2] / "examples" / "first"
PROGRAM = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
"""


def test_sbatch_takes_it_and_runs_it(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(PROGRAM)
    arguments = ("two words", "$HOME")
    command = [
        sys.executable, "-m", "allranks", "submit", "--to", "slurm", "-N", "2", "-n", "2", "--memory", "500M",
        "--time", "2m", "--partition", "tests", "--file", "job.sh", "show.py", *arguments,
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    tried = slurm.run("sbatch", "--test-only", str(tmp_path / "job.sh"))
    assert "to start at" in tried.stderr, tried.stderr
    handed_in = slurm.run("env", "--chdir", str(tmp_path), *command[:-3], "--now", *command[-3:])
    assert handed_in.stdout.strip().isdigit(), handed_in.stderr
    written = tmp_path / f"show-{handed_in.stdout.strip()}.out"
    until = time.monotonic() + 40
    while not (written.exists() and written.read_text().count("rank") == 4):
        assert time.monotonic() < until, written.read_text() if written.exists() else slurm.run("squeue").stdout
        time.sleep(0.1)
    assert sorted(re.findall(r"rank (.*)", written.read_text())) == [
        f"{rank} of 4 {list(arguments)} {tmp_path}" for rank in range(4)
    ]


def test_the_helper_of_users(slurm: Slurm) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    helper = str(FIRST / "slurm_multinode_helper.sh")
    done = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", "bash", helper, PATH=path)
    short = slurm.run(
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        "allranks",
        "run",
        "--nproc-per-node",
        "2",
        str(FIRST / "helloworld.py"),
        PATH=path,
    )
    for said in (done, short):
        assert said.returncode == 0, said.stderr
        found = sorted(re.findall(r"\[http://(\S+?):\d+\] hello from \[(\w+):native\] process (\d)/4", said.stdout))
        assert [(host, rank) for _, host, rank in found] == [
            ("node0", "0"),
            ("node0", "1"),
            ("node1", "2"),
            ("node1", "3"),
        ], said.stdout + said.stderr
