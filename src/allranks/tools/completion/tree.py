"""The commands of ``allranks`` as data, from which completion scripts and manual pages are generated.

The data come from the parsers that print ``--help``, so each option is described once. The values of an option follow
from its choices and from its placeholder in the help. FILE and PATH are files, DIR and FOLDER folders, HOST... hosts.
Lowercase words (``N|auto|gpu``) are literal values.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from allranks._base.console import ArgumentParser, collecting_help, shown_names
from allranks._base.errors import ConfigError
from allranks.tools.commands import COMMANDS

__all__ = ["CliCommand", "Kind", "CliOption", "collect"]

Kind = Literal["flag", "words", "file", "folder", "host", "any", "program", "command"]


@dataclass(frozen=True)
class CliOption:
    """An option or a positional argument.

    Attributes:
        names: Its spellings; empty for a positional argument.
        kind: The kind of value that it takes.
        words: Some or all of its possible values.
        metavar: The placeholder for its value.
        help: Its description; "" if the help does not show it.
        shown: The spellings that the help shows.
        bare: Its value is optional.
    """

    names: tuple[str, ...]
    kind: Kind
    words: tuple[str, ...]
    metavar: str
    help: str
    shown: tuple[str, ...]
    bare: bool = False


@dataclass(frozen=True)
class CliCommand:
    """A command.

    Attributes:
        words: The words that the user types after ``allranks``.
        summary: Its description, in one line.
        parser: The parser that prints its help.
        options: Its options.
        arguments: Its positional arguments.
        children: Its subcommands.
    """

    words: tuple[str, ...]
    summary: str
    parser: ArgumentParser
    options: tuple[CliOption, ...]
    arguments: tuple[CliOption, ...]
    children: tuple[CliCommand, ...]

    @property
    def name(self) -> str:
        """The words as one string, such as ``trace show``."""
        return " ".join(self.words)

    def walk(self) -> Iterator[CliCommand]:
        """Yield the command and all its subcommands, recursively."""
        yield self
        for child in self.children:
            yield from child.walk()


def collect() -> tuple[CliCommand, ...]:
    """Return all commands.

    Raises:
        ConfigError: A command cannot print its help, because a variable that it reads is wrong.
    """
    return tuple(_command((name,), summary, _parser(module, (), name)) for name, (module, summary) in COMMANDS.items())


def _parser(module: str, words: Sequence[str], name: str) -> ArgumentParser:
    # argparse exits after it has processed --help.
    with collecting_help() as found, contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    if len(found) != 1:
        raise ConfigError(
            f"allranks {name} --help printed no help, because a variable that it reads is wrong.\n"
            "  Correct or unset the variable that its error names."
        )
    return found[0]


def _command(words: tuple[str, ...], summary: str, parser: ArgumentParser) -> CliCommand:
    options = [_option(parser, action) for action in parser._actions]
    arguments = tuple(each for each in options if not each.names)
    return CliCommand(
        words=words,
        summary=summary,
        parser=parser,
        options=tuple(each for each in options if each.names),
        arguments=arguments,
        children=tuple(_children(words, parser)),
    )


def _children(words: tuple[str, ...], parser: ArgumentParser) -> Iterator[CliCommand]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._get_subactions()}
            for name, child in action.choices.items():
                yield _command((*words, name), summaries[name], child)
        elif _is_command(action):
            for name in action.choices or ():
                child = _parser(COMMANDS[words[0]][0], [name], " ".join((*words, name)))
                yield _command((*words, name), _first_sentence(child.description or ""), child)


def _is_command(action: argparse.Action) -> bool:
    return not action.option_strings and action.dest == "command"


def _first_sentence(text: str) -> str:
    sentence = re.split(r"[.;:] ", text)[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _option(parser: ArgumentParser, action: argparse.Action) -> CliOption:
    metavar = _metavar(action)
    words = _words(action, metavar)
    shown = action.help is not argparse.SUPPRESS
    return CliOption(
        names=tuple(action.option_strings),
        kind=_kind(action, metavar, words),
        words=words,
        metavar=metavar,
        help=parser._get_formatter()._expand_help(action) if shown and action.help else "",
        shown=tuple(shown_names(action)) if shown else (),
        bare=action.nargs == "?",
    )


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return f"{{{','.join(map(str, action.choices))}}}"
    return action.dest.upper()


def _words(action: argparse.Action, metavar: str) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    parts = re.split(r"[{}|,]", metavar)
    return tuple(part for part in parts if re.fullmatch(r"[a-z][a-z0-9_-]+", part)) if len(parts) > 1 else ()


def _kind(action: argparse.Action, metavar: str, words: Sequence[str]) -> Kind:
    if isinstance(action, argparse._SubParsersAction) or _is_command(action):
        return "command"
    if action.nargs == argparse.REMAINDER or action.dest in ("target", "training_script"):
        return "program"
    if action.nargs == 0:
        return "flag"
    if metavar.startswith("HOST"):
        return "host"
    kinds: dict[str, Any] = {"FILE": "file", "PATH": "file", "DIR": "folder", "FOLDER": "folder"}
    found: Kind = kinds.get(metavar, "words" if words else "any")
    return found
