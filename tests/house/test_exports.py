"""The package's map is true: names live where it says, and the light parts stay light."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import allranks


def test_every_export_is_there_and_documented() -> None:
    assert sorted(set(allranks.__all__)) == sorted(allranks.__all__)
    assert set(allranks.__all__) <= set(dir(allranks))
    for name in allranks.__all__:
        assert getattr(allranks, name) is not None
    for module, names in allranks._HOME.items():
        home = importlib.import_module(f"allranks.{module}")
        for name in names:
            assert name in home.__all__, f"{name} is not in {module}.__all__"
            assert getattr(allranks, name) is getattr(home, name)
    assert {*allranks._MODULE_OF, *allranks._MODULES, *allranks._errors.__all__} == set(allranks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'all_reduze'"):
        _ = allranks.all_reduze


@pytest.mark.parametrize("name", allranks.__all__)
def test_docstrings(name: str) -> None:
    thing = getattr(allranks, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
    if not inspect.isfunction(thing):
        return
    sections = inspect.getdoc(thing)
    if inspect.signature(thing).parameters and len(inspect.signature(thing).parameters) > 1:
        assert "Args:" in sections
        for parameter in inspect.signature(thing).parameters:
            assert f"{parameter}:" in sections, f"{name} does not document {parameter}"
    raises = any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(inspect.getsource(thing))))
    if raises and not name.startswith("is_"):
        assert "Raises:" in sections, f"{name} does not say what it raises"


@pytest.mark.parametrize(
    "module",
    [
        "allranks", "allranks.launch.cli", "allranks.__main__", "allranks._rendezvous", "allranks.logging",
        "allranks.tools.doctor.ranks", "allranks.tools.doctor.software", "allranks.tools.submit.options",
    ],
)  # fmt: skip
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
