"""A job file of ``allranks submit`` in a real SLURM."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from support.slurm import Slurm

FIRST = Path(__file__).parents[2] / "examples" / "first"
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"rank {os.environ['RANK']} received SIGTERM"))
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.getcwd(), flush=True)
signal.sigtimedwait([], 60)
"""


def test_sbatch_accepts_and_runs_the_job_file(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(PROGRAM)
    arguments = ("two words", "$HOME")
    command = [
        sys.executable, "-m", "allranks", "submit", "--to", "slurm", "-N", "2", "-n", "4", "--memory", "500M",
        "--time", "2m", "--partition", "tests", "--file", "job.sh", "show.py", *arguments,
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    tried = slurm.run("sbatch", "--test-only", str(tmp_path / "job.sh"))
    assert "to start at" in tried.stderr, tried.stderr
    handed_in = slurm.run("env", "--chdir", str(tmp_path), *command[:-3], "--now", *command[-3:])
    assert handed_in.stdout.strip().isdigit(), handed_in.stderr
    job = handed_in.stdout.strip()
    written = tmp_path / f"show-{job}.out"

    def lines_with(word: str) -> list[str]:
        """Wait for four lines that contain the word. Return them."""
        until = time.monotonic() + 40
        while True:
            text = written.read_text() if written.exists() else ""
            found = re.findall(rf"rank (\d {word}.*)", text)
            if len(found) == 4:
                return sorted(found)
            assert time.monotonic() < until, text or slurm.run("squeue").stdout
            time.sleep(0.1)

    assert lines_with("of") == [f"{rank} of 4 {list(arguments)} {tmp_path}" for rank in range(4)]
    # The signal that --signal=B:TERM@60 requests one minute before the time limit.
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    assert lines_with("received SIGTERM") == [f"{rank} received SIGTERM" for rank in range(4)]


def test_multinode_helper_script_of_users(slurm: Slurm) -> None:
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
