"""docs/decisions.md lists every decision record with its number and title."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LINE = re.compile(r"^- (\d{3}) \[(.+)\]\(decisions/(.+)\)$", re.MULTILINE)


def test_every_record_is_listed_once() -> None:
    listed = sorted(LINE.findall((DOCS / "decisions.md").read_text()))
    records = sorted((DOCS / "decisions").iterdir())
    assert [name for _, _, name in listed] == [record.name for record in records]
    for number, title, name in listed:
        assert name.startswith(f"{number}-")
        assert (DOCS / "decisions" / name).read_text().startswith(f"# {title}\n\n")
    assert [int(number) for number, _, _ in listed] == list(range(1, len(records) + 1))
