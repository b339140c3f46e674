"""torch's own test suite: allranks passes every test that gloo does not skip, or a table gives the reason."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch_suite

RUNS = (("allranks", 3), ("plugin", 4))  # run the other two manually: python tests/conformance/torch_suite.py
Rows = dict[str, tuple[str, str]]


def names_for(library: str, ranks: int) -> list[str]:
    """Return the names of the tests to run; on the plugin no test is excluded."""
    return torch_suite.wanted(ranks, with_excluded=library == "plugin")


@pytest.fixture(scope="module")
def running() -> Iterator[dict[tuple[str, int], "Future[Rows]"]]:
    """Run all suites concurrently, because the tests mostly wait."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        yield {each: pool.submit(torch_suite.run, *each, names_for(*each)) for each in RUNS}


@pytest.mark.timeout(600)  # 90 s on an idle machine, longer on a busy one
@pytest.mark.parametrize(("library", "ranks"), RUNS)
def test_torch_tests_that_gloo_supports_pass(
    library: str, ranks: int, running: dict[tuple[str, int], "Future[Rows]"], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = torch_suite.expected()
    version = torch.__version__.partition("+")[0]
    assert stored["torch"] == version, "another version of torch: run python tests/conformance/torch_suite.py --write"
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


def test_excluded_patterns_match_existing_tests() -> None:
    names = {name for ranks in torch_suite.WORLD_SIZES for name in torch_suite.wanted(ranks, with_excluded=True)}
    for pattern, reason in torch_suite.EXCLUDED.items():
        assert reason
        assert any(re.search(pattern, name) for name in names), f"{pattern} excludes nothing"
