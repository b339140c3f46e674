"""The texts that users read: a golden file of all, and what makes them easy to read."""

import re
from pathlib import Path

from texts import all_texts, of_cpp, of_python

GOLDEN = Path(__file__).with_name("texts.txt")
MOST_WORDS = 28
"""Of a clause: what stands between two of ``. : ; ! ?`` or line ends. A value in braces is one word."""


def test_golden_file() -> None:
    assert GOLDEN.read_text() == all_texts(), (
        "texts of errors, notices or help have changed: `python tests/house/texts.py > tests/house/texts.txt`,"
        " and read the difference as prose"
    )


def test_clauses_are_short() -> None:
    long = []
    for line in all_texts().splitlines():
        plain = re.sub(r"\{[^{}]*\}", "X", line.replace("\\n", "\n"))
        long += [part for part in re.split(r"(?<=[.:;!?])\s|\n", plain) if len(part.split()) > MOST_WORDS]
    assert long == []


def test_texts_are_found() -> None:
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
