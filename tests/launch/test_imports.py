"""Analysis of the source of a program by the launcher, with programs of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launch.ranks.imports import Imports, read_imports
from allranks.launch.spec.target import Target


def read(folder: Path, kind: str = "script", name: str = "", **files: str) -> Imports | None:
    """Write files and analyze the first one as the program. ``__`` in a name represents a slash."""
    for file, source in files.items():
        path = folder / (file.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = str(folder / f"{next(iter(files))}.py")
    return read_imports(Target(kind, name or script))  # type: ignore[arg-type]


def test_modules_beside_the_script_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        main="import os.path, helper\nfrom parts.first import run",
        helper="from torch.optim import *\nimport main, helper",  # a circular import
        parts__first="from .second import x\nfrom . import third\nfrom .. import above",
        parts__second="import numpy as np",
        parts__third="def f():\n    from allranks import data",
    )
    assert found is not None
    assert found.all_known
    assert {"os.path", "torch.optim", "numpy", "allranks"} <= found.modules
    assert not {"helper", "main", "parts", "parts.first"} & found.modules
    assert len(found.sources) == 5


def test_init_module_of_a_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("import json")
    (tmp_path / "pack/deep.py").write_text("from pack import other")
    (tmp_path / "pack/other.py").write_text("import csv")
    found = read(tmp_path, main="import pack.deep")
    assert found is not None
    assert found.modules == {"json", "csv"}


def test_module_in_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__main__.py").write_text("from .train import main")
    (tmp_path / "pack/train.py").write_text("import torch.optim")
    for name in ("pack", "pack.train"):
        found = read_imports(Target("module", name))
        assert found is not None
        assert found.modules == {"torch.optim"}
    assert read_imports(Target("module", "json.tool")) is None


@pytest.mark.parametrize(
    "source",
    ["__import__(name)", "exec(text)", "import runpy", "from importlib import util", "import broken", "import large"],
    ids=lambda line: line.split("(")[0],
)
def test_dynamic_and_unreadable_imports_are_reported_as_unknown(tmp_path: Path, source: str) -> None:
    found = read(tmp_path, main=source, broken="def", large="x = 1\n" * 50_000)
    assert found is not None
    assert not found.all_known


def test_unreadable_program_has_no_analysis(tmp_path: Path) -> None:
    assert read(tmp_path, main="import") is None
    assert read_imports(Target("script", str(tmp_path / "nothing.py"))) is None


def test_torch_is_not_read_as_a_part_of_the_program(tmp_path: Path) -> None:
    found = read(tmp_path, main="import torch\nfrom allranks.nn import parallel", torch="import json", allranks="")
    assert found is not None
    assert found.modules == {"torch", "allranks.nn"}


@pytest.mark.parametrize(
    ("source", "prepares"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'", True),
        ("from os import environ\nenviron.setdefault('TORCH_LOGS', 'dynamo')", True),
        ("import os\nos.environ.update(MKL_NUM_THREADS='1')", True),
        ("import os\nos.environ.update({'PYTORCH_ALLOC_CONF': ''})", True),
        ("import os\nos.environ.update(read())", True),
        ("import os\nfor name in read(): os.environ[name] = ''", True),
        ("import os\nos.putenv('KMP_BLOCKTIME', '0')", True),
        ("from dotenv import load_dotenv\nload_dotenv()", True),
        ("import os\nos.environ['MASTER_PORT'] = '1'\nos.environ.update(RANK='0', TORCH_NCCL_DEBUG='1')", False),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])", False),
        ("import sys\nsys.path.insert(0, 'vendor')", False),
    ],
)
def test_variables_that_torch_reads_on_import_are_detected(tmp_path: Path, source: str, prepares: bool) -> None:
    found = read(tmp_path, main="import helper", helper=source)
    assert found is not None
    assert found.prepares_torch == prepares


def test_other_torch_package_on_the_module_path_is_detected(tmp_path: Path) -> None:
    """Check a torch package beside the program, and one in a folder that may be on the module path."""
    (tmp_path / "one").mkdir()
    beside = read(tmp_path / "one", main="import torch", torch="")
    assert beside is not None
    assert beside.prepares_torch
    for source, prepares in (("import sys\nsys.path.append(f())", True), ("", False)):
        (tmp_path / "two/vendor/torch").mkdir(parents=True, exist_ok=True)
        (tmp_path / "two/vendor/torch/__init__.py").touch()
        vendored = read(tmp_path / "two", main=source)
        assert vendored is not None
        assert vendored.prepares_torch == prepares
