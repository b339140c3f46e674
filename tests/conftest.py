"""What tests of several folders use. This folder is on the path by it: `mpi_jobs` can be imported."""

import os
import sys
from pathlib import Path

import pytest

from allranks import testing

# The tests start thousands of interpreters. Each would compile all that it imports of allranks, 0.6 s of a core, where
# a container's image forbids that the result is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nearly every rank of a test's imports these: the first for the test's own module, the second in torch.manual_seed and
# in optimizers, 2 s of a core. They are imported once in each fork server.
testing._PRELOADED += ["pytest", "torch._dynamo"]

# The files of `make quick` and of `pytest -m quick`: they start no ranks, or few, and end within a second or two.
QUICK = {
    "conformance": ("bad_input", "signatures"),
    "engines": ("by_device", "doors", "reception", "registry"),
    "house": (
        "api", "architecture", "decisions", "differences", "engines", "errors", "exports", "host", "sites", "variables",
    ),
    "launch": (
        "hostlist", "launch_blame", "launch_collapse", "launch_layout", "launch_options", "launch_outlet",
        "launch_output", "launch_placement", "places", "torchruns_options",
    ),
    "parallel": ("data",),
    "rendezvous": ("env", "init", "network", "store", "unlaunched"),
    "tools": ("bench_parts", "env_command"),
}  # fmt: skip
QUICK_FILES = {Path(__file__).parent / folder / f"test_{name}.py" for folder, names in QUICK.items() for name in names}
if gone := [str(file) for file in QUICK_FILES if not file.exists()]:
    raise pytest.UsageError(f"QUICK in tests/conftest.py names files that are not there: {gone}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not asked for is not imported: torch's database of operators alone takes ten seconds."""
    is_other = collection_path.suffix == ".py" and collection_path not in QUICK_FILES
    return True if config.getoption("markexpr") == "quick" and is_other else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in QUICK_FILES:
            item.add_marker("quick")
