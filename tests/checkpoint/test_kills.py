"""Ranks and launchers that are killed during a save, in the jobs of benchmarks/checkpoint_kills.py.

To repeat a seed that fails, run ``python benchmarks/checkpoint_kills.py --seeds SEED:SEED+1 --verbose``.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def _kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_kills", ROOT / "benchmarks" / "checkpoint_kills.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SEEDS = {"one folder": (0, 1, 2, 5, 7, 19), "apart": (100, 101, 103, 109)}
"""Seeds of kills. They include every victim."""


@pytest.mark.parametrize("where", SEEDS)
def test_newest_checkpoint_is_correct_after_random_kills(where: str) -> None:
    """The seed decides each kill, so a seed that fails can be repeated."""
    kills = _kills()
    with kills.Kills(apart=where == "apart") as jobs:
        for seed in SEEDS[where]:
            found, plan = jobs.run(seed), kills.Plan.of(seed)
            assert found["wrong"] == "", found
            assert (found["victim"], found["step"]) == (plan.victim, plan.step)
            assert len(found["killed in"]) == (len(plan.ranks) or kills.RANKS)
            for moment in found["killed in"]:
                step = int(moment.removeprefix("step ").partition(",")[0])
                assert step >= plan.step - 1, found  # a save can finish on one rank before it finishes on another
