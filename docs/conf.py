"""Sphinx configuration of the site: `make docs`, which calls docs/site.py.

The sources are the pages in the repository, and pages that docs/site.py generates from the code.
"""

from __future__ import annotations

import re
from typing import Any

project = "allranks"
author = "the authors of allranks"
html_title = "allranks"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_show_copyright = False
html_static_path: list[str] = []
html_theme_options = {"top_of_page_buttons": []}
# A page opened from a disk must not read other pages, which the search does to show an excerpt of each result.
_SEARCH = "DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol != 'file:'"
html_js_files = [(None, {"body": _SEARCH})]
root_doc = "index"
nitpicky = False

myst_heading_anchors = 4  # the anchors that repository viewers generate for headings
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Shape", "Units", "Cost", "Source"]
highlight_language = "text"


def _code(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Mark text between single backticks as code. By default, Sphinx searches for a page of that name."""
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"(?<![`:\w])`([^`\s][^`]*)`(?![`_\w])", r"``\1``", line)


def _example(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Format the text below "Example:" as a program."""
    if "Example:" in lines:
        at = lines.index("Example:")
        lines[at : at + 1] = ["Example::", ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _example, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _code, priority=900)
