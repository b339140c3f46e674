"""The completion script for zsh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.tools.completion.tree import CliCommand, CliOption

__all__ = ["render"]

_ACTIONS = {"file": "_files", "folder": "_files -/", "host": "_hosts", "any": " ", "program": "_files"}


def render(commands: Sequence[CliCommand]) -> str:
    """Return the script."""
    lines = ["#compdef allranks", ""]
    for command in commands:
        for each in command.walk():
            lines += [*_function(each.words, [*_options(each), *_arguments(each)], each.children), ""]
    lines += [f"_allranks_help() {{ _arguments '1:command:({' '.join(each.name for each in commands)})' }}", ""]
    version = "'(-V --version)'{-V,--version}'[print the version]'"
    lines += _function((), [_help(), version], commands)
    lines += [
        "",
        "if [[ $funcstack[1] == _allranks ]]; then",
        '  _allranks "$@"',
        "else",
        "  compdef _allranks allranks",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _function(words: Sequence[str], specs: Sequence[str], children: Sequence[CliCommand]) -> Iterator[str]:
    name = "_".join(("_allranks", *words))
    yield f"{name}() {{"
    if not children:
        yield "  _arguments -s -S -A '-*' \\"
        yield " \\\n".join(f"    {spec}" for spec in specs)
        yield "}"
        return
    yield "  local context state state_descr line curcontext=$curcontext"
    yield "  typeset -A opt_args"
    yield "  _arguments -C -s -A '-*' \\"
    yield " \\\n".join(f"    {spec}" for spec in [*specs, "'1:command:->command'", "'*::argument:->argument'"])
    yield "  case $state in"
    yield "    command)"
    yield "      local -a commands=("
    yield from (f"        {_quoted(f'{each.words[-1]}:{each.summary}')}" for each in children)
    if not words:
        yield "        'help:print the help of a command'"
    yield "      )"
    yield "      _describe command commands"
    yield "      ;;"
    yield "    argument)"
    yield f"      if (( $+functions[{name}_$words[1]] )); then {name}_$words[1]; fi"
    yield "      ;;"
    yield "  esac"
    yield "}"


def _help() -> str:
    return "'(-h --help)'{-h,--help}'[print help]'"


def _options(command: CliCommand) -> Iterator[str]:
    for option in command.options:
        # Includes options that the help does not show, so that their values are not mistaken for a program.
        text = _escaped(option.help)
        described = f"[{text}]" if option.shown else ""
        takes = "" if option.kind == "flag" else _value(option, ":" if not option.bare else "::")
        for names in (option.shown, tuple(name for name in option.names if name not in option.shown)):
            if not names:
                continue
            spelled = [name + _joint(name, option) for name in names]
            several = f"'({' '.join(names)})'{{{','.join(spelled)}}}" if len(names) > 1 else ""
            hidden = "!" if names != option.shown else ""
            if several and hidden:
                yield from (_quoted(f"!{each}{takes}") for each in spelled)
            else:
                yield (
                    several + _quoted(described + takes)
                    if several
                    else _quoted(hidden + spelled[0] + described + takes)
                )


def _joint(name: str, option: CliOption) -> str:
    if option.kind == "flag":
        return ""
    return "=" if name.startswith("--") else "+"


def _arguments(command: CliCommand) -> Iterator[str]:
    for i, argument in enumerate(() if command.children else command.arguments):
        if argument.kind == "program":
            yield "'1:program:_files'"
            yield "'*:argument:_files'"
            return
        last = i == len(command.arguments) - 1
        place = "*" if last and argument.metavar == "PATH" and command.words[-1] not in ("diff",) else str(i + 1)
        yield _quoted(place + _value(argument, ":"))


def _value(option: CliOption, colon: str) -> str:
    action = f"({' '.join(option.words)})" if option.words else _ACTIONS[option.kind]
    return f"{colon}{_escaped(option.metavar)}:{action}"


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
