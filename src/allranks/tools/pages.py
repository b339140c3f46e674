"""``allranks help TOPIC``: prints a page of the documentation, or the section of an error or a variable.

The pages are part of the installed package, so that they are available on a host without a network.
"""

from __future__ import annotations

import pydoc
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from allranks._base.console import put

__all__ = ["show", "topics"]

_PACKAGE = Path(__file__).parents[1]


def topics() -> list[str]:
    """Return the names of all pages."""
    return sorted(page.stem for page in _folder().glob("*.md") if page.stem != "index")


def show(topic: str) -> bool:
    """Print the text of a topic, on a terminal with a pager. Return False if the topic does not exist."""
    text = next(_texts(topic), "")
    if not text:
        return False
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        put(text)
    return True


def _texts(topic: str) -> Iterator[str]:
    """Yield the page of this name, then sections whose title is the topic: errors, options of environments, terms."""
    folder = _folder()
    page = folder / f"{topic.lower().replace('-', '_')}.md"
    if page.is_file() and page.parent == folder:
        yield page.read_text()
    wanted = re.escape(topic)
    for name in ("errors", "launching", "glossary", "faq"):
        text = (folder / f"{name}.md").read_text()
        found = re.search(rf"^(#+) {wanted}\n.*?(?=^#{{1,2}} |\Z)", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
        if found:
            yield found[0].rstrip() + f"\n\nPart of: allranks help {name}\n"
        row = re.search(rf"^\| `?{wanted}`? \|.*$", text, re.MULTILINE | re.IGNORECASE)
        if row:
            cells = [cell.strip() for cell in row[0].strip("|").split("|")]
            yield "\n".join([cells[0], *(f"  {cell}" for cell in cells[1:]), "", f"Part of: allranks help {name}", ""])


def _folder() -> Path:
    """Return the folder of the pages: in the installed package, or in the repository of an editable installation."""
    folders = (_PACKAGE / "_docs", Path(sysconfig.get_path("platlib")) / "allranks/_docs", _PACKAGE.parents[1] / "docs")
    return next((folder for folder in folders if (folder / "errors.md").is_file()), folders[0])
