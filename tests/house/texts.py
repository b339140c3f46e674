"""Every text that users can read: errors, warnings, reports, help. ``python tests/house/texts.py`` prints them.

A text is a literal of two words or more in the source, except docstrings and code. Its variable parts are in braces,
as in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LITERAL = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+')
_PART = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_COMMENT = re.compile(r"//.*")


def _is_text(text: str) -> bool:
    words = re.findall(r"[a-z]{2,}", re.sub(r"\{[^{}]*\}", "", text))
    return " " in text.strip() and len(words) >= 2


def _template(node: ast.JoinedStr) -> str:
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            shown = " ".join(ast.unparse(part.value).split())
            parts.append("{" + shown.replace('"', "'") + "}")  # Versions of Python differ in the quotes.
    return "".join(parts)


def of_python(source: str) -> Iterator[str]:
    """Yield the texts of a Python file in source order."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))  # docstrings, including those of attributes
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(each) for each in ast.walk(node) if each is not node)
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield _template(node)
        elif isinstance(node.value, str):
            yield node.value


def of_cpp(source: str) -> Iterator[str]:
    """Yield the texts of a C++ file in source order."""
    lines = [_COMMENT.sub("", line) for line in source.splitlines() if not line.lstrip().startswith("#include")]
    for found in _LITERAL.finditer("\n".join(lines)):
        yield "".join(_PART.findall(found.group())).replace('\\"', '"').replace("\\n", "\n")


def all_texts() -> str:
    """Return all texts: a heading per source file, then one text per line, with line ends written as ``\\n``."""
    lines = []
    for folder, suffixes in (("src/allranks", (".py",)), ("core", (".cc", ".h"))):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                texts = (of_python if path.suffix == ".py" else of_cpp)(path.read_text())
                kept = [text.replace("\n", "\\n") for text in texts if _is_text(text)]
                if kept:
                    lines += [f"# {path.relative_to(ROOT)}", *kept, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(all_texts(), end="")
