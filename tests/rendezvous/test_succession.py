"""Who goes on after a loss, over hundreds of simulated groups."""

from __future__ import annotations

import pytest
from succession_simulation import Group


@pytest.mark.parametrize("block", range(5))
def test_simulated_groups(block: int) -> None:
    for seed in range(block * 60, (block + 1) * 60):
        try:
            Group(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
