"""One table in the code lists all variables that allranks reads, and docs/launching.md contains this table."""

import re
from pathlib import Path

from allranks._cluster.env import VARIABLES

ROOT = Path(__file__).parents[2]
OURS = [variable for variable in VARIABLES if variable.name.startswith("ALLRANKS_")]


def test_table_lists_every_variable_in_the_code() -> None:
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"\bALLRANKS_[A-Z_]*[A-Z]\b", path.read_text()))
    for path in (ROOT / "core").rglob("*.*"):
        named |= set(re.findall(r'"(ALLRANKS_\w+)"', path.read_text()))
    assert "ALLRANKS_TLS_CERT" in named  # Some code composes this name from parts.
    assert named == {variable.name for variable in OURS}


def test_launching_page_contains_the_table_of_variables() -> None:
    lines = ["| variable | set by | meaning | if not set |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.set_by} | {v.meaning} | {v.default} |" for v in OURS if v.default is not None]
    inner = [f"`{v.name}` ({v.set_by}): {v.meaning}" for v in OURS if v.default is None]
    lines += ["", "Not for users, and without a promise that they stay:", "", *(f"- {line}" for line in inner)]
    text = (ROOT / "docs" / "launching.md").read_text()
    assert re.findall("<!-- variables -->\n(.*?)\n<!-- /variables -->", text, re.DOTALL) == ["\n".join(lines)]
