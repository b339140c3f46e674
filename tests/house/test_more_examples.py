"""The training examples run with fewer steps and print the documented output."""

import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import warm
from support.shown import assert_as_shown

EXAMPLES = Path(__file__).parents[2] / "examples"
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNSET}
LAUNCHED = [sys.executable, "-m", "allranks", "run", "-n", "2"]


def said(*words: str | Path) -> str:
    done = warm.run(list(map(str, words)), env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


KILLED = """
import os, runpy, signal, sys
import torch

class Dies(torch.optim.AdamW):
    made = 0
    def step(self, *args, **kwargs):
        Dies.made += 1
        if Dies.made == KILLED_IN and os.environ["RANK"] in THOSE and os.environ.get("ALLRANKS_START", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*args, **kwargs)

torch.optim.AdamW = Dies
runpy.run_path(PROGRAM, run_name="__main__")
"""


@pytest.fixture(scope="module")
def calm() -> str:
    """Output of a training of 120 steps without failures."""
    return said(*LAUNCHED, EXAMPLES / "gpt/train.py", "--steps", "120")


def killed(folder: Path, step: int, ranks: str, options: list[str], arguments: list[str]) -> tuple[str, str]:
    """Run the same training with these ranks killed in this step; return the outputs of training and launcher."""
    program = folder / "killed.py"
    names = {"KILLED_IN": str(step), "THOSE": repr(ranks), "PROGRAM": repr(str(EXAMPLES / "gpt/train.py"))}
    program.write_text(re.sub("KILLED_IN|THOSE|PROGRAM", lambda name: names[name[0]], KILLED))
    done = warm.run(
        [*LAUNCHED, *options, str(program), "--steps", "120", *arguments],
        env=ENVIRONMENT,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_gpt_example_prints_the_documented_output(calm: str) -> None:
    assert_as_shown("gpt", calm)
    assert (found := re.search(r"step 100: loss ([\d.]+)", calm))
    assert float(found[1]) < 1.9


def test_gpt_example_survives_the_death_of_a_rank(tmp_path: Path, calm: str) -> None:
    """The losses equal those of a training without failures."""
    printed, told = killed(tmp_path, 70, "1", ["--elastic", "1"], [])
    assert "was killed by SIGKILL; restarted" in told
    assert printed == calm


def test_gpt_example_survives_the_death_of_all_ranks(tmp_path: Path, calm: str) -> None:
    """The training continues from its checkpoint of step 100."""
    printed, told = killed(tmp_path, 110, "01", ["--restarts", "1"], ["--checkpoints", str(tmp_path / "kept")])
    assert "was killed by SIGKILL" in told
    assert "restarting (1 of 1)" in told
    assert printed == calm


@pytest.mark.parametrize(("ranks", "options"), [("2", []), ("3", ["--quantise"])])
def test_diloco_example_prints_the_documented_output(ranks: str, options: list[str]) -> None:
    printed = said(*LAUNCHED[:-1], ranks, EXAMPLES / "diloco/train.py", *options)
    assert_as_shown("diloco", printed)
    assert float(printed.split()[1].removesuffix("%")) > 85


def test_parameter_server_example_prints_the_documented_output() -> None:
    printed = said(*LAUNCHED[:-1], "3", EXAMPLES / "parameter_server/train.py", "--updates", "120")
    assert_as_shown("parameter_server", printed)
    assert "240 gradients, 120 of each worker" in printed
    assert int(printed.split()[-1].removesuffix("%")) > 80


def test_rollout_example_prints_the_documented_output() -> None:
    """The roles are two jobs, which run at the same time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    options = ["--address", url, "--mib", "8", "--bucket", "1", "--rounds", "1"]
    program = EXAMPLES / "rollout/send_weights.py"
    with ThreadPoolExecutor() as jobs:
        trainers, workers = jobs.map(lambda role: said(*LAUNCHED, program, role, *options), ("trainer", "worker"))
    assert_as_shown("rollout", trainers)
    assert workers == ""


def test_sharded_example_prints_the_documented_output() -> None:
    assert_as_shown(
        "sharded", "".join(said(*LAUNCHED, EXAMPLES / "sharded/train.py", way) for way in ("fsdp", "tensor"))
    )


def test_sweep_example_prints_the_documented_output() -> None:
    printed = said(sys.executable, EXAMPLES / "sweep/sweep.py")
    assert_as_shown("sweep", printed)
    assert printed.splitlines()[-1].removeprefix("best learning rate: ") in ("0.1", "0.32", "1")
