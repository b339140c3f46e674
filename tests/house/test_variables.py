"""The variables that this package reads stand in one table, and that table in the documentation."""

import re
from pathlib import Path

from allranks._cluster.env import VARIABLES

ROOT = Path(__file__).parents[2]
OURS = [variable for variable in VARIABLES if variable.name.startswith("ALLRANKS_")]


def test_the_table_has_all_that_the_code_names() -> None:
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"\bALLRANKS_[A-Z_]*[A-Z]\b", path.read_text()))
    for path in (ROOT / "core").rglob("*.*"):
        named |= set(re.findall(r'"(ALLRANKS_\w+)"', path.read_text()))
    assert "ALLRANKS_TLS_CERT" in named  # which is put together in some places
    assert named == {variable.name for variable in OURS}


def test_the_documentation_has_the_table() -> None:
    lines = ["| variable | set by | meaning | if not set |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.set_by} | {v.meaning} | {v.default} |" for v in OURS if v.default is not None]
    inner = [f"`{v.name}` ({v.set_by}): {v.meaning}" for v in OURS if v.default is None]
    lines += ["", "Not for users, and without a promise that they stay:", "", *(f"- {line}" for line in inner)]
    text = (ROOT / "docs" / "launching.md").read_text()
    assert re.findall("<!-- variables -->\n(.*?)\n<!-- /variables -->", text, re.DOTALL) == ["\n".join(lines)]
