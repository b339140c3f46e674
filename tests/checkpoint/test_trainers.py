"""Unmodified Lightning and Accelerate write and read allranks checkpoints: the examples in examples/trainers.

The tests need a separate environment (`make trainers`). Without it they are skipped; with ALLRANKS_TEST_ALL=1, as in
CI, they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks import checkpoint
from support.trainers import python_with

ROOT = Path(__file__).parents[2]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs an example on two ranks and returns the weights, which must be equal on both."""
    python = python_with("lightning")
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ = {**clean, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(name: str, folder: str, steps: int, *options: str) -> str:
        program = [
            ROOT / "examples" / "trainers" / name,
            "--folder",
            tmp_path / folder,
            "--steps",
            str(steps),
            *options,
        ]
        done = subprocess.run(
            [python, "-m", "allranks", "run", "-n", "2", *program],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ends = [line.partition("weights ")[2] for line in done.stdout.splitlines() if f"step {steps}: weights " in line]
        assert len(ends) == 2
        assert ends[0] == ends[1]
        return ends[0]

    return run


def names_of(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".job", ".lock")
    )


def return_to_step_5(folder: Path) -> Path:
    """Make step 5 the last checkpoint of Lightning, as if the job had ended there. Return its path."""
    (fifth,), (tenth,) = folder.glob("*step=5.ckpt"), folder.glob("*step=10.ckpt")
    shutil.rmtree(tenth) if tenth.is_dir() else tenth.unlink()
    last = folder / "last.ckpt"
    last.unlink()
    last.symlink_to(fifth.name)
    return last


def test_lightning_saves_shards_and_resumes(train: Callable[..., str], tmp_path: Path) -> None:
    weights = train("lightning_train.py", "parts", 10, "--sharded")
    last = return_to_step_5(tmp_path / "parts")
    assert names_of(last) == ["meta.pt", *(f"step-0000000000/{name}" for name in PARTS)]
    assert checkpoint.verify(last) == []
    assert checkpoint.load(last)["optimizer_0"]["state"]["net.0.weight"]["step"] == 5
    assert train("lightning_train.py", "parts", 10, "--sharded") == weights
    assert checkpoint.verify(last) == []
    loaded = checkpoint.load(last)
    assert loaded["state_dict"]["net.0.weight"].shape == (30, 8)
    assert loaded["optimizer_0"]["state"]["net.0.weight"]["step"] == 10


def test_lightning_saves_one_file_and_resumes(train: Callable[..., str], tmp_path: Path) -> None:
    weights = train("lightning_train.py", "parts", 10)
    path = return_to_step_5(tmp_path / "parts")
    assert checkpoint.load(path, weights_only=False)["global_step"] == 5
    assert train("lightning_train.py", "parts", 10) == weights
    last = checkpoint.load(path, weights_only=False)
    assert last["global_step"] == 10
    assert last["state_dict"]["net.0.weight"].shape == (30, 8)


def test_accelerate_saves_and_resumes(train: Callable[..., str], tmp_path: Path) -> None:
    weights = train("accelerate_train.py", "parts", 10)
    shutil.rmtree(tmp_path / "parts" / "step-10")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        folder = tmp_path / "parts" / "step-5" / name
        assert names_of(folder) == [f"step-0000000000/{part}" for part in PARTS]
        assert checkpoint.verify(folder) == []
    assert train("accelerate_train.py", "parts", 10) == weights
    loaded = checkpoint.load(tmp_path / "parts" / "step-10" / "pytorch_model_fsdp_0")
    assert loaded["model"]["0.weight"].shape == (30, 8)


PARTS = ("manifest.json", "part-00000.safetensors", "part-00001.safetensors")
