"""Comparison of an example's output with the output that examples/README.md shows."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "examples" / "README.md"
SECTION = re.compile(r"^## (\w+):.*?\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\b[0-9a-f]{12}\b|\d[\d.,]*(e-\d+)?")  # or a fingerprint of weights


def assert_as_shown(example: str, printed: str) -> None:
    """Assert that the lines match the page in content and order.

    Numbers and repetitions of similar lines are ignored.
    """
    (output,) = OUTPUT.findall(dict(SECTION.findall(README.read_text()))[example])
    assert _kinds(printed) == _kinds(output), printed


def _kinds(output: str) -> list[str]:
    return list(dict.fromkeys(NUMBER.sub("#", line) for line in output.splitlines()))
