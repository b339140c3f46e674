"""torch's own suite as the judge: what gloo takes of it, allranks passes, or it stands in a table with the reason."""

import re

import pytest
import torch
import torch_suite


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", torch_suite.WORLD_SIZES)
@pytest.mark.parametrize("library", ["allranks", "plugin"])
def test_what_gloo_takes(library: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    stored = torch_suite.expected()
    version = torch.__version__.partition("+")[0]
    assert stored["torch"] == version, "another torch: python tests/conformance/torch_suite.py --write"
    by_gloo = stored[str(ranks)]
    of_gloo = torch_suite.wanted(ranks, with_excluded=True)
    names = of_gloo if library == "plugin" else torch_suite.wanted(ranks)
    rows = torch_suite.run(library, ranks, names)
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
