"""What a program imports, told from its source: of the script, and of the modules that lie beside it.

Nothing is run. What is imported by other means than a statement is not known before.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.launch.spec.target import Target

__all__ = ["Imports", "read_imports"]

_BY_NAME = {"importlib", "imp", "pkgutil", "runpy", "__import__", "eval", "exec"}  # modules and functions
_NEVER_LOCAL = {"torch", "allranks"}
_MOST_BYTES = 1 << 18  # of source: 0.1 s


@dataclass
class Imports:
    """What was found.

    Attributes:
        modules: by their names, those of the program itself left out.
        all_known: no others are imported.
        sources: of the program.
    """

    modules: set[str] = field(default_factory=set)
    all_known: bool = True
    sources: list[bytes] = field(default_factory=list)


def read_imports(target: Target) -> Imports | None:
    """Reads what a script, or a module beside the working directory, imports. None where it cannot be read."""
    if target.kind == "script":
        path, parts = Path(target.name), ["__main__"]
        root = path.resolve().parent
    else:
        root = Path.cwd()
        parts = target.name.split(".")
        parts += ["__main__"] * os.path.isdir(root.joinpath(*parts))
        path = root.joinpath(*parts).with_suffix(".py")
    found = Imports()
    todo = [(path, parts)]
    seen = {path.resolve()}
    while todo:
        path, parts = todo.pop()
        try:
            source = path.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            if not found.sources:
                return None
            found.all_known = False
            continue
        found.sources.append(source)
        if sum(map(len, found.sources)) > _MOST_BYTES:
            found.all_known = False
            break
        for module, relative in _imported(tree, parts if path.name == "__init__.py" else parts[:-1], found):
            local = list(_local(root, module))
            if not local and not relative:
                found.modules.add(module)
                found.all_known &= module.partition(".")[0] not in _BY_NAME
            todo += [(file, its_parts) for file, its_parts in local if file.resolve() not in seen]
            seen |= {file.resolve() for file, _ in local}
    return found


def _imported(tree: ast.Module, package: list[str], found: Imports) -> Iterator[tuple[str, bool]]:
    """Each name that may be a module's, and whether it is relative to the package, in which it is completed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            if base:
                yield base, node.level > 0
            if base.partition(".")[0] not in _NEVER_LOCAL:
                yield from ((f"{base}.{alias.name}".strip("."), node.level > 0) for alias in node.names)
        elif isinstance(node, ast.Name) and node.id in _BY_NAME:
            found.all_known = False


def _local(root: Path, module: str) -> Iterator[tuple[Path, list[str]]]:
    """The files of a module and of the packages that it is in, where they lie beside the program."""
    parts = module.split(".")
    if parts[0] in _NEVER_LOCAL:
        return
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if os.path.isfile(file):  # not of Path, which raises where a folder may not be searched
                yield file, parts[:end]
                break
