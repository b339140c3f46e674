"""torch's own suite as the judge: what gloo takes of it, allranks passes, or it stands in a table with the reason."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch_suite

RUNS = (("allranks", 3), ("plugin", 4))  # the other two by hand: python tests/conformance/torch_suite.py
Rows = dict[str, tuple[str, str]]


def names_for(library: str, ranks: int) -> list[str]:
    """The tests that are run: on the plugin nothing is excluded."""
    return torch_suite.wanted(ranks, with_excluded=library == "plugin")


@pytest.fixture(scope="module")
def running() -> Iterator[dict[tuple[str, int], "Future[Rows]"]]:
    """All suites at once: the tests mostly wait."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        yield {each: pool.submit(torch_suite.run, *each, names_for(*each)) for each in RUNS}


@pytest.mark.timeout(600)  # a minute and a half, and longer where others use the machine
@pytest.mark.parametrize(("library", "ranks"), RUNS)
def test_what_gloo_takes(
    library: str, ranks: int, running: dict[tuple[str, int], "Future[Rows]"], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = torch_suite.expected()
    version = torch.__version__.partition("+")[0]
    assert stored["torch"] == version, "another torch: python tests/conformance/torch_suite.py --write"
    by_gloo = stored[str(ranks)]
    of_gloo, names = torch_suite.wanted(ranks, with_excluded=True), names_for(library, ranks)
    rows = running[library, ranks].result()
    assert sorted(rows) == sorted(names)
    wrong = {name: why for name, (status, why) in rows.items() if status != "passed"}
    with capsys.disabled():
        print(
            f"\ntorch's suite on {library}, {ranks} ranks: {len(rows) - len(wrong)} passed, {len(wrong)} failed, "
            f"{len(of_gloo) - len(names)} excluded, {sum('all_to_all' in name for name in rows)} of them all_to_all; "
            f"gloo: {len(by_gloo['passed'])} passed, {len(by_gloo['failed'])} failed, {by_gloo['skipped']} skipped"
        )
    assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())


def test_what_is_excluded_is_there() -> None:
    names = {name for ranks in torch_suite.WORLD_SIZES for name in torch_suite.wanted(ranks, with_excluded=True)}
    for pattern, reason in torch_suite.EXCLUDED.items():
        assert reason
        assert any(re.search(pattern, name) for name in names), f"{pattern} excludes nothing"
