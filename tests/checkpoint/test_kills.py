"""Ranks and launchers that are killed while they save. The jobs are those of benchmarks/checkpoint_kills.py.

A seed that fails is run again by ``python benchmarks/checkpoint_kills.py --seeds SEED:SEED+1 --verbose``.
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


@pytest.mark.parametrize("seed", range(8))
def test_random_kills(seed: int) -> None:
    assert _kills().run(seed) == ""


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_kills_of_ranks_with_folders_of_their_own(seed: int) -> None:
    assert _kills().run(seed, apart=True) == ""
