"""What holds for all tests. By this file the folder is on the path, so that `support` can be imported."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from allranks import testing

# The tests start thousands of interpreters. Each would compile all that it imports of allranks, 0.6 s of a core, where
# a container's image forbids that the result is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nearly every rank imports these: pytest for the test's module, torch._dynamo in optimizers.
# That takes 2 s of a core. Each fork server imports them once.
testing._PRELOADED += ["pytest", "torch._dynamo"]

# How long an example takes is a matter of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# The files of `make quick` and of `pytest -m quick`: they start no ranks, or few, and end within a second or two.
QUICK = {
    "base": ("errors",),
    "call": ("callsite",),
    "cluster": ("env", "host", "hostlist", "network", "places"),
    "conformance": ("bad_input", "signatures"),
    "engines": ("by_device", "connection_server", "registry", "segment_exchange"),
    "house": (
        "api", "architecture", "core_rooms", "decisions", "differences", "engines", "exports", "test_tree", "texts",
        "variables",
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
# The files that take longest, which are begun first: no worker of pytest-xdist then ends alone with a long one.
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
        raise pytest.UsageError(f"tests/conftest.py names files that are not there: {gone}")
    return files


QUICK_FILES, LONG_FILES = _files(QUICK), _files(LONG)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not asked for is not imported."""
    is_other = collection_path.suffix == ".py" and collection_path not in QUICK_FILES
    return True if config.getoption("markexpr") == "quick" and is_other else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in QUICK_FILES:
            item.add_marker("quick")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path not in LONG_FILES)


def pytest_collection_finish() -> None:
    """What was imported stays: a search for garbage in it takes 0.2 s each time, and capture begins with one."""
    gc.collect()
    gc.freeze()


# What tests cost: seconds of CPU time of this process and of the processes that it has waited for, by file. Many tests
# mostly wait, so their duration says little about what would make the whole run shorter.
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
