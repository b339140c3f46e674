"""torchmetrics, unchanged, computes the same values on groups of allranks as on gloo.

The program is examples/trainers/torchmetrics_values.py. Lightning installs torchmetrics, in a separate environment
(`make trainers`). Without it the test is skipped. If ALLRANKS_TEST_ALL=1, as in CI, the test fails instead.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.trainers import python_with

ROOT = Path(__file__).parents[2]


def values(backend: str) -> dict[str, list[str]]:
    """Run the program; return the lines that each rank prints, by rank."""
    command = [
        python_with("torchmetrics"),
        "-m",
        "allranks",
        "run",
        "-n",
        "2",
        ROOT / "examples/trainers/torchmetrics_values.py",
    ]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--backend", backend],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return {rank: [line.removeprefix(rank) for line in lines if line.startswith(rank)] for rank in ("[0] ", "[1] ")}


def test_metric_values_equal_those_of_gloo() -> None:
    ours = values("allranks")
    assert ours == values("gloo")
    assert ours["[0] "] == ours["[1] "]
    assert [line.split()[0] for line in ours["[0] "]] == [
        "MulticlassAccuracy", "MulticlassAUROC", "MulticlassConfusionMatrix", "MeanSquaredError", "PearsonCorrCoef",
    ]  # fmt: skip
