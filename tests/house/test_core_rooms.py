"""Layering of the core: each layer includes only itself and lower layers; only core/python knows Python and has state.

The order of the layers is the order in which the core can be read. If a layer needs to include a layer that is not
below it, some code is in the wrong file.
"""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core"

# Each layer, with the lower layers that it may include. A layer precedes all layers that include it, so there is no
# cycle.
BELOW = {
    "base": set(),
    "trace": {"base"},
    "channel": {"base"},
    "collective": {"base", "channel"},
    "p2p": {"base", "trace", "channel"},
    "group": {"base", "trace", "channel", "collective", "p2p"},
    "remote": {"base"},
    "python": {"base", "trace", "channel", "collective", "p2p", "group", "remote"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"(?P<ours>[^"]+)"|<(?P<others>[^>]+)>)', re.MULTILINE)
FILES = sorted(path for path in CORE.rglob("*") if path.suffix in {".h", ".cc"})


def room(path: Path) -> str:
    return path.relative_to(CORE).parts[0]


def test_every_core_file_is_in_a_layer() -> None:
    assert {room(path) for path in FILES} == set(BELOW)


def test_each_layer_precedes_the_layers_that_include_it() -> None:
    rooms = list(BELOW)
    for above, below in BELOW.items():
        assert all(rooms.index(name) < rooms.index(above) for name in below), above


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_core_file_includes_only_its_own_and_lower_layers(path: Path) -> None:
    for found in INCLUDE.finditer(path.read_text()):
        if (included := found["ours"]) is not None:
            assert (CORE / included).is_file(), f'"{included}" must be a path relative to core/'
            assert Path(included).parts[0] in BELOW[room(path)] | {room(path)}, included
        elif room(path) != "python":
            assert not re.match(r"(nanobind/|Python\.h|pybind11/|torch/|ATen/)", found["others"]), found["others"]


def test_core_has_no_include_cycle() -> None:
    # Files must not form a cycle either: if a header includes itself through another header, the result depends on
    # which of the two is read first.
    includes = {
        str(path.relative_to(CORE)): [found["ours"] for found in INCLUDE.finditer(path.read_text()) if found["ours"]]
        for path in FILES
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for included in includes[name]:
                visit(included, (*way, name))
            done.add(name)

    for name in includes:
        visit(name, ())


# Matches a mutable variable of namespace scope, or a mutable static variable of a function.
GLOBAL = re.compile(
    r"^(?!.*\b(?:const|constexpr|using|return|class|struct|namespace|extern|friend)\b)"
    r"(?:[A-Za-z][\w:<>, *&]*\s[*&]?\w+(?:::\w+)*(?:\s*=[^=].*|\{.*\})?;"
    r"|\s+static\s[\w:<>, *&]+\s[*&]?\w+(?:\s*=.*|\{.*\}?);?)",
    re.MULTILINE,
)


def test_mutable_globals_are_only_in_the_listed_files() -> None:
    found = {str(path.relative_to(CORE)): [match[0] for match in GLOBAL.finditer(path.read_text())] for path in FILES}
    found = {name: lines for name, lines in found.items() if lines}
    assert "ifdef ALLRANKS_COUNT_LINES" in (CORE / "channel/lines.h").read_text()
    del found["channel/lines.h"]  # Exists only in the core that is compiled for tests.
    # State for forks, and the objects that Python passes to the module. CPython keeps pointers to a type's member
    # tables.
    assert set(found) == {"base/forks.cc", "python/state.h", "python/bind_outbox.cc"}, found
    assert all("PyMemberDef" in line or "PyGetSetDef" in line for line in found["python/bind_outbox.cc"]), found
