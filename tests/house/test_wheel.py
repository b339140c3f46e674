"""The wheel: one for every Python from 3.10 on, and not tied to a version of torch."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_wheel(tmp_path: Path) -> None:
    # Built where nothing was built before; with this environment's build tools, to spare a download.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "build", "out", "*.so", "__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), "."],
        cwd=source,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = archive.namelist()
    assert {"allranks/py.typed", "allranks/tools/submit/indexed_job.yaml"} < set(names)
    assert "allranks/_core.abi3.so" in names
    assert not [name for name in names if name.startswith(("tests", "core"))]
    needed = subprocess.run(
        ["readelf", "-d", str(tmp_path / "installed/allranks/_core.abi3.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert libraries
    assert not [
        name for name in libraries if not name.startswith(("libstdc++", "libm.", "libgcc_s", "libc.", "ld-linux"))
    ]
    # It works where it lies, without torch being imported.
    code = """
import sys
from allranks import _core

_core.create_segment(0, 1, _core.Sizes())
assert 'torch' not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "installed")}, cwd=tmp_path, check=True
    )
