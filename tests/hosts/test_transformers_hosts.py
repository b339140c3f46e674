"""Tensor parallelism of transformers between two hosts generates the same tokens on allranks as on gloo.

The program and its environment are those of tests/plugin/test_transformers.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster
from support.jobs import Jobs, finish, jobs
from support.trainers import python_with

SERVE = Path(__file__).parents[2] / "examples" / "serve"
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def made(three_hosts: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(three_hosts, {**os.environ, **QUIET}, tmp_path) as made:
        yield made


def test_tokens_equal_those_on_gloo(made: Jobs, three_hosts: Cluster, tmp_path: Path) -> None:
    python, model = str(python_with("transformers")), str(tmp_path / "model")
    sizes = ["--hidden", "64", "--layers", "3"]
    make = [python, str(SERVE / "make_model.py"), model, *sizes]
    subprocess.run(make, env={**os.environ, **QUIET}, check=True, capture_output=True, timeout=100)

    def tokens(*options: str) -> list[str]:
        """Start the same command on both hosts, each with one rank; return the tokens."""
        hosts = ["-N", "2", "--nproc-per-node", "1", "--master-addr", three_hosts.hosts[0].address]
        words = ["-m", "allranks", "run", *hosts, *options, "--node-rank"]
        program = [str(SERVE / "generate.py"), model, "--tokens", "32", "--repeat", "0"]
        started = [
            # By its own name, a host finds its loopback address, which gloo would publish.
            made.start_any(node, python, *words, str(node), *program, torch=True, GLOO_SOCKET_IFNAME="eth0")
            for node in (0, 1)
        ]
        dones = [finish(process) for process in started]
        assert [done.code for done in dones] == [0, 0], dones
        assert ("the program requested gloo" in dones[0].err) == bool(options), dones
        lines = [line for done in dones for line in done.out.splitlines() if " tokens " in line]
        assert len(lines) == 2
        first, second = (line.partition(" tokens ")[2].split() for line in lines)
        assert first == second
        return first

    on_gloo = tokens()
    assert len(set(on_gloo)) > 8
    assert tokens("--instead-of-gloo") == on_gloo
