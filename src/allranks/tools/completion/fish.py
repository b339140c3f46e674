"""The completion script for fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from allranks.tools.completion.tree import CliCommand, CliOption

__all__ = ["render"]

_FUNCTIONS = Path(__file__).parent / "functions" / "functions.fish"


def render(commands: Sequence[CliCommand]) -> str:
    """Return the script."""
    every = [each for command in commands for each in command.walk()]
    valued = [
        f"{each.name} {name}"
        for each in every
        for option in each.options
        if option.kind != "flag" and not option.bare
        for name in option.names
    ]
    programs = [each.name for each in every if any(argument.kind == "program" for argument in each.arguments)]
    lines = [
        f"set -g __allranks_commands {_list([*(each.name for each in every), 'help'])}",
        f"set -g __allranks_programs {_list(programs)}",
        f"set -g __allranks_valued {_list(valued)}",
        "",
        _FUNCTIONS.read_text(encoding="utf-8"),
        "complete -c allranks -n '__allranks_is' -s h -l help -d 'print help'",
        "complete -c allranks -n '__allranks_is' -s V -l version -d 'print the version'",
    ]
    lines.append("complete -c allranks -n '__allranks_is' -a help -d 'print the help of a command'")
    for each in commands:
        lines.append(f"complete -c allranks -n '__allranks_is help' -a {each.name} -d {_quoted(each.summary)}")
        lines.append(f"complete -c allranks -n '__allranks_is' -a {each.name} -d {_quoted(each.summary)}")
    for each in every:
        lines += _lines(each)
    return "\n".join(lines) + "\n"


def _lines(command: CliCommand) -> Iterator[str]:
    start = f"complete -c allranks -n '__allranks_is {command.name}'"
    for child in command.children:
        yield f"{start} -a {child.words[-1]} -d {_quoted(child.summary)}"
    for option in command.options:
        if option.shown:
            names = " ".join(_name(name) for name in option.shown)
            yield f"{start} {names}{_value(option)} -d {_quoted(option.help)}"
    for argument in () if command.children else command.arguments:
        yield start + _value(argument)


def _name(name: str) -> str:
    return f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"


def _value(option: CliOption) -> str:
    needed = " -r" if option.names and not option.bare else ""
    if option.kind == "flag":
        return ""
    words = f" -a {_quoted(' '.join(option.words))}" if option.words else ""
    if option.kind in ("file", "program"):
        return f"{needed} -F{words}"
    if option.kind == "folder":
        return f"{needed} -f -a '(__fish_complete_directories)'"
    if option.kind == "host":
        return f"{needed} -f -a '(__fish_print_hostnames)'"
    return f"{needed} -f{words}"


def _list(words: Sequence[str]) -> str:
    return " ".join(f"'{word}'" for word in words)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
