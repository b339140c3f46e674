"""The public interface equals tests/house/api.txt, so that no change of it is unintended."""

import difflib
from pathlib import Path

import api

LISTED = Path(__file__).with_name("api.txt")


def test_public_interface_equals_api_txt() -> None:
    listed, found = LISTED.read_text().splitlines(), api.describe().splitlines()
    changes = "\n".join(difflib.unified_diff(listed, found, "tests/house/api.txt", "as it is", lineterm="", n=0))
    assert not changes, f"{changes}\n\nIf this change is intended: python tests/house/api.py > tests/house/api.txt"
