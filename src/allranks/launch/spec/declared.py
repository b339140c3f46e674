"""An option of the command line is declared at the dataclass field that holds its value.

The parser, its help, the manual page, the completion scripts, and the check of options that have no meaning where a
program runs in place follow from the declaration.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Declaration", "add_options", "declarations", "option", "option_name", "values_of"]

_KEY = "option"


@dataclass(frozen=True)
class Declaration:
    """How an option is spelled, shown and read.

    Attributes:
        names: Its spellings that the help shows.
        hidden: Further spellings, such as those of torchrun.
        group: Heading of the help under which it stands.
        in_place: It keeps its meaning where the program replaces this process, as a rank of another launcher.
        convert: Makes the value of the field from that of the parser, which is None if the option is not given. Without
            it, the field then has its default.
        how: Further arguments of ``add_argument``.
    """

    names: tuple[str, ...]
    hidden: tuple[str, ...]
    group: str
    in_place: bool
    convert: Callable[[Any], Any] | None
    how: Mapping[str, Any]


def option(
    *names: str,
    default: Any,
    hidden: Collection[str] = (),
    group: str = "",
    in_place: bool = False,
    convert: Callable[[Any], Any] | None = None,
    **how: Any,
) -> Any:
    """Declare a field of a dataclass as an option. Arguments: see `Declaration`; ``default`` is the field's."""
    declared = Declaration(names, tuple(hidden), group, in_place, convert, how)
    return field(default=default, metadata={_KEY: declared})


def declarations(kind: type) -> dict[str, Declaration]:
    """Return the options that a dataclass declares, by field, in the order of the fields."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}


def option_name(kind: type, name: str) -> str:
    """Return the spelling of the option that a field holds, for messages."""
    declared = declarations(kind).get(name)
    if declared is None:
        return "--" + name.replace("_", "-")
    return next((each for each in declared.names if each.startswith("--")), declared.names[0])


def add_options(add: Callable[..., Any], kind: type, names: Collection[str]) -> None:
    """Add options to a parser.

    Args:
        add: ``add_argument`` of a parser or of a group.
        kind: The dataclass that declares them.
        names: The fields.
    """
    for name in names:
        declared = declarations(kind)[name]
        # No default for the parser: argparse would pass a default that is text through `type`.
        add(*declared.names, dest=name, **{"default": None, **declared.how})
        if declared.hidden:
            shown = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            add(*declared.hidden, dest=name, **{**declared.how, **shown})


def values_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the declared fields for which a parser has read an option."""
    found = {}
    for name, declared in declarations(kind).items():
        value = getattr(args, name)
        if declared.convert is not None:
            found[name] = declared.convert(value)
        elif value is not None:
            found[name] = value
    return found
