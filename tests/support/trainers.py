"""The environment with Lightning, Accelerate, torchmetrics and transformers (`make trainers`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["python_with"]

_VENV = Path(__file__).parents[2] / "build" / "trainers-venv"


def python_with(package: str) -> Path:
    """Return the Python of the environment. Without the package, skip the test; fail if ALLRANKS_TEST_ALL=1."""
    if not any(_VENV.glob(f"lib/python*/site-packages/{package}")):
        missing = f"there is no build/{_VENV.name} with {package}: make trainers"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    return _VENV / "bin" / "python"
