"""docs/errors.md matches the errors in the code, and a traceback ends with the link to the error's section."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import allranks
from allranks._base import errors
from allranks._base.exit_codes import EXIT_CODES
from allranks.tools.commands import COMMANDS

ROOT = Path(__file__).parents[2]
RAISE = "import allranks; allranks.get_rank()"
LINK = "  See: allranks help NotInitializedError"


def test_errors_page_matches_the_code() -> None:
    subprocess.run([sys.executable, "docs/errors.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_meaning_causes_and_remedy(name: str) -> None:
    title = getattr(errors, name).__name__
    section = (ROOT / "docs/errors.md").read_text().partition(f"\n## {title}\n\n")[2].partition("\n## ")[0]
    meaning, *rest = [part.strip() for part in section.split("\n\n")]
    assert meaning.endswith(".")
    assert rest[-1].endswith(".")
    assert title == "AllranksError" or (rest[0] == "Causes:" and rest[1].startswith("- "))


def test_exit_codes_name_existing_commands() -> None:
    for row in EXIT_CODES:
        for command in re.findall(r"`(\w+)", row.commands):
            assert command in COMMANDS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python prints notes from 3.11 on")
@pytest.mark.parametrize(
    ("docs", "last"),
    [
        (None, LINK),
        ("https://wiki.example/ours", "  See https://wiki.example/ours/docs/errors.html#notinitializederror"),
        ("0", "call allranks.init_process_group() first"),
    ],
)
def test_traceback_ends_with_the_link(docs: str | None, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLRANKS_DOCS", raising=False)
    if docs is not None:
        monkeypatch.setenv("ALLRANKS_DOCS", docs)
    done = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(last)
    assert done.stderr.count("  See") == (docs != "0")


def test_message_has_no_link_and_added_notes_are_kept() -> None:
    error = allranks.PeerLostError("rank 3 died.", 3)
    assert str(error) == "rank 3 died."
    error.__notes__.append("mine")  # Equivalent to add_note, which exists since Python 3.11.
    assert len(error.__notes__) == 2


def test_message_with_a_link_receives_no_second_link() -> None:
    inner = f"rank 1 failed:\nallranks.NotInitializedError: no group\n{LINK}"
    assert not hasattr(allranks.RankError(inner, 1), "__notes__")


def helped(topic: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", "help", topic]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("topic", "first", "contains"),
    [
        ("MismatchError", "## MismatchError", "Causes:"),
        ("mismatcherror", "## MismatchError", "Part of: allranks help errors"),
        ("ALLRANKS_DOCS", "`ALLRANKS_DOCS`", "Part of: allranks help launching"),
        ("rank slot", "rank slot", "Part of: allranks help glossary"),
        ("debugging", "# ", "allranks trace show"),
        ("master-worker", "# ", "worker"),
    ],
)
def test_help_prints_a_topic(topic: str, first: str, contains: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "help", topic], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(first)
    assert contains in done.stdout


@pytest.mark.parametrize("topic", ["nonsense", "../README", "decisions/001"])
def test_unknown_help_topic_is_refused_with_a_list_of_topics(topic: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "help", topic], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"allranks help: error: unknown topic '{topic}'; expected a command, an error")
    assert "launching" in done.stderr


def test_pages_in_the_wheel_are_smaller_than_1_mib() -> None:
    assert sum(page.stat().st_size for page in (ROOT / "docs").glob("*.md")) < 1 << 20
