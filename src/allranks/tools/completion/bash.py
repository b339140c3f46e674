"""The completion script for bash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.tools.completion.tree import CliCommand, CliOption

__all__ = ["render"]

_FUNCTIONS = Path(__file__).parent / "functions" / "functions.bash"


def render(commands: Sequence[CliCommand]) -> str:
    """Return the script."""
    every = [each for command in commands for each in command.walk()]
    lines = ["_allranks_command() {  # $kind and $words of what may stand where no option does", "  case $1 in"]
    names = " ".join(each.words[-1] for each in commands)
    lines.append(f"    '') kind='' words='{names} help' ;;")
    lines.append(f"    help) kind='' words='{names}' ;;")
    lines += [f"    '{each.name}') {_argument(each)} ;;" for each in every]
    lines += ["    *) kind='' words='' ;;", "  esac", "}", ""]
    lines += ["_allranks_options() {  # into $words", "  case $1 in", "    '') words='-h --help -V --version' ;;"]
    for each in every:
        shown = " ".join(name for option in each.options for name in option.shown)
        lines.append(f"    '{each.name}') words='{shown}' ;;")
    lines += ["    *) words='' ;;", "  esac", "}", ""]
    lines += [
        "_allranks_value() {  # $kind and $words of what option $2 of command $1 takes",
        "  kind='' words='' bare=''",
    ]
    lines.append('  case "$1 $2" in')
    for each in every:
        for option in each.options:
            if option.kind != "flag":
                patterns = " | ".join(f"'{each.name} {name}'" for name in option.names)
                bare = " bare=yes" if option.bare else ""
                lines.append(f"    {patterns}) {_of(option)}{bare} ;;")
    lines += ["  esac", "}"]
    return "\n".join(lines) + "\n" + _FUNCTIONS.read_text(encoding="utf-8")


def _argument(command: CliCommand) -> str:
    if command.children:
        return f"kind=command words='{' '.join(each.words[-1] for each in command.children)}'"
    return _of(command.arguments[0]) if command.arguments else "kind='' words=''"


def _of(option: CliOption) -> str:
    return f"kind={option.kind} words='{' '.join(option.words)}'"
