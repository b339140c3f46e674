"""The small examples run and print the same as the users' programs under torch.distributed."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import warm
from support.mpi_jobs import mpirun

FIRST = Path(__file__).parents[2] / "examples" / "first"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def lines(*command: str, **environ: str) -> list[str]:
    done = warm.run([sys.executable, *command], env={**ENVIRONMENT, **environ})
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def launched(name: str, ranks: int) -> list[str]:
    return lines("-m", "allranks", "run", "-n", str(ranks), str(FIRST / name))


def test_helloworld_prints_rank_and_master_address() -> None:
    said = launched("helloworld.py", 2)
    for rank, line in enumerate(said):
        hello = f"hello from [{socket.gethostname()}:native] process {rank}/2"
        assert re.fullmatch(rf"\[{rank}\] \[http://127\.0\.0\.1:\d+\] {re.escape(hello)}", line)
    assert len(said) == 2


def test_check_config_prints_torch_versions_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FIRST / "check_config.py"))
    devices = torch.cuda.device_count()
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        f"torch version : {torch.__version__}",
        f"torch git version : {torch.version.git_version}",
        f"torch version cuda : {torch.version.cuda}",
        f"number of cuda device(s) : {devices}",
    ]
    assert len(said) == 4 + devices


def test_slurm_multinode_helper_starts_two_ranks(tmp_path: Path) -> None:
    """Run the helper with simulated srun variables, a stand-in for scontrol, and torch's launcher."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho localhost\n")
    scontrol.chmod(0o755)
    path = [str(tmp_path), str(Path(sys.executable).parent), ENVIRONMENT["PATH"]]
    digits = f"0{os.getpid() % 1000:03d}"
    done = subprocess.run(
        ["bash", "--noprofile", str(FIRST / "slurm_multinode_helper.sh"), "--backend", "gloo"],
        env={
            **ENVIRONMENT, "PATH": os.pathsep.join(path), "SLURM_JOB_ID": f"471{digits}",
            "SLURM_NNODES": "1", "SLURM_NODEID": "0", "LAUNCHER": "torch.distributed.launch",
        },
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where = f"[http://localhost:{15000 + int(digits)}] hello from [{socket.gethostname()}:gloo]"
    assert all(done.stdout.count(f"{where} process {rank}/2") == 1 for rank in range(2)), done.stdout


@pytest.mark.parametrize("launched", [False, True])
def test_pbs_example_writes_a_log_per_rank(tmp_path: Path, launched: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(FIRST / "pbs.py")
    command = ["-m", "allranks", "run", "-n", "2", program] if launched else [program, "--world_size=2"]
    done = warm.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**ENVIRONMENT, "MASTER_PORT": str(port), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"Rank +{rank} +has data +tensor\(1\.\)", done.stdout) for rank in range(2)) or not launched
    for rank in range(2):
        logged = (tmp_path / f"process_{rank}.log").read_text()
        assert f"[INFO]: Initialized process group: Rank {rank} out of 2\n" in logged
        assert logged.endswith(f"[INFO]: Rank within Default Process Group: {rank}\n")
    assert "Rank within Default Process Group: 0" in done.stderr
    assert "Rank within Default Process Group: 1" not in done.stderr  # Rank 1 logs into its own file.


def test_start_example_prints_results_of_collectives() -> None:
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
def test_ptdist_example_sends_a_tensor_over_mpi(mpi: str) -> None:
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
    # Without a launcher the lines of the processes can be interleaved, so count occurrences.
    assert all("".join(said).count(f"rank {r} has data 1.0") == 1 for r in range(3))
