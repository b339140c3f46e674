"""The table of public names matches the modules, and the modules that must not import torch do not import it."""

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import stub

import allranks
import api


def test_every_export_exists_in_its_home_module() -> None:
    assert sorted(set(allranks.__all__)) == sorted(allranks.__all__)
    assert set(allranks.__all__) <= set(dir(allranks))
    for name in allranks.__all__:
        assert getattr(allranks, name) is not None
    for module, names in allranks._HOME.items():
        home = importlib.import_module(f"allranks.{module}")
        for name in names:
            assert name in home.__all__, f"{name} is not in {module}.__all__"
            assert getattr(allranks, name) is getattr(home, name)
    for name, home in allranks._TORCHS.items():
        assert getattr(allranks, name) is getattr(importlib.import_module(home), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecation warnings
        for name in allranks._TORCHS_MODULES:
            assert getattr(allranks, name) is importlib.import_module(f"torch.distributed.{name}")
    for name, right in allranks._OTHERWISE.items():
        assert getattr(allranks, right) is not None
        with pytest.raises(AttributeError, match=f"use allranks.{right}"):
            getattr(allranks, name)
    with pytest.raises(AttributeError, match="no attribute 'all_reduze'"):
        _ = allranks.all_reduze


def test_type_stub_matches_the_table_of_names() -> None:
    assert stub.STUB.read_text() == stub.stub(), "run: make format"


@pytest.mark.parametrize("module", api.MODULES)
def test_tracebacks_and_pickles_name_the_public_module(module: str) -> None:
    home = importlib.import_module(module)
    for name in home.__all__:
        thing = getattr(home, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            expected = "allranks" if getattr(allranks, name, None) is thing else module
            assert thing.__module__ == expected, name
            assert pickle.loads(pickle.dumps(thing)) is thing


def test_traceback_shows_the_public_name() -> None:
    code = "import allranks; allranks.get_rank()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "\nallranks.NotInitializedError: the default process group" in done.stderr


@pytest.mark.parametrize("name", allranks.__all__)
def test_docstring_documents_parameters_and_exceptions(name: str) -> None:
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
        assert "Raises:" in sections, f"{name} does not document its exceptions"


VERBS = {
    name
    for home in ("_api.collectives", "_api.objects", "_api.multigpu", "_api.legacy")
    for name in allranks._HOME[home]
    if home != "_api.legacy" or name.startswith(("gather_", "scatter_"))
}
SHAPELESS = {"barrier", "monitored_barrier", *allranks._HOME["_api.objects"]}
"""Verbs that move no tensors of the caller."""


@pytest.mark.parametrize("name", sorted(name for name in VERBS if inspect.isfunction(getattr(allranks, name))))
def test_docstrings_of_verbs_have_cost_and_shape_sections(name: str) -> None:
    sections = inspect.getdoc(getattr(allranks, name))
    for section in ("Raises", "Cost", *([] if name in SHAPELESS else ["Shape"])):
        found = re.search(rf"^{section}:\n    (.+)", sections, re.MULTILINE)
        assert found, f"{name} has no section {section}:"
        for other in re.findall(r"^as ``(\w+)``", found[1]):
            assert other in VERBS, f"{name}, {section}: {other} does not exist"
    assert name in SHAPELESS or not name.endswith(("barrier", "_object", "_object_list"))


def durations(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the duration parameters of public functions: name, documentation, and documentation of the class."""
    home = importlib.import_module(module)
    for name in home.__all__:
        thing = getattr(home, name)
        if not getattr(thing, "__module__", "").startswith("allranks"):
            continue
        about = inspect.getdoc(thing) or ""
        called = {name: thing} if callable(thing) else {}
        if inspect.isclass(thing):
            called |= {f"{name}.{key}": value for key, value in vars(thing).items() if key[0] != "_"}
        for full, function in called.items():
            try:
                parameters = inspect.signature(function).parameters if callable(function) else {}
            except ValueError:  # raised for types that are implemented in C
                continue
            text = inspect.getdoc(function) or ""
            for parameter in parameters:
                if re.search(r"timeout|_s$", parameter):
                    entry = re.search(rf"^    {parameter}: (.*(?:\n     +.*)*)", text, re.MULTILINE)
                    yield f"{full}({parameter})", entry[1] if entry else text, about


@pytest.mark.parametrize("module", [*api.MODULES, "allranks.resilience"])
def test_documentation_of_durations_states_the_unit(module: str) -> None:
    unclear = [
        name
        for name, text, about in durations(module)
        if "second" not in (text + about).lower() and "See :func:" not in text
    ]
    assert not unclear
    assert module != "allranks" or len(list(durations(module))) > 15


@pytest.mark.parametrize(
    "module",
    [
        "allranks", "allranks.launch.cli", "allranks.__main__", "allranks._rendezvous.rendezvous", "allranks.logging",
        "allranks.tools.doctor.ranks", "allranks.tools.doctor.software", "allranks.tools.submit.options",
    ],
)  # fmt: skip
def test_importing_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
