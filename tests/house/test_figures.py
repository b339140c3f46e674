"""Every performance figure in the documents has a source, and no source is older than the last minor version."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import allranks

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks").glob("*.json"))
# A duration below a second, a data rate, or a ratio.
FIGURE = re.compile(r"\d ?(?:ns|us|µs|ms|GB/s|MB/s|GiB/s)\b|\d\.\d+x\b")
# A link to generated figures or to a decision record, or the file of a benchmark.
SOURCE = re.compile(r"#small-calls|performance\.md|#time-and-memory|#what-a-loss-costs|decisions/|benchmarks/")
# Figures of the design, which are not measured: intervals, limits and goals.
CONSTANTS = {
    "docs/hangs.md": ("less than 2 ms",),
    "docs/performance.md": ("starts it within about 0.1 ms",),
    "docs/resilience.md": ("a step of 5 ms", "50 ms at most", "every 50 ms", "after 50 ms"),
    "docs/tracing.md": ("less than 20 us", "at most 0.1 ms"),
}


def minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_origin(path: Path) -> None:
    """benchmarks/record.py adds the origin to each file."""
    about = json.loads(path.read_text())["about"]
    assert re.fullmatch(r"[0-9a-f]{40}", about["commit"])
    assert re.match(r"\d{4}-\d\d-\d\dT", about["date"])
    assert about["cpus"] >= 1
    major, last = minor(allranks.__version__)
    assert minor(about["version"]) >= (major, last - 1), f"{path.name} was measured with {about['version']}: repeat it"


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "README.md", "docs/*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in listed if not name.startswith("docs/decisions/")]


@pytest.mark.parametrize("name", pages())
def test_figures_have_a_source(name: str) -> None:
    """A figure is generated from a file of results, or its paragraph, item or row names the source."""
    text = re.sub(r"<!-- figures.*?<!-- /figures -->", "", (ROOT / name).read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*\n", "", text, flags=re.MULTILINE)  # sample output
    for constant in CONSTANTS.get(name, ()):
        assert constant in text, "remove the entry of CONSTANTS"
        text = text.replace(constant, "")
    unsourced = [
        block for block in re.split(r"\n\s*\n|\n(?=[-*|] )", text) if FIGURE.search(block) and not SOURCE.search(block)
    ]
    assert unsourced == []
