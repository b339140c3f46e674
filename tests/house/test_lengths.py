"""No function has more than 60 lines of code, unless a comment above it gives the reason: ``# long: <why>``.

Docstrings, comments and blank lines are not counted. In C++ the comment is ``// long: <why>``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 60
REASON = re.compile(r"\s*(#|//) long: \S+")
CLASS = re.compile(r"^\s*(template <.*>\s*)?(class|struct|union|enum|extern)\b[^()=]*$")


def python_functions(text: str) -> Iterator[tuple[str, int, bool]]:
    """The functions of a file: name, lines of code, whether a reason is given."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
        counted = [
            line
            for number, line in enumerate(lines[first - 1 : node.end_lineno], first)
            if line.strip()
            and not line.strip().startswith("#")
            and (doc is None or not doc.lineno <= number <= (doc.end_lineno or 0))
        ]
        yield node.name, len(counted), bool(first > 1 and REASON.match(lines[first - 2]))


def core_functions(text: str) -> Iterator[tuple[str, int, bool]]:
    """The same of C++. A block is a function if what is before its brace has parentheses, and is no class."""
    head: list[str] = []  # the lines of the statement whose block has not been opened yet
    function: list[str] | None = None
    depth = floor = 0
    before = ""
    reason = False
    for line in text.splitlines():
        code = re.sub(r"'(\\.|[^'\\])'|\"(\\.|[^\"\\])*\"|//.*", "", line)
        if function is None and not head:
            reason = bool(REASON.match(before))
        before = line
        if not code.strip() or code.lstrip().startswith("#"):
            continue
        (head if function is None else function).append(code)
        opened, closed = code.count("{"), code.count("}")
        if function is None and opened:
            text_of_head = " ".join(head)
            if "(" in text_of_head.partition("{")[0] and not CLASS.match(text_of_head.partition("{")[0]):
                function, floor = head, depth
            head = []
        depth += opened - closed
        if function is not None and depth <= floor:
            name = re.search(r"([\w~:]+|operator\S+)\(", " ".join(function))
            yield name[1] if name else "?", len(function), reason
            function = None
            head = []
        elif function is None and (opened or closed or code.rstrip().endswith((";", ":"))):
            head = []


def long_functions(folder: str) -> list[str]:
    readers = {".py": python_functions, ".cc": core_functions, ".h": core_functions}
    return [
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in readers
        for name, count, reason in readers[path.suffix](path.read_text())
        if count > MOST and not reason
    ]


def test_functions_of_the_package() -> None:
    assert long_functions("src/allranks") == [], "split it, or give the reason above it: # long: <why>"


def test_functions_of_the_core() -> None:
    assert long_functions("core") == [], "split it, or give the reason above it: // long: <why>"


BODY = "    x = 1\n" * 61


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"def f():\n{BODY}", ("f", 62, False)),
        (f'def f():\n    """{"a" + chr(10) * 80}"""\n\n    # why\n    x = 1\n', ("f", 2, False)),
        (f"# long: one table\n@property\ndef f(self):\n{BODY}", ("f", 63, True)),
        (f"# long:\ndef f(self):\n{BODY}", ("f", 62, False)),
    ],
)
def test_lines_of_python(text: str, expected: tuple[str, int, bool]) -> None:
    assert list(python_functions(text)) == [expected]


def test_lines_of_the_core() -> None:
    text = """#include <a>
namespace n {
struct S : T {
  int a = 0;  // {
  explicit S(int x)
      : a(x) {
    // only a comment

    use("}", '{');
  }
  int get() const { return a; }
};
constexpr int kTable[] = {1,
                          2};
enum class E : int { a, b };
// long: a reason
void S::run(int a,
            int b) {
  if (a) {
    run([](int) { return 1; });
  }
}
}  // namespace n
"""
    assert list(core_functions(text)) == [("S", 4, False), ("get", 1, False), ("S::run", 6, True)]


def test_the_core_s_functions_are_found() -> None:
    found = [name for name, *_ in core_functions((ROOT / "core/group/comm.cc").read_text())]
    assert {"Comm::run", "Comm::execute", "Comm::wait_queued", "Comm::recv"} <= set(found)
