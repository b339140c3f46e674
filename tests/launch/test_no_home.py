"""User without a name and a home directory, as in containers and batch systems."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
import torch
import allranks as dist

dist.init_process_group()
if os.environ.get("FAILS") == str(dist.get_rank()):
    raise SystemExit(3)
x = torch.ones(1)
dist.all_reduce(x)
print("uid", os.getuid(), "sum", x.item(), flush=True)
dist.destroy_process_group()
"""
_HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in _HOMES} | variables
    unknown = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
    return subprocess.Popen(
        [*unknown, sys.executable, *command],
        env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_jobs_on_one_host_run_without_a_home_directory(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    code, out, err = end(start("-m", "allranks", "run", "-n", "2", str(script)))
    assert (code, err) == (0, "")
    assert out.count("uid 54321 sum 2.0") == 2
    code, _, err = end(start("-m", "allranks", "run", "-n", "2", str(script), FAILS="1"))
    assert code == 3
    assert err.startswith("allranks run: rank 1 ")


def test_ranks_without_a_home_directory_require_a_secret_variable(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def both(**variables: str) -> list[tuple[int, str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
        return [end(each) for each in [start(str(script), RANK=str(rank), **place) for rank in range(2)]]

    for code, _, err in both():
        assert code == 1
        assert "ConfigError: User 54321 has no home directory" in err
        assert "Set ALLRANKS_SECRET, the same on all ranks" in err
    for code, out, err in both(ALLRANKS_SECRET="0123456789abcdef"):
        assert (code, out, err) == (0, "uid 54321 sum 2.0\n", "")


def test_doctor_warns_of_a_missing_home_directory() -> None:
    code, out, err = end(start("-m", "allranks", "doctor"))
    (line,) = [each for each in out.splitlines() if each.split()[1:2] == ["secret"]]
    assert line.startswith("warn  secret")
    assert "User 54321 has no home directory" in line
    assert (code, err) == (0, "")
