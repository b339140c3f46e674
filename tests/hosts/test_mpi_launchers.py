"""Ranks that mpirun starts and that do not use MPI, on one host and on two hosts by ssh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import mpi_jobs
from support.sshd import Ssh

MEET = str(Path(__file__).parents[1] / "support" / "meet.py")
SECRET = "a secret of the tests, long enough"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPTIONS = {
    "openmpi": ["--host", "node0,node1", "-n", "2"],
    "mpich": ["-hosts", "node0,node1", "-n", "2", "-ppn", "1"],
}
# Variables that sbatch sets for the processes of its script.
LEFT_OVER = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}


def on_two_hosts(ssh: Ssh, mpi: str, *argv: str, **environ: str) -> tuple[int, list[str]]:
    """Run this Python on two hosts with MPI's launcher. Return the exit code and the output lines of all ranks."""
    launcher = Path(mpi_jobs.python_with(mpi)).with_name("mpiexec")
    env = {**ssh.environ, **AS_ROOT, "ALLRANKS_SECRET": SECRET, **environ}
    passed = [word for name in ("ALLRANKS_SECRET", *environ) for word in ("-x", name)] if mpi == "openmpi" else []
    process = ssh.hosts.hosts[0].start([str(launcher), *OPTIONS[mpi], *passed, *argv], env)
    try:
        lines = process.communicate(timeout=60)[0].splitlines()
    finally:
        process.kill()
    return process.returncode, lines


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_of_mpirun_on_one_host(mpi: str) -> None:
    done = mpi_jobs.mpirun(mpi, 3, MEET, python=sys.executable, ALLRANKS_SECRET=SECRET, **LEFT_OVER)
    words = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:4] for line in words] == [["rank", str(rank), "of", "3"] for rank in range(3)], done.stderr
    assert {line[5] for line in words} == {"0", "1", "2"}  # Open MPI does not assign local ranks in the order of ranks
    assert len({host for line in words for host in line[7].split(",")}) == 1


def test_run_options_that_set_variables_apply_to_a_rank_of_mpirun() -> None:
    shown = 'echo "$PMI_RANK $A $OMP_NUM_THREADS $ALLRANKS_INSTEAD_OF_GLOO"'
    words = ("-x", "A=b", "--threads", "3", "--instead-of-gloo", "--", "sh", "-c", shown)
    done = mpi_jobs.mpirun("mpich", 2, "-m", "allranks", "run", *words, python=sys.executable)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0 b 3 1", "1 b 3 1"]), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_of_mpirun_on_two_hosts(ssh: Ssh, mpi: str) -> None:
    code, lines = on_two_hosts(ssh, mpi, sys.executable, MEET)
    lines = [line for line in lines if "setpgid" not in line]  # Open MPI sometimes prints this warning
    assert (code, sorted(lines)) == (0, [f"rank {rank} of 2 local 0 on node0,node1" for rank in range(2)])


def test_all_reduce_on_two_hosts(ssh: Ssh) -> None:
    code, lines = on_two_hosts(ssh, "mpich", sys.executable, MEET, "torch")
    assert (code, sorted(lines)) == (0, [f"rank {rank} of 2 local 0" for rank in range(2)])


# With MPICH's launcher alone, the other ranks would wait forever.
ENDS = "import os, time; from allranks._rendezvous.rendezvous import join; join(None, timeout_s=30).close(); "
BY_RANK = {"1": "time.sleep(0.5); 1 / 0", "0": "time.sleep(30); print('survived')"}


def test_an_exception_ends_the_job() -> None:
    body = f"{ENDS}exec({BY_RANK!r}[os.environ['PMI_RANK']])"
    done = mpi_jobs.mpirun("mpich", 2, "-c", body, python=sys.executable, timeout_s=25)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert "survived" not in done.stdout


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_rank_may_exit_before_the_others(mpi: str) -> None:
    body = f"{ENDS}time.sleep(int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])); print('ended')"
    done = mpi_jobs.mpirun(mpi, 2, "-c", body, python=sys.executable)
    assert (done.returncode, done.stdout.split()) == (0, ["ended"] * 2), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_report_an_incomplete_join(ssh: Ssh, mpi: str) -> None:
    """PMI does not report which rank is missing, so each rank reports an incomplete join.

    The ranks of Open MPI know the host of rank 0.
    """
    absent = f'[ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 0 ] && exec sleep 4; exec {sys.executable} {MEET}'
    code, lines = on_two_hosts(ssh, mpi, "sh", "-c", absent, MEET_TIMEOUT="1.5")
    assert code != 0
    said = "\n".join(lines)
    assert "rank 1 (host node1, pid " in said, said
    if mpi == "openmpi":
        assert "rank 0 (a server on host node0, at one of the ports " in said, said
        assert "did not answer for 1.5 s (last: host node0: connection refused)" in said, said
    else:
        assert (
            "rank 0 (which posts its address over PMI) did not answer for 1.5 s (last: not all ranks have connected "
            in said
        ), said
        assert "A rank that does not print this message has not called init_process_group" in said, said
