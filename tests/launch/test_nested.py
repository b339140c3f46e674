"""Nested jobs: the innermost launcher determines the rank of a process, even with a shell in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.mpi_jobs import python_with

INNER = """
import os, sys, torch, allranks as dist
dist.init_process_group(timeout=60)
total = torch.tensor(10.0 ** int(sys.argv[1]))
dist.all_reduce(total)
os.write(1, f"of {sys.argv[1]}: rank {dist.get_rank()} of {dist.get_world_size()}, sum {total.item():.0f}\\n".encode())
"""

OUTER = """
import os, subprocess, sys
if os.environ["JOINED"] == "1":  # the outer job continues after the inner ones
    import torch, allranks as dist
    dist.init_process_group(timeout=60)
code = subprocess.run([*sys.argv[1:], "inner.py", os.environ["RANK"]], timeout=100).returncode
if os.environ["JOINED"] == "1":
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
sys.exit(code)
"""

SPAWNED = """
import os, sys
import torch.multiprocessing, allranks.multiprocessing
def main(index, how, outer, port):
    if how == "variables":
        os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv[1] = outer
    exec(open("inner.py").read(), {})
if __name__ == "__main__":
    package = torch if sys.argv[1] == "variables" else allranks
    rank = os.environ["RANK"]
    package.multiprocessing.spawn(main, (sys.argv[1], rank, int(sys.argv[2]) + int(rank)), nprocs=2)
"""

RUN = [sys.executable, "-m", "allranks", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def _run(folder: Path, *words: str, **environ: str) -> str:
    for name, text in (("inner.py", INNER), ("outer.py", OUTER), ("spawned.py", SPAWNED)):
        (folder / name).write_text(text)
    variables = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **variables, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _assert_own_jobs(out: str, outer: int) -> None:
    """Check that each outer rank ran a job of two ranks whose sums contain no value of another job."""
    for job in range(outer):
        for rank in range(2):
            line = f"of {job}: rank {rank} of 2, sum {2 * 10**job}"
            assert out.count(line) == 1, out


# Each case starts processes that import torch, so not every pair of values is a case.
@pytest.mark.parametrize(
    ("inner", "joined", "outer"),
    [
        pytest.param([*RUN, "-n", "2"], "0", 2, id="allranks run, before the outer world exists"),
        pytest.param([*RUN, "-n", "2"], "1", 2, id="allranks run"),
        pytest.param(
            [sys.executable, "-m", "allranks", "torchrun", "--nproc-per-node", "2"], "1", 1, id="allranks torchrun"
        ),
        pytest.param([*TORCHRUN, "--nproc-per-node", "2"], "1", 1, id="torchrun"),
    ],
)
def test_launcher_in_a_rank_starts_a_separate_job(tmp_path: Path, inner: list[str], joined: str, outer: int) -> None:
    _assert_own_jobs(_run(tmp_path, *RUN, "-n", str(outer), "outer.py", *inner, JOINED=joined), outer)


@pytest.mark.parametrize(("mpi", "outer"), [("openmpi", 2), ("mpich", 1)])
def test_mpirun_in_a_rank_starts_a_separate_job(tmp_path: Path, mpi: str, outer: int) -> None:
    mpirun = [str(Path(python_with(mpi)).parent / "mpirun"), *(["--oversubscribe"] if mpi == "openmpi" else [])]
    out = _run(tmp_path, *RUN, "-n", str(outer), "outer.py", *mpirun, "-n", "2", sys.executable, JOINED="0")
    _assert_own_jobs(out, outer)


@pytest.mark.parametrize("how", ["variables", "ours"])
def test_processes_that_a_rank_spawns_form_a_separate_job(tmp_path: Path, how: str) -> None:
    port = str(20_000 + os.getpid() % 10_000)
    _assert_own_jobs(_run(tmp_path, *RUN, "-n", "1", "spawned.py", how, port), 1)


def test_processes_spawned_in_the_only_rank_of_torchrun_form_a_job(tmp_path: Path) -> None:
    _assert_own_jobs(_run(tmp_path, *TORCHRUN, "--nproc-per-node", "1", "spawned.py", "ours", "0"), 1)


def test_shell_or_master_port_of_the_script_does_not_change_the_job(tmp_path: Path) -> None:
    """Check that ranks use the store of the launcher even if the script sets the address of rank 0."""
    script = "import os; os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='1'); exec(open('inner.py').read())"
    (tmp_path / "own.py").write_text(script)
    for words in (["own.py", "0"], ["--", "bash", "-c", f"{sys.executable} inner.py 0; true"]):
        _assert_own_jobs(_run(tmp_path, *RUN, "-n", "2", *words), 1)
