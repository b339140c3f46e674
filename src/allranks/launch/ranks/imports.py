"""The imports of a program, read from its source: of the script, and of the modules next to it.

Nothing is executed. Imports without an import statement are not detected.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.launch.spec.target import Target

__all__ = ["Imports", "read_imports"]

_BY_NAME = {"importlib", "imp", "pkgutil", "runpy", "__import__", "eval", "exec"}  # modules and functions
_NEVER_LOCAL = {"torch", "allranks"}
_MOST_BYTES = 1 << 18  # bytes of source; reading and parsing them takes 0.1 s

# Variables that torch and its libraries read when they are imported.
_READ_BY_TORCH = re.compile(
    "(OMP|KMP|GOMP|MKL|OPENBLAS|NUMEXPR|VECLIB|DNNL|ONEDNN|ATEN|TBB|LD|MALLOC|PYTORCH|TORCH(?!_NCCL)|TRITON|NVFUSER)"
)


@dataclass
class Imports:
    """The imports that were found.

    Attributes:
        modules: names of the imported modules, without the program's own modules.
        all_known: the program imports no other modules.
        sources: source texts of the program.
        prepares_torch: the program sets variables that torch reads at import, or may import another torch.
    """

    modules: set[str] = field(default_factory=set)
    all_known: bool = True
    sources: list[bytes] = field(default_factory=list)
    prepares_torch: bool = False


def read_imports(target: Target) -> Imports | None:
    """Read the imports of a script, or of a module in the working directory. Return None if it cannot be read."""
    if target.kind == "script":
        path, parts = Path(target.name), ["__main__"]
        root = path.resolve().parent
    else:
        root = Path.cwd()
        parts = target.name.split(".")
        parts += ["__main__"] * os.path.isdir(root.joinpath(*parts))
        path = root.joinpath(*parts).with_suffix(".py")
    found = Imports(prepares_torch=_has_torch(root))
    todo = [(path, parts)]
    seen = {path.resolve()}
    while todo:
        path, parts = todo.pop()
        try:
            source = path.read_bytes()
            tree = ast.parse(source)
        # ``ast.parse`` raises ValueError for null bytes, and RecursionError for source that nests too deeply.
        except (OSError, SyntaxError, ValueError, RecursionError):
            # The program itself is read first. A neighboring module only makes the result incomplete.
            if not found.sources:
                return None
            found.all_known = False
            continue
        found.sources.append(source)
        found.prepares_torch |= _prepares_torch(tree, root)
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
    """Yield each name that may be a module, completed, and whether it was relative to the package."""
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
    """Yield the files of a module and of its parent packages that are next to the program."""
    parts = module.split(".")
    if parts[0] in _NEVER_LOCAL:
        return
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if os.path.isfile(file):  # not a method of Path, which raises if a folder is not searchable
                yield file, parts[:end]
                break


def _prepares_torch(tree: ast.Module, root: Path) -> bool:
    """Return whether a source changes the result of ``import torch``: its variables, or its search path."""
    searches = False
    for node in ast.walk(tree):
        names: list[str | None] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environ(node.value):
            names = [_text(node.slice)]
        elif isinstance(node, ast.Call):
            names = _set_by_call(node)
        elif isinstance(node, ast.Attribute) and node.attr == "path":
            searches |= isinstance(node.value, ast.Name) and node.value.id == "sys"
        if any(name is None or _READ_BY_TORCH.match(name) for name in names):
            return True
    return searches and any(map(_has_torch, _folders_near(root)))


def _set_by_call(call: ast.Call) -> list[str | None]:
    """Return the variables that a call sets; None for one whose name is not in the source."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "putenv":
        return [_text(argument) for argument in call.args[:1]]
    if name == "load_dotenv":
        return [None]
    if not isinstance(function, ast.Attribute) or not _is_environ(function.value):
        return []
    if name == "setdefault":
        return [_text(argument) for argument in call.args[:1]]
    if name != "update":
        return []
    found: list[str | None] = [keyword.arg for keyword in call.keywords]  # None: **names
    for argument in call.args:
        found += [_text(key) for key in argument.keys] if isinstance(argument, ast.Dict) else [None]
    return found


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _has_torch(folder: Path) -> bool:
    return os.path.isfile(folder / "torch.py") or os.path.isfile(folder / "torch" / "__init__.py")


def _folders_near(root: Path) -> Iterator[Path]:
    """Yield the folders that programs add to ``sys.path``: the parents of the program's folder, and its subfolders."""
    yield from root.parents
    with contextlib.suppress(OSError):
        yield from [each for each in root.iterdir() if each.is_dir()]
