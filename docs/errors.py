"""Generate docs/errors.md: errors from the docstrings of their classes, exit codes from the constants of the code.

python docs/errors.py            # writes the page
python docs/errors.py --check    # fails if the page differs
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

import allranks
from allranks._base import errors
from allranks._base.exit_codes import EXIT_CODES

PAGE = Path(__file__).with_name("errors.md")
HEAD = """\
# Errors and exit codes

Every error that allranks raises intentionally is one of these. A message names the call, the actual and the expected
values (rank, host, pid, bytes, seconds), and the next action. From Python 3.11 on, a traceback ends with the command
that prints the section of its error. `ALLRANKS_DOCS` names a site to link to instead, and 0 omits both.
`python docs/errors.py` writes this page from the code.
"""
TREE = "The tree::\n\n"
LINE = 120


def markdown(text: str) -> str:
    """Convert a docstring to Markdown: single backticks, and links instead of page names."""
    text = text.replace("``", "`")
    return re.sub(r"docs/(\w+)\.md(#[\w-]+)?", r"[\1](\1.md\2)", text)


def filled(text: str, first: str = "") -> str:
    lines = textwrap.wrap(
        markdown(" ".join(text.split())),
        LINE,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def tree() -> str:
    """Return the tree of errors from the docstring of the errors module."""
    drawn = inspect.getdoc(errors).partition(TREE)[2].partition("\n\n")[0]  # type: ignore[union-attr]
    return f"```\n{textwrap.dedent(drawn)}\n```\n"


def section(name: str) -> str:
    """Return meaning, causes and remedy of an error."""
    doc = inspect.getdoc(getattr(errors, name)) or ""
    parts = dict(re.findall(r"^(Causes|Remedy):\n(.*?)(?=\n\n\S|\Z)", doc, re.MULTILINE | re.DOTALL))
    lines = [f"## {name}", "", filled(doc.partition("\n\n")[0]), ""]
    if "Causes" in parts:
        causes = re.split(r"^\s*- ", parts["Causes"], flags=re.MULTILINE)[1:]
        lines += ["Causes:", "", *(filled(cause, "- ") for cause in causes), ""]
    return "\n".join([*lines, filled(parts["Remedy"]), ""])


def names_of_torch() -> str:
    """Return the table of torch's names for errors."""
    rows = [
        f"| `{name}` | [{getattr(errors, name).__name__}](#{getattr(errors, name).__name__.lower()}) |"
        for name in errors.__all__
        if getattr(errors, name).__name__ != name
    ]
    head = ["## Names of torch", "", "`except` clauses that were written for torch continue to work:", ""]
    return "\n".join([*head, "| name | is |", "|---|---|", *rows, ""])


def exit_codes() -> str:
    """Return the table of exit codes."""
    rows = [f"| {each.commands} | {each.code} | {each.meaning} |" for each in EXIT_CODES]
    head = ["## Exit codes", "", "Those of the commands of `allranks`:", ""]
    return "\n".join([*head, "| command | code | meaning |", "|---|---|---|", *rows, ""])


def page() -> str:
    """Return the page."""
    named = re.findall(r"(\w+)(?:\(|  )", tree())
    order = [name for name in named if name in errors.__all__]
    assert set(order) == {getattr(errors, name).__name__ for name in errors.__all__}
    assert set(errors.__all__) < set(allranks.__all__)
    return "\n".join([HEAD, tree(), *map(section, order), names_of_torch(), exit_codes()])


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/errors.md is outdated: run python docs/errors.py")
