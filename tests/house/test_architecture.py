"""The contributor pages name existing layers, files and definitions; the diagram is current; class names are unique."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PAGES = (PAGE, ROOT / "CONTRIBUTING.md", ROOT / "src" / "allranks" / "_elastic" / "README.md")
REFERENCE = re.compile(r"`([\w./-]+\.(?:py|pyi|cc|h|toml|txt|md|svg))(?::([\w.:]+))?`")
REFERENCES = sorted({(page.name, file, name) for page in PAGES for file, name in REFERENCE.findall(page.read_text())})


def test_diagram_shows_the_checked_layers() -> None:
    subprocess.run([sys.executable, "docs/draw.py", "--check"], cwd=ROOT, check=True)


def test_every_layer_is_described() -> None:
    text = PAGE.read_text()
    draw = runpy.run_path(str(ROOT / "docs" / "draw.py"))
    for title, layers in (
        ("### The Python package", draw["package_layers"]()),
        ("### The core", draw["core_layers"]()),
    ):
        section = text.partition(title)[2].partition("\n#")[0]
        first = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
        described = {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}
        assert {name for layer in layers for name in layer} == {name for name in described if "/" not in name}


@pytest.mark.parametrize(("page", "file", "name"), REFERENCES)
def test_each_reference_names_an_existing_definition(page: str, file: str, name: str) -> None:
    package = ROOT / "src" / "allranks"
    found = [path for path in (ROOT / file, package / file, package / "_elastic" / file) if path.is_file()]
    assert found, f"{page} names {file}, which does not exist"
    text = found[0].read_text()
    for part in filter(None, re.split(r"[.:]+", name)):
        python = rf"^\s*(?:async )?(?:def|class) {part}\b|^{part}\b.*="
        cpp = rf"\b{part}(?:::\w+)*\(|^(?:class|struct) {part}\b|\b{part}::"
        pattern = python if file.endswith(".py") else cpp
        assert re.search(pattern, text, re.MULTILINE), f"{page}: {file} does not define {part}"


def test_the_map_of_a_package_names_all_of_its_modules() -> None:
    missing = {}
    for path in sorted((ROOT / "src").rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        inside = [each for each in path.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()]
        modules = {each.stem for each in inside if not each.stem.startswith("__")}
        entries = re.findall(r"^ {4}(\w+) {2,}\S|^- ``(\w+)``", text, re.MULTILINE)
        if len(modules & {first or second for first, second in entries}) > 1:  # it has a map
            missing[str(path.relative_to(ROOT))] = modules - set(re.findall(r"\w+", text))
    assert {page: modules for page, modules in missing.items() if modules} == {}
    assert len(missing) > 2


def test_each_class_name_has_one_meaning() -> None:
    # A search for the name of a class finds one definition.
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_named_commands_and_folders_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets
    folders = set(re.findall(r"`((?:src|core|tests|docs|benchmarks)/[\w/]+)`", text))
    assert not [folder for folder in folders if not (ROOT / folder).exists()]
