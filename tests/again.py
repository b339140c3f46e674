"""Rerun failed tests of a full run alone; `make test` calls this with pytest's exit status and with options for it.

Many tests kill, stop or time real processes, and several files run concurrently. A test that fails beside other tests
and passes alone is printed at the end, after its report, and does not fail the run. It is a race in the test or in the
tested code, and must be fixed. A test that fails twice fails the run. More than two failures also fail the run,
because that many are no coincidence.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

MOST = 2
ROOT = Path(__file__).parents[1]


def main(status: int, options: list[str]) -> int:
    (cache,) = [word.partition("=")[2] for word in options if word.startswith("cache_dir=")] or [".pytest_cache"]
    failed = ROOT / cache / "v/cache/lastfailed"
    if status != pytest.ExitCode.TESTS_FAILED or not failed.exists():
        return status
    names = sorted(json.loads(failed.read_text()))
    if not 0 < len(names) <= MOST:
        return status
    print(f"\n{len(names)} failed in parallel and run again, one at a time: {', '.join(names)}", flush=True)
    if again := pytest.main([*options, *names]):
        return int(again)
    print(f"FLAKY (failed in parallel, passed alone): {', '.join(names)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
