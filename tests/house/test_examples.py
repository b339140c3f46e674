"""The small examples run, and print what their users' programs print under torch.distributed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_jobs import mpirun

FIRST = Path(__file__).parents[2] / "examples" / "first"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def lines(*command: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], env={**ENVIRONMENT, **environ}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def launched(name: str, ranks: int) -> list[str]:
    return lines("-m", "allranks", "run", "-n", str(ranks), str(FIRST / name))


def test_hello() -> None:
    host = socket.gethostname()
    assert launched("hello.py", 2) == [f"[{r}] hello from [{host}:native] process {r}/2" for r in range(2)]


def test_start() -> None:
    assert launched("start.py", 3) == sorted(
        [
            "[0] reduce: 6",
            "[0] gather: [0.0, 1.0, 2.0]",
            *(f"[{r}] global rank {r}, local rank {r}, of 3" for r in range(3)),
            *(f"[{r}] all_reduce: 6" for r in range(3)),
            *(f"[{r}] all_gather: [0.0, 1.0, 2.0]" for r in range(3)),
        ]
    )


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ptdist(mpi: str) -> None:
    done = mpirun(mpi, 2, str(FIRST / "ptdist.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "Rank-0 has sent the following tensor to Rank-1",
        "Rank-1 has recieved the following tensor from Rank-0",
        "tensor([ 1., -1.])",
        "tensor([ 1., -1.])",
    ]


def test_walkthrough(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = lines(
        str(FIRST / "walkthrough.py"), "--world-size", "3", MASTER_PORT=str(port), XDG_CONFIG_HOME=str(tmp_path)
    )
    # Nobody keeps the processes' lines apart here.
    assert all("".join(said).count(f"rank {r} has data 1.0") == 1 for r in range(3))
