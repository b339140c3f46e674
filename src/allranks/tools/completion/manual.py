"""The manual pages: ``man allranks``, and ``man allranks-run`` for each command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.tools.commands import EXAMPLES
from allranks.tools.completion.tree import CliCommand, CliOption

__all__ = ["pages"]


def pages(commands: Sequence[CliCommand]) -> dict[str, str]:
    """Return the text of each page, by its file name."""
    found = {"allranks.1": _page("allranks", "run PyTorch on many processes", _overview(commands))}
    for command in commands:
        for each in command.walk():
            name = "-".join(("allranks", *each.words))
            found[f"{name}.1"] = _page(name, each.summary, _described(each))
    return found


def _page(name: str, summary: str, body: Iterator[str]) -> str:
    head = [f'.TH "{name.upper()}" 1 "" "allranks" "allranks"', ".SH NAME", f"{_plain(name)} \\- {_plain(summary)}"]
    return "\n".join([*head, *body]) + "\n"


def _overview(commands: Sequence[CliCommand]) -> Iterator[str]:
    yield from (".SH SYNOPSIS", r"\fBallranks\fR [\fB\-V\fR] \fICOMMAND\fR ...", ".SH COMMANDS")
    for command in commands:
        yield from (".TP", rf"\fBallranks\-{_plain(command.name)}\fR(1)", _plain(command.summary))
    yield ".SH OPTIONS"
    yield from (".TP", r"\fB\-h\fR, \fB\-\-help\fR", "print the commands; after a command, print its options")
    yield from (".TP", r"\fB\-V\fR, \fB\-\-version\fR", "print the version")
    yield from _examples(EXAMPLES)


def _described(command: CliCommand) -> Iterator[str]:
    parser = command.parser
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    lines = re.sub(r"\n\s+(?!allranks )", " ", usage).splitlines()
    yield from (".SH SYNOPSIS", ".nf", *(_plain(line.strip()) for line in lines), ".fi")
    yield from (".SH DESCRIPTION", _plain(parser.description or ""))
    if command.children:
        yield ".SH COMMANDS"
        for child in command.children:
            yield from (".TP", rf"\fB{_plain('-'.join(('allranks', *child.words)))}\fR(1)", _plain(child.summary))
    arguments = [each for each in command.arguments if each.help and not command.children]
    if arguments:
        yield ".SH ARGUMENTS"
        for each in arguments:
            yield from (".TP", rf"\fI{_plain(each.metavar)}\fR", _plain(each.help))
    yield ".SH OPTIONS"
    for option in command.options:
        if option.shown:
            yield from (".TP", _heading(option), _plain(option.help))
    if parser.epilog:
        yield from (".SH NOTES", _plain(parser.epilog))
    if parser.examples:
        yield from _examples(parser.examples)
    yield from (".SH SEE ALSO", r"\fBallranks\fR(1)")


def _examples(examples: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield ".SH EXAMPLES"
    for line, what in examples:
        yield from (".TP", rf"\fB{_plain(line)}\fR", _plain(what))


def _heading(option: CliOption) -> str:
    names = ", ".join(rf"\fB{_plain(name)}\fR" for name in option.shown)
    if option.kind == "flag":
        return names
    value = rf"\fI{_plain(option.metavar)}\fR"
    return f"{names} [{value}]" if option.bare else f"{names} {value}"


def _plain(text: str) -> str:
    """Escape text for roff: hyphens stay hyphens, and no line is taken for a request."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return r"\&" + escaped if escaped.startswith((".", "'")) else escaped
