"""`run.py` without a GPU: its rows on CPU tensors, its limits and its report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).parent / "run.py"


def run(folder: Path, *options: str) -> tuple[int, list[tuple[str, str]], str]:
    """Run rows. Return the exit code, check and result of each row in the report, and the report."""
    command = [sys.executable, "-W", "ignore", RUN, "--device", "cpu", "--report", folder / "own.md", *options]
    done = subprocess.run(
        command, env=os.environ | {"OUT": str(folder)}, capture_output=True, text=True, timeout=250, check=False
    )
    assert (folder / "own.md").exists(), done.stderr
    report = (folder / "own.md").read_text()
    assert (folder / "gpu-report.md").read_text() == report
    assert not list(folder.glob("*.part"))
    return done.returncode, re.findall(r"^\| (\w[^|]*) \| .* \| (ok|FAIL|not run) \|", report, re.MULTILINE), report


def test_rows_pass_on_cpu_tensors(tmp_path: Path) -> None:
    words = ["recovery on native", "every_dtype on gloo, ranks: 1", "plugin_beside_nccl"]
    code, rows, report = run(tmp_path, *words)
    assert code == 0, report
    expected = ["every_dtype", "plugin_beside_nccl", "recovery"]
    assert sorted(rows) == [(check, "ok") for check in expected], report


def test_row_that_exceeds_its_limit_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    code, rows, report = run(tmp_path, "--several-ranks-per-gpu", "--limit", "0.01", "every_verb on gloo")
    assert (code, rows) == (1, [("every_verb", "FAIL")] * 2), report
    for ranks in (2, 4):
        assert f"{ranks} of {ranks} ranks have not finished after 0.01 s" in report


def test_rows_after_the_budget_are_not_run(tmp_path: Path) -> None:
    code, rows, report = run(tmp_path, "--budget", "0", "every_verb")
    assert (code, {ended for _, ended in rows}) == (1, {"not run"}), report
    assert re.search(
        rf"^- {len(rows)} of {len(rows)} rows. ok: 0, FAIL: 0, not run: {len(rows)}$", report, re.MULTILINE
    )


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")
def test_machine_without_a_gpu_is_skipped_with_the_reason() -> None:
    done = subprocess.run([sys.executable, RUN], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith("run.py: no check was run: no NVIDIA GPU that this torch (")
