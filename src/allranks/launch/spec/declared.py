"""Options of the command line, declared at the dataclass fields that hold their values.

The declaration produces the parser, its help, the manual page and the completion scripts. It also produces the check
for options that have no meaning if the program runs in place.
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
    """The spelling, the help and the conversion of an option.

    Attributes:
        names: Its spellings in the help.
        hidden: Further spellings, such as those of torchrun.
        group: Heading of the help that lists it.
        in_place: It keeps its meaning if the program replaces this process, as a rank of another launcher.
        convert: Computes the value of the field from the value of the parser, which is None if the option is not given.
            Without `convert`, the field then has its default.
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
    """Declare a field of a dataclass as an option. Arguments: see `Declaration`; ``default`` is the field's default."""
    declared = Declaration(names, tuple(hidden), group, in_place, convert, how)
    return field(default=default, metadata={_KEY: declared})


def declarations(kind: type) -> dict[str, Declaration]:
    """Return the options that a dataclass declares, by field, in the order of the fields."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}


def option_name(kind: type, name: str) -> str:
    """Return the spelling of the option that sets a field, for messages."""
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
