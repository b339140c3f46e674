"""Texts for users: short clauses, and files that are generated from the help."""

import re
from pathlib import Path

import pytest
from texts import all_texts, of_cpp, of_python

from allranks.tools.completion.__main__ import files

MOST_WORDS = 28
"""Limit for a clause: the text between two of ``. : ; ! ?`` or line ends. A value in braces is one word."""


HELP = files()
"""Files generated from the help: completion scripts and manual pages."""


@pytest.mark.parametrize("path", HELP, ids=lambda path: path.name)
def test_generated_files_match_the_help(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == HELP[path], "run: python -m allranks.tools.completion"


def test_no_generated_file_belongs_to_a_removed_command() -> None:
    for folder in {path.parent for path in HELP}:
        assert set(folder.iterdir()) == {path for path in HELP if path.parent == folder}


def test_clauses_are_short() -> None:
    long = []
    for line in all_texts().splitlines():
        plain = re.sub(r"\{[^{}]*\}", "X", line.replace("\\n", "\n"))
        long += [part for part in re.split(r"(?<=[.:;!?])\s|\n", plain) if len(part.split()) > MOST_WORDS]
    assert long == []


def test_texts_in_python_and_cpp_sources_are_found() -> None:
    source = '''
"""A docstring of the module."""
NAME = "word"
raise ValueError(f"rank {rank:d} has " "no group" if x else f"expected {a + b!r} of them")
'''
    assert [text for text in of_python(source) if " " in text] == [
        "rank {rank} has no group",
        "expected {a + b} of them",
    ]
    assert list(
        of_cpp('// "a comment"\nthrow Error("the ring " + std::to_string(n) + " is \\"full\\""\n  " now");')
    ) == [
        "the ring ",
        ' is "full" now',
    ]
