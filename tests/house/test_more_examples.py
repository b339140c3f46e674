"""The examples of trainings: each runs, with fewer steps, and prints what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNSET}
LAUNCHED = [sys.executable, "-m", "allranks", "run", "-n", "2"]


def said(*words: str | Path) -> str:
    done = subprocess.run(list(map(str, words)), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLED = """
import os, runpy, signal, sys
import torch

class Dies(torch.optim.AdamW):
    made = 0
    def step(self, *args, **kwargs):
        Dies.made += 1
        if Dies.made == 70 and (os.environ["RANK"], os.environ["ALLRANKS_START"]) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*args, **kwargs)

torch.optim.AdamW = Dies
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_gpt_survives_a_rank(tmp_path: Path) -> None:
    """The losses are those of a training that nobody killed."""
    example = str(EXAMPLES / "gpt/train.py")
    (tmp_path / "killed.py").write_text(KILLED.replace("sys.argv[1]", repr(example)))
    calm = said(*LAUNCHED, example, "--steps", "100")
    done = subprocess.run(
        [*LAUNCHED, "--elastic", "1", str(tmp_path / "killed.py"), "--steps", "100"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; started again" in done.stderr
    assert done.stdout == calm
    assert (found := re.search(r"step 100: loss ([\d.]+)", calm))
    assert float(found[1]) < 1.9


@pytest.mark.parametrize(("ranks", "options"), [("2", []), ("3", ["--quantise"])])
def test_diloco(ranks: str, options: list[str]) -> None:
    printed = said(*LAUNCHED[:-1], ranks, EXAMPLES / "diloco/train.py", *options)
    assert (found := re.fullmatch(r"\[0\] ([\d.]+)% after 300 steps in [\d.]+ s\n", printed))
    assert float(found[1]) > 85


def test_parameter_server() -> None:
    line = said(*LAUNCHED[:-1], "3", EXAMPLES / "parameter_server/train.py", "--updates", "120")
    assert (found := re.fullmatch(r"\[0\] 240 gradients, 120 of each worker: accuracy (\d+)%\n", line))
    assert int(found[1]) > 80


@pytest.mark.parametrize("way", ["fsdp", "tensor"])
def test_sharded(way: str) -> None:
    assert "as one process: True" in said(*LAUNCHED, EXAMPLES / "sharded/train.py", way)


def test_sweep() -> None:
    lines = said(sys.executable, EXAMPLES / "sweep/sweep.py").splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("best learning rate: ")
    assert lines[-1].removeprefix("best learning rate: ") in ("0.1", "0.32", "1")
