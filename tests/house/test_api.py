"""The public interface is the one that tests/house/api.txt lists: nobody changes it without meaning to."""

import difflib
from pathlib import Path

import api

LISTED = Path(__file__).with_name("api.txt")


def test_the_interface_is_as_listed() -> None:
    listed, found = LISTED.read_text().splitlines(), api.describe().splitlines()
    changes = "\n".join(difflib.unified_diff(listed, found, "tests/house/api.txt", "as it is", lineterm="", n=0))
    assert not changes, f"{changes}\n\nIf this is meant: python tests/house/api.py > tests/house/api.txt"
