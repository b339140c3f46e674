"""The tree of tests matches its description in CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "allranks"
ACROSS = {"conformance", "faults", "hosts", "gpu", "rdma", "typing", "house", "support"}
"""Folders that do not belong to a single package."""


def test_each_test_folder_belongs_to_a_package() -> None:
    folders = {path.parent for path in TESTS.rglob("*.py")} | {TESTS / "core"}
    names = {folder.relative_to(TESTS).parts[0] for folder in folders if folder != TESTS} - ACROSS
    packages = {path.parent.relative_to(PACKAGE).as_posix().lstrip("_") for path in PACKAGE.glob("*/__init__.py")}
    assert names <= packages | {"core"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")} <= modules


def test_contributing_lists_the_folders() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text()
    listed = {
        name for row in re.findall(r"^\| (`tests/.*?) \|", page, re.M) for name in re.findall(r"`tests/(\w+)`", row)
    }
    there = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert listed == there


def test_support_lists_its_modules() -> None:
    page = (TESTS / "support" / "README.md").read_text()
    modules = {path.stem for path in (TESTS / "support").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == modules


def test_each_test_file_has_a_module_docstring() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert files == []
