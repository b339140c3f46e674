"""Examples in which one script controls all workers, started as a user starts them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.remote.master.master import Master
from support import warm
from support.shown import assert_as_shown

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, PIPELINE = EXAMPLES / "one_script" / "digits.py", EXAMPLES / "pipeline" / "train.py"
LAST_LINE = re.compile(r"test accuracy ([\d.]+)%, loss ([\d.]+), (\d) workers, [\d.]+ s")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {k: v for k, v in os.environ.items() if k not in mine and not k.startswith("ALLRANKS_")}
    command = [sys.executable, *map(str, words)]
    return warm.run(command, timeout=100, env=environ)


def test_digits_example_reaches_97_percent_accuracy() -> None:
    done = run(DIGITS, "--epochs", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert_as_shown("one_script", done.stdout)
    said = LAST_LINE.fullmatch(done.stdout.strip())
    assert said, done.stdout
    assert float(said[1]) >= 97
    assert said[3] == "2"


def test_digits_example_runs_under_the_launcher() -> None:
    done = run("-m", "allranks", "run", "--mode", "master", "-n", "4", DIGITS, "--epochs", "1")
    assert (done.returncode, done.stderr) == (0, "")
    said = LAST_LINE.search(done.stdout)
    assert said, done.stdout
    assert said[3] == "3"


def test_pipeline_computes_the_weights_of_a_single_process(mw: Master, as_many_threads: None) -> None:
    train = runpy.run_path(str(PIPELINE))["train"]
    train.__globals__["WIDTH"] = 64
    here, expected, _ = train(["cpu", "cpu"], 2, 4, 1, lambda: None)
    for in_flight in (4, 1):
        there, losses, _ = train(["worker:1", "worker:2"], 2, 4, in_flight, mw.synchronize)
        assert losses == expected
        for half, on in zip(there, ("worker:1", "worker:2"), strict=True):
            assert {str(each.device) for each in half.parameters()} == {on}
        weights = [[each.tolist() for half in halves for each in half.parameters()] for halves in (here, there)]
        assert weights[0] == weights[1]


def test_pipeline_example_prints_the_documented_output() -> None:
    done = run(PIPELINE, "--steps", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert_as_shown("pipeline", done.stdout)
    first, second, _ = done.stdout.splitlines()
    losses = [re.search(r"loss ([\d.]+ to [\d.]+) in [\d.]+ s", line)[1] for line in (first, second)]  # type: ignore[index]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("words", [(DIGITS, "--workers", "0"), (PIPELINE, "--micro-batches", "5")])
def test_wrong_arguments(
    words: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(words[0]), run_name="__main__")
    assert "at least 1" in capsys.readouterr().err
