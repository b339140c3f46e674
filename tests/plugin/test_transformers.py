"""Tensor parallelism of transformers, unchanged, generates the same tokens on allranks as on gloo.

The program is examples/serve/generate.py, on a small Llama with random weights. transformers is in a separate
environment (`make trainers`). Without it the test is skipped. If ALLRANKS_TEST_ALL=1, as in CI, the test fails instead.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.trainers import python_with

SERVE = Path(__file__).parents[2] / "examples" / "serve"
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOTICE = "the program requested gloo"


def run(*words: str | Path) -> tuple[list[str], str]:
    """Run a command with transformers; return the lines of its output and its errors."""
    clean = {name: value for name, value in os.environ.items() if name not in UNSET}
    done = subprocess.run(
        [python_with("transformers"), *words],
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


def tokens(model: Path, options: list[str], arguments: list[str]) -> tuple[list[list[str]], str]:
    """Generate on two ranks; return the tokens of each rank, and the errors."""
    launch = ["-m", "allranks", "run", "-n", "2", *options, SERVE / "generate.py", model, *arguments]
    printed, errors = run(*launch, "--tokens", "32", "--batch", "2", "--repeat", "0")
    return [line.partition(" tokens ")[2].split() for line in sorted(printed) if " tokens " in line], errors


def test_tokens_equal_those_on_gloo(tmp_path: Path) -> None:
    model = tmp_path / "model"
    run(SERVE / "make_model.py", model, "--hidden", "64", "--layers", "3")
    on_gloo, errors = tokens(model, [], [])
    assert NOTICE not in errors
    assert on_gloo[0] == on_gloo[1]
    assert len(on_gloo[0]) == 64
    assert len(set(on_gloo[0])) > 16  # a model that repeats one token would hide wrong sums
    replaced, errors = tokens(model, ["--instead-of-gloo"], [])
    assert NOTICE in errors
    assert replaced == on_gloo
    requested, _ = tokens(model, [], ["--backend", "allranks"])
    assert requested == on_gloo
