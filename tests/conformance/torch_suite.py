"""torch's own tests of torch.distributed (part of every torch installation), run on allranks or on gloo.

    python tests/conformance/torch_suite.py --world-size 3                  # on allranks: all tests except EXCLUDED
    python tests/conformance/torch_suite.py --world-size 3 -k broadcast     # some tests, with their errors
    python tests/conformance/torch_suite.py --world-size 3 --excluded       # all tests, including EXCLUDED
    python tests/conformance/torch_suite.py --write                         # gloo's results, for test_torch_suite.py

The module of torch's tests is used unchanged, except that ``allranks`` replaces its ``dist``. When it is imported, it
selects tests by the name of the backend: most tests for gloo, all_to_all on CPUs only for mpi. Therefore each of these
two names has a process, and ``BackendName`` compares equal to two names. Each test forks new ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("torch_suite_gloo.json")
WORLD_SIZES = (3, 4)
TEST_TIMEOUT_S = 30

# Tests that gloo supports and allranks does not pass: pattern of the names, and the reason.
EXCLUDED = {
    "^test_ddp_logging_data_cpu$": "reads the internal log of torch's DistributedDataParallel",
    "^test_static_graph_api_cpu$": "reads the same log; allranks raises the expected error, too",
}

# Modules that the parent process imports before it forks. Otherwise every rank of every test would import them again,
# which takes 0.1 s of CPU time or more.
IMPORTED = {
    "allranks": ("allranks._engines.native.engine", "allranks._engines.c10d.store"),
    "plugin": ("allranks._plugin.creation", "allranks._plugin.operators", "allranks._engines.native.engine"),
}


class BackendName(str):
    """Name of the backend that also equals ``alias``, the name of the backend whose tests are selected."""

    alias = ""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.alias  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class OftenPolling:
    """Replacement of the module ``time`` for code that polls other processes every 0.1 s: it polls every 0.01 s."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01) if seconds <= 0.1 else seconds)


def excluded(name: str) -> str | None:
    """Return the reason why the test is not run on allranks, or None if it is run."""
    return next((reason for pattern, reason in EXCLUDED.items() if re.search(pattern, name)), None)


def suite(library: str, alias: str, world_size: int) -> type[unittest.TestCase]:
    """Return torch's tests for the backend ``alias``, on ``library``, with ranks that this process forks."""
    os.environ |= {
        "BACKEND": alias,
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": tempfile.gettempdir(),
    }
    import torch.distributed
    import torch.testing._internal.common_distributed as common

    torch.distributed.is_mpi_available = lambda: True  # tests for mpi are skipped without it
    common.get_timeout = lambda _: TEST_TIMEOUT_S
    common.skip_if_small_worldsize = lambda test: test  # it requires eight ranks; three are sufficient
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    tests.default_pg_timeout = TEST_TIMEOUT_S
    tests.time = common.time = OftenPolling()
    tests.BACKEND = BackendName({"gloo": "gloo", "plugin": "allranks"}.get(library, "native"))
    tests.BACKEND.alias = alias
    if library == "allranks":
        os.environ["ALLRANKS_TORCH_WORLD"] = "0"  # allranks replaces ``dist`` of the tests
        allranks = importlib.import_module("allranks")
        parallel = importlib.import_module("allranks.nn.parallel")
        tests.dist = common.c10d = allranks
        tests.get_world_size = allranks.get_world_size
        tests._get_default_group = lambda: allranks.group.WORLD
        allranks._rank_not_in_group = lambda group: group == allranks.GroupMember.NON_GROUP_MEMBER
        tests.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = parallel.DistributedDataParallel
        tests.DistributedSampler = allranks.data.DistributedSampler
    for module in IMPORTED.get(library, ()):
        importlib.import_module(module)
    torch.set_num_threads(1)

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def run_here(library: str, alias: str, world_size: int, names: list[str] | None) -> dict[str, tuple[str, str]]:
    """Run the named tests (None: all) in this process; return ``{name: (passed, skipped or failed; reason)}``."""
    case = suite(library, alias, world_size)
    rows = {}
    for name in unittest.TestLoader().getTestCaseNames(case):
        if ("all_to_all" in name) != (alias == "mpi") or (names is not None and name not in names):
            continue
        result = unittest.TestResult()
        unittest.TestSuite([case(name)]).run(result)
        wrong = [text for _, text in (*result.errors, *result.failures)]
        skipped = [text for _, text in result.skipped]
        rows[name] = ("failed" if wrong else "skipped" if skipped else "passed", "\n".join(wrong or skipped))
    return rows


def run(library: str, world_size: int, names: list[str] | None) -> dict[str, tuple[str, str]]:
    """Run the named tests as ``run_here`` does, in one new process for each alias."""
    rows: dict[str, tuple[str, str]] = {}
    for alias in ("gloo", "mpi"):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            arguments = (library, alias, world_size, names, str(output))
            code = f"import torch_suite; torch_suite.child(*{arguments!r})"
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"torch's suite on {library} exited with {done.returncode}:\n{done.stdout[-4000:]}")
            rows |= {name: tuple(row) for name, row in json.loads(output.read_text()).items()}
    return rows


def child(library: str, alias: str, world_size: int, names: list[str] | None, output: str) -> None:
    """Run the named tests in a process that ``run`` has started; write the results to ``output``."""
    Path(output).write_text(json.dumps(run_here(library, alias, world_size, names)))


def expected() -> dict[str, Any]:
    """Return the results of gloo that ``--write`` has recorded."""
    return json.loads(EXPECTED.read_text())


def wanted(world_size: int, with_excluded: bool = False) -> list[str]:
    """Return the tests that must pass on allranks: all that gloo passes or fails, except EXCLUDED."""
    by_gloo = expected()[str(world_size)]
    return [name for name in by_gloo["passed"] + by_gloo["failed"] if with_excluded or not excluded(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, action="append", help=f"default: {WORLD_SIZES}")
    parser.add_argument("-k", dest="pattern", default="", help="run only tests whose names match this pattern")
    parser.add_argument("--on", choices=("allranks", "plugin"), default="allranks")
    parser.add_argument("--excluded", action="store_true", help="also run the excluded tests")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"run all tests on gloo, and write the names of the passed tests to {EXPECTED.name}",
    )
    given = parser.parse_args()
    written: dict[str, Any] = {}
    for world_size in given.world_size or WORLD_SIZES:
        if given.write:
            rows = run("gloo", world_size, None)
        else:
            names = [name for name in wanted(world_size, given.excluded) if re.search(given.pattern, name)]
            rows = run(given.on, world_size, names)
        for name, (status, why) in rows.items():
            print(f"{status} {name}" + (f"\n{why}" if status == "failed" and given.pattern else ""))
        counts = Counter(status for status, _ in rows.values())
        print(f"{world_size} ranks: {dict(counts)}")
        written[str(world_size)] = {
            "passed": [name for name, (status, _) in rows.items() if status == "passed"],
            "failed": [name for name, (status, _) in rows.items() if status == "failed"],
            "skipped": counts["skipped"],
        }
    if given.write:
        import torch

        versioned = {"torch": torch.__version__.partition("+")[0], **written}
        EXPECTED.write_text(json.dumps(versioned, indent=1) + "\n")


if __name__ == "__main__":
    main()
