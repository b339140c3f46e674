"""What failed in a run of all tests is run once more, alone: `make test` calls this with the exit status of pytest,
and with options for it.

Many tests kill, stop or time real processes, several files at a time. One that fails beside others and passes alone is
named at the end, with its report above, and does not end the run: it is a race, of the test or of what it tests, to be
mended. One that fails twice does; so do more than two at once, which are no accident.
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
    print(f"\n{len(names)} failed beside others and run once more, alone: {', '.join(names)}", flush=True)
    if again := pytest.main([*options, *names]):
        return int(again)
    print(f"FLAKY (failed beside others, passed alone): {', '.join(names)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
