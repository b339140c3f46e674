"""Settings for all tests. This file also puts its folder on the path, so that `support` can be imported."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from allranks import testing

# The tests start thousands of interpreters. If a container image forbids cached bytecode, each interpreter compiles
# all imported modules of allranks, which costs 0.6 s of CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nearly every rank imports these: pytest for the test's module, torch._dynamo in optimizers. The import costs 2 s of
# CPU time. Each fork server imports them once.
testing._PRELOADED += ["pytest", "torch._dynamo"]

# The duration of an example depends on the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# The files of `make quick` and of `pytest -m quick`. They start few ranks or none, and finish within two seconds.
QUICK = {
    "base": ("errors",),
    "call": ("callsite",),
    "cluster": ("env", "host", "hostlist", "network", "places"),
    "conformance": ("bad_input", "signatures"),
    "engines": ("by_device", "connection_server", "registry", "segment_exchange"),
    "house": (
        "api", "architecture", "core_rooms", "decisions", "differences", "engines", "exports", "figures", "test_tree",
        "texts", "variables",
    ),
    "launch": (
        "launch_collapse", "launch_layout", "launch_options", "launch_outlet", "launch_output", "launch_placement",
        "launch_simulation", "root_cause", "torchruns_options",
    ),
    "rendezvous": ("init", "unlaunched"),
    "store": ("store",),
    "tools": ("bench_parts", "env_command"),
    "trace": ("clocks", "diagnosis"),
    ".": ("data",),
}  # fmt: skip
# The slowest files start first, so that no pytest-xdist worker is left alone with a long file at the end.
LONG = {
    "checkpoint": ("trainers",),
    "conformance": ("torch_suite",),
    "engines": ("mpi",),
    "faults": ("forks",),
    "hosts": ("hosts", "launch_ssh", "networks", "training_hosts"),
    "house": ("commands_of_pages", "examples", "master_worker_page", "more_examples", "tutorial", "wheel"),
    "launch": ("launch_ranks", "torchrun"),
    "parallel": ("ddp", "digits"),
    "plugin": ("programs_of_torch",),
    "remote": ("bootstrap", "capture_changes"),
    "resilience": ("deaths", "elastic", "fully_sharded", "rehearsal", "random_faults", "random_programs"),
    "tools": ("bench",),
}


def _files(table: dict[str, tuple[str, ...]]) -> set[Path]:
    files = {Path(__file__).parent / folder / f"test_{name}.py" for folder, names in table.items() for name in names}
    if gone := [str(file) for file in files if not file.exists()]:
        raise pytest.UsageError(f"tests/conftest.py names files that do not exist: {gone}")
    return files


QUICK_FILES, LONG_FILES = _files(QUICK), _files(LONG)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that are not selected."""
    is_other = collection_path.suffix == ".py" and collection_path not in QUICK_FILES
    return True if config.getoption("markexpr") == "quick" and is_other else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in QUICK_FILES:
            item.add_marker("quick")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path not in LONG_FILES)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection.

    Each collection over them takes 0.2 s, and every capture begins with one.
    """
    gc.collect()
    gc.freeze()


# The cost of tests per file: CPU seconds of this process and of its reaped child processes. Many tests mostly wait, so
# their duration does not show which change would shorten the whole run.
COST: Counter[str] = Counter()
STARTED = pytest.StashKey[float]()
SHOWN = 25


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    item.user_properties.append(("cpu_s", _cpu_seconds() - item.stash[STARTED]))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        COST[report.nodeid.partition("::")[0]] += dict(report.user_properties).get("cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if len(COST) > SHOWN and not hasattr(config, "workerinput"):
        terminalreporter.section(f"CPU time: {COST.total():.0f} s; the files that need most")
        for file, seconds in COST.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
