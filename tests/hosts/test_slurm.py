"""Ranks that srun starts in a real SLURM find each other without a launcher and without variables of the user."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from support import mpi_jobs
from support.slurm import Slurm

MEET = str(Path(__file__).parents[1] / "support" / "meet.py")
SECRET = "a secret of the tests, long enough"
MISSING = f'[ "$SLURM_PROCID" = "$ABSENT" ] && exit 0; exec {sys.executable} {MEET}'


def srun(slurm: Slurm, *options: str, timeout_s: str = "30", **environ: str) -> list[str]:
    """Return the output lines of a job, ordered by rank."""
    done = slurm.run("srun", *options, sys.executable, MEET, ALLRANKS_SECRET=SECRET, MEET_TIMEOUT=timeout_s, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("options", "hosts", "local"),
    [
        ("-N2 -n3", [0, 0, 1], [0, 1, 0]),
        ("-N2 -n4 --distribution=cyclic --ntasks-per-node=2", [0, 1, 0, 1], [0, 0, 1, 1]),
        ("-N1 -n2 --nodelist=node0", [0, 0], [0, 1]),
        ("-N2 -n3 --mpi=pmi2", [0, 0, 1], [0, 1, 0]),
        ("-n3 --distribution=arbitrary", [1, 0, 1], [0, 0, 1]),
    ],
)
def test_ranks_of_srun_find_each_other(
    slurm: Slurm, tmp_path: Path, options: str, hosts: list[int], local: list[int]
) -> None:
    environ = {}
    if "arbitrary" in options:  # rank 0 is not on the first node of the step
        (tmp_path / "hosts").write_text("".join(f"node{host}\n" for host in hosts))
        environ["SLURM_HOSTFILE"] = str(tmp_path / "hosts")
    names = ",".join(f"node{host}" for host in hosts)
    size = len(hosts)
    expected = [f"rank {rank} of {size} local {local[rank]} on {names}" for rank in range(size)]
    assert srun(slurm, *options.split(), **environ) == expected


def test_all_reduce_in_a_job_of_srun(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "-n3", sys.executable, MEET, "torch", ALLRANKS_SECRET=SECRET)
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 3 local 0",
        "rank 1 of 3 local 1",
        "rank 2 of 3 local 0",
    ], done.stderr


def test_batch_script_is_not_a_rank_and_starts_ranks(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    mpiexec = Path(mpi_jobs.python_with("mpich")).with_name("mpiexec")
    meet = f"{sys.executable} {MEET}"
    script.write_text(f"#!/bin/sh\n{meet}\necho --\nsrun {meet}\necho --\n{mpiexec} -n 3 {meet}\n")
    out = tmp_path / "out"
    # sbatch runs in a step and passes the variables of that step to the job.
    done = slurm.run(
        "srun", "-n1", "sbatch", "--wait", "-N2", "-n3", f"--output={out}", str(script), ALLRANKS_SECRET=SECRET
    )
    assert done.returncode == 0, done.stderr + out.read_text()
    alone, *of_launchers = out.read_text().split("--\n")
    assert "srun did not start this process. It runs alone in a job of 3 tasks (SLURM_NTASKS)" in alone, alone
    assert "rank 0 of 1 local 0 on node0" in alone, alone
    expected = [f"rank {rank} of 3 local {int(rank == 1)} on node0,node0,node1" for rank in range(3)]
    # Output of srun and of mpiexec. srun prints a line if the controller requests another attempt.
    said = [[line for line in each.splitlines() if not line.startswith("srun: ")] for each in of_launchers]
    assert list(map(sorted, said)) == [expected, expected]


def test_missing_rank_is_reported_with_its_host(slurm: Slurm) -> None:
    done = slurm.run(
        "srun", "-N2", "-n3", "sh", "-c", MISSING,
        ABSENT="2", ALLRANKS_SECRET=SECRET, MEET_TIMEOUT="1.5",
    )  # fmt: skip
    assert done.returncode != 0
    assert "1 of 3 ranks did not join in 1.5 s: missing rank 2." in done.stderr, done.stderr
    assert "Fewer ranks joined than were started: node1 (0 of 1)." in done.stderr, done.stderr


def test_missing_rank_0_is_reported(slurm: Slurm) -> None:
    done = slurm.run(
        "srun", "-N2", "-n2", "sh", "-c", MISSING,
        ABSENT="0", ALLRANKS_SECRET=SECRET, MEET_TIMEOUT="1.5",
    )  # fmt: skip
    assert done.returncode != 0
    assert "rank 0 (a server on host node0, at one of the ports " in done.stderr, done.stderr
    assert "did not answer for 1.5 s" in done.stderr, done.stderr


def test_rank_waits_for_a_name_that_does_not_resolve_yet(slurm: Slurm) -> None:
    names = slurm.hosts.hosts[1].names
    known = names.read_text()

    def learn() -> None:
        time.sleep(1.0)
        os.truncate(names, 0)
        names.write_text(known)

    names.write_text("127.0.0.1 localhost\n")
    learning = threading.Thread(target=learn)
    learning.start()
    try:
        lines = srun(slurm, "-N2", "-n2", timeout_s="20")
    finally:
        learning.join()
    assert lines == [f"rank {rank} of 2 local 0 on node0,node1" for rank in range(2)]
