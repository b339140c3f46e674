"""`allranks tune`: measures the choices, writes the result to a file, and groups read the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import allranks as dist
from allranks._engines.native.tuning import NEVER, read_tuning
from allranks.testing import run_ranks
from allranks.tools.tune.selection import TunedValues, choose_tuning
from support import warm

TUNE = [sys.executable, "-m", "allranks", "tune"]


def test_fastest_measured_choice_is_selected() -> None:
    found = TunedValues(cpus=32)
    found.group_times = {
        8: {0: {8: 1.0, 16: 4.0}, 4: {8: 1.5, 16: 4.0}},
        16: {0: {8: 4.0, 16: 9.0}, 4: {8: 3.0, 16: 9.0}, 8: {8: 2.0, 16: 8.0}},
        32: {0: {8: 9.0, 16: 20.0}, 4: {8: 5.0, 16: 20.0}, 8: {8: 3.0, 16: 10.0}, 16: {8: 6.0, 16: 20.0}},
        64: {0: {8: 90.0, 16: 90.0}, 8: {8: 99.0, 16: 90.0}},
    }
    found.one_shot_times = {
        2: {4096: (1.0, 2.0), 8192: (2.0, 2.0), 16384: (5.0, 4.0)},
        4: {4096: (3.0, 2.0), 8192: (1.0, 2.0)},
    }
    table = choose_tuning(found)
    assert table == {
        "levels_from": 16,
        "crowded_levels_from": NEVER,
        "group": 8,
        "one_shot": 8192,
        "one_shot_of_all": 8192,
    }


def test_unmeasured_values_are_not_written() -> None:
    assert choose_tuning(TunedValues(cpus=2, group_times={2: {0: {8: 1.0}}})) == {}


def test_tuning_file_is_read_by_groups(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    ended = warm.run([*TUNE, "-n", "9", "--budget", "0.005", "-o", str(file)], timeout=120)
    assert ended.returncode == 0, ended.stderr
    # Other tests can run concurrently, so a warning and its action are permitted.
    permitted = ("allranks tune: warning: ", "  Run it again on an idle host.")
    assert [line for line in ended.stderr.splitlines() if not line.startswith(permitted)] == []
    assert f"export ALLRANKS_TUNING={file}" in ended.stdout
    whole = json.loads(file.read_text())
    assert set(whole["measured_us"]["meetings"]) == {"2", "4", "8", "9"}
    assert {"one_shot", "one_shot_of_all"} < set(whole["tuning"])
    assert bool(whole["noise"]) == bool(ended.stderr)
    tuning = read_tuning({"ALLRANKS_TUNING": str(file)})
    assert tuning.one_shot == whole["tuning"]["one_shot"]
    run_ranks(2, dist.barrier, env={"ALLRANKS_TUNING": str(file)})


def test_busy_machine_logs_warning(tmp_path: Path) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        ended = warm.run([*TUNE, "-n", "3", "--budget", "0.005", "-o", str(tmp_path / "file.json")], timeout=120)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"tune: warning: other processes kept [\d.]+ of \d+ CPUs busy.*: the results may be", ended.stderr)


def test_unwritable_file_is_reported_immediately(tmp_path: Path) -> None:
    ended = warm.run([*TUNE, "-o", str(tmp_path / "no" / "file")], timeout=60)
    assert ended.returncode == 2
    assert "no such directory" in ended.stderr
