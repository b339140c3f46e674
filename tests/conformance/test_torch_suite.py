"""torch's own suite as the judge: what gloo takes of it, allranks passes, or it stands in a table with the reason."""

import re

import pytest
import torch
import torch_suite


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", torch_suite.WORLD_SIZES)
def test_what_gloo_takes(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    stored = torch_suite.expected()
    version = torch.__version__.partition("+")[0]
    assert stored["torch"] == version, "another torch: python tests/conformance/torch_suite.py --write"
    by_gloo = stored[str(ranks)]
    rows = torch_suite.run("allranks", ranks, torch_suite.wanted(ranks))
    assert sorted(rows) == sorted(torch_suite.wanted(ranks))
    wrong = {name: why for name, (status, why) in rows.items() if status != "passed"}
    left_out = [name for name in torch_suite.wanted(ranks, with_excluded=True) if torch_suite.excluded(name)]
    with capsys.disabled():
        print(
            f"\ntorch's suite, {ranks} ranks: {len(rows) - len(wrong)} passed, {len(wrong)} failed, "
            f"{len(left_out)} excluded; gloo: {len(by_gloo['passed'])} passed, {len(by_gloo['failed'])} failed, "
            f"{by_gloo['skipped']} skipped"
        )
    assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())


def test_what_is_excluded_is_there() -> None:
    names = {name for ranks in torch_suite.WORLD_SIZES for name in torch_suite.wanted(ranks, with_excluded=True)}
    for pattern, reason in torch_suite.EXCLUDED.items():
        assert reason
        assert any(re.search(pattern, name) for name in names), f"{pattern} excludes nothing"
