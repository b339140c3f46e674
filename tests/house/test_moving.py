"""The programs of docs/moving.md run unchanged, and the names in its tables exist."""

import os
import re
import sys
from pathlib import Path

import pytest

import allranks
from support import warm
from support.mpi_jobs import mpirun

PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text()
PROGRAMS = {re.match(r"# (\w+\.py)", block)[1]: block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}  # type: ignore[index]
PRINTED = {
    "from_torch.py": r"\[0\] rank 0: the weights sum to (-?\d\.\d+)\n\[1\] rank 1: the weights sum to \1\n",
    "from_torchrun.py": r"\[0\] attempt 1 began with step 3; the weight is 35\n",
    "from_horovod.py": "".join(
        rf"\[{n}\] rank {n} of 2: loss below 0\.001: True, weights \[1\.0, 1\.0, 1\.0, 1\.0\]\n" for n in (0, 1)
    ),
    "from_mpi4py.py": r"\[0\] pi is about 3\.14159; rank 1 is on the left\n",
    "from_ray.py": r"2 ranks, all below 0\.1: True\n",
    "from_accelerate.py": r"\[0\] the newest checkpoint is of step 4\n",
}
UNSET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
ENVIRON = {name: value for name, value in os.environ.items() if name not in UNSET}


def test_every_program_is_run() -> None:
    assert set(PROGRAMS) == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_program(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PROGRAMS[name])
    start = [] if "__main__" in PROGRAMS[name] else ["-m", "allranks", "run", "-n", "2"]
    if name == "from_torchrun.py":
        start = ["-m", "allranks", "torchrun", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = warm.run(
        [sys.executable, *start, name],
        cwd=tmp_path,
        env={**ENVIRON, "TMPDIR": str(tmp_path)},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[name], "".join(sorted(done.stdout.splitlines(keepends=True)))), done.stdout


def test_layer_prints_the_same_with_mpi4py_and_with_allranks(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    printed = {}
    for version, other in (("before", "+"), ("after", "-")):
        program = tmp_path / version / "layer.py"
        program.parent.mkdir()
        program.write_text("".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] != other))
        if version == "before":
            assert "dist." not in program.read_text()
            done = mpirun("openmpi", 3, str(program))
        else:
            assert "MPI" not in program.read_text()
            done = warm.run(
                [sys.executable, "-m", "allranks", "run", "-n", "3", str(program)], env=ENVIRON, timeout=100
            )
        assert done.returncode == 0, done.stderr
        printed[version] = sorted(re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines())
    assert len(printed["before"]) == 15
    assert printed["after"] == printed["before"]


def test_names_in_moving_page_exist() -> None:
    names = set(re.findall(r"\bdist\.(\w+(?:\.\w+)*)", PAGE))
    assert len(names) > 25
    for name in names - {"py"}:
        value = allranks
        for part in name.split("."):
            value = getattr(value, part)
