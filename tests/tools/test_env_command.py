"""``allranks env``: its report on an environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks._cluster.detection import CHOICES
from allranks.tools import env

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


def said(environ: dict[str, str]) -> str:
    return env.render(env.collect(environ)).partition("\n\n")[2]


def test_environment_of_a_rank_is_described() -> None:
    assert (
        said(STEP | {"ALLRANKS_SECRET": "0123456789abcdef", "ALLRANKS_DEBUG": "INFO"})
        == """\
A program here is rank 2 of 3 (slurm)
  local rank 0 of 1
  node       1 of 2
  rank 0 on  node1
  hosts      node1:2, node2:1

allranks run here runs it in place, as rank 2 of 3 (slurm)

Because of:
  SLURM_STEP_NUM_TASKS=3         The number of processes.
  SLURM_PROCID=2                 The number of this process.
  SLURM_LOCALID=0                Its number on this node.
  SLURM_NODEID=1                 The number of this node.
  SLURM_STEP_NUM_NODES=2         The number of nodes.
  SLURM_STEP_ID=0                The step: srun started this process.
  SLURM_STEP_NODELIST=node[1-2]  The nodes of this step.
  SLURM_STEP_TASKS_PER_NODE=2,1  The number of tasks on each of these nodes.
  SLURM_JOB_ID=17                The job.

Also set:
  ALLRANKS_SECRET=(not shown)  Secret of the job, at least 16 characters.
  ALLRANKS_DEBUG=INFO          Debug level: OFF (or 0), INFO, DETAIL (or 1). Overrides torch's variable."""
    )


def test_empty_environment_is_described() -> None:
    assert said({}) == "A program here runs alone, as rank 0 of 1\n\nallranks run here starts all ranks on this host"


def test_allocation_is_described_with_hint() -> None:
    batch = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-20]", "SLURM_NTASKS": "20"}
    text = said(batch)
    assert "A program here runs alone, as rank 0 of 1" in text
    assert "allranks run here starts the ranks on 20 nodes of this allocation, by " in text
    assert "  hosts      node1, node2, node3, node4, node5, node6, node7, node8, and 12 more" in text
    assert "\nPossibly a mistake: srun did not start this process" in text


def test_incomplete_environment_is_reported() -> None:
    report = env.collect({"PMI_RANK": "1"})
    assert report.program is report.launcher is None
    assert len(report.trouble) == 1
    assert "Error: PMI_SIZE is not set, but PMI_RANK=1 is" in env.render(report)


@pytest.mark.parametrize(("environ", "code"), [(STEP, 0), (STEP | {"SLURM_PROCID": "9"}, 2)])
def test_env_command_works_without_torch(tmp_path: Path, environ: dict[str, str], code: int) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))}
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "env", "--json"],
        env=clean | environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    report = json.loads(done.stdout)
    if code == 0:
        assert report["program"]["rank"] == 2
        assert report["program"]["hosts"][0] == {"name": "node1", "count": 2}
    else:
        assert "SLURM_PROCID='9': expected a whole number, in 0..2" in report["trouble"][0]


def test_unknown_override_lists_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert env.main(["--env", "slrum"]) == 2
    said = capsys.readouterr().err
    assert all(choice in said for choice in CHOICES)
