"""Describe the public interface as text: each public name with its signature and its docstring sections.

    python tests/house/api.py > tests/house/api.txt

test_api.py compares that file with the current interface. A change of the interface therefore shows in the diff of a
commit, and an unintended change fails the test. The options of commands are taken from their parsers.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from typing import Any

import allranks
from allranks.__main__ import main
from allranks.tools.commands import COMMANDS

MODULES = [
    "allranks", "allranks.algorithms.ddp_comm_hooks.default_hooks", "allranks.checkpoint", "allranks.data",
    "allranks.engines",
    "allranks.logging", "allranks.multiprocessing", "allranks.nn.functional", "allranks.nn.parallel",
    "allranks.parallel", "allranks.testing", "allranks.trace",
]  # fmt: skip
GIVEN = {
    "init_master_worker() gives": "allranks.remote.master.master.Master",
    "its group() gives": "allranks.remote.master.groups.Group",
}
_SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Cost|Shape|Example|Examples|Note|Source):", re.MULTILINE
)


def describe() -> str:
    """Return the description of the whole interface, one name per line."""
    lines: list[str] = []
    for name in MODULES:
        lines += ["", f"# {name}", ""]
        module = importlib.import_module(name)
        for each in sorted(module.__all__):
            if name == "allranks" or getattr(allranks, each, None) is not getattr(module, each):
                lines += _thing(each, getattr(module, each))
            else:
                lines.append(f"{each} = allranks.{each}")
    for title, where in GIVEN.items():
        module, _, name = where.rpartition(".")
        lines += ["", f"# {title}", "", *_thing(name, getattr(importlib.import_module(module), name))]
    torch_worker = importlib.import_module("allranks.remote.torch_device.torch_worker")
    lines += ["", "# torch.worker", ""]
    for each in torch_worker.__all__:
        lines += _thing(each, getattr(torch_worker, each))
    for command in COMMANDS:
        lines += ["", f"# allranks {command} (command)", "", *_options(command)]
    return "\n".join(line for line in lines[1:]) + "\n"


def _thing(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing):
        bases = ", ".join(each.__name__ for each in thing.__bases__ if each is not object)
        yield f"class {name}({bases}){_sections(thing)}"
        if issubclass(thing, enum.Enum):
            yield "    " + ", ".join(each.name for each in thing)
        offered = set(dir(thing.__new__(thing))) if "__dir__" in vars(thing) else None
        for member in sorted({each for klass in _ours(thing) for each in vars(klass) if _is_public(each)}):
            if offered is not None and member not in offered:
                continue
            yield from ("    " + line for line in _member(thing, member))
    elif inspect.ismodule(thing):
        yield f"{name}: module"
    elif callable(thing):
        yield f"{name}{_signature(thing)}{_sections(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def _member(kind: type, name: str) -> Iterator[str]:
    found = inspect.getattr_static(kind, name)
    value = getattr(kind, name, None)
    if isinstance(found, property):
        yield f"{name}: property"
    elif isinstance(found, enum.Enum | kind):
        yield f"{name}: {kind.__name__}"
    elif isinstance(found, staticmethod | classmethod):
        yield f"{name}{_signature(value)}: {type(found).__name__}{_sections(value)}"
    elif callable(value):
        yield f"{name}{_signature(value)}{_sections(value)}"
    else:
        yield f"{name}: {type(found).__name__}"


def _ours(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "allranks"]


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__", "__enter__", "__getitem__", "__len__")


def _signature(thing: Any) -> str:
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _sections(thing: Any) -> str:
    found = _SECTION.findall(inspect.getdoc(thing) or "")
    return f"  [{', '.join(found)}]" if found else ""


def _options(command: str) -> list[str]:
    """Return the options that the command's parser prints in its help."""
    parsers: list[argparse.ArgumentParser] = []
    kept = argparse.ArgumentParser.format_help

    def format_help(self: argparse.ArgumentParser) -> str:
        parsers.append(self)
        return kept(self)

    argparse.ArgumentParser.format_help = format_help  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main([command, "--help"])
    finally:
        argparse.ArgumentParser.format_help = kept  # type: ignore[method-assign]
    return sorted({_option(each) for parser in parsers for each in parser._actions})


def _option(action: argparse.Action) -> str:
    words = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
    takes = "" if action.nargs == 0 else f" nargs={action.nargs}" if action.nargs else " VALUE"
    return f"{words}{takes}{choices}"


if __name__ == "__main__":
    print(describe(), end="")
