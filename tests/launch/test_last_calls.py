"""Last calls of the ranks of a failed job: a summary on stderr, and all details in a file."""

from __future__ import annotations

import re
from pathlib import Path

from allranks.launch.runtime.last_calls import write_report
from support.launcher_process import Launcher

PROGRAM = """
import os, signal, sys, time
import torch
import allranks as dist
dist.init_process_group(timeout=2)
def load():
    if sys.argv[1] == "differ": return
    if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
for step in range(5):
    time.sleep(0.06)
    dist.all_reduce(torch.ones(4 + (sys.argv[1] == "differ" and step == 4 and dist.get_rank() == 2)))
    if dist.get_rank() == 1 and step == 3: load()
"""


def run(launcher: Launcher, how: str, *options: str) -> tuple[list[str], str]:
    """Return the lines of the launcher on stderr and the content of the file that they name."""
    launcher.write(PROGRAM, "late.py")
    environ = {"XDG_STATE_HOME": str(launcher.folder / "state")}
    done = launcher.run("-n", "3", *options, "late.py", how, real_torch=True, environ=environ)
    assert done.code != 0
    lines = [line for line in done.err.splitlines() if line.startswith("allranks run: ")]
    path = lines[-1].removeprefix("allranks run: the last calls of all ranks are in ")
    return lines, Path(launcher.folder, path).read_text()


def test_timeout_report_locates_the_late_rank(launcher: Launcher) -> None:
    lines, text = run(launcher, "sleep")
    assert lines[-2] == (
        "allranks run: ranks 0, 2 have waited 2 s in all_reduce #5 (late.py:12, shape (4,)) for rank 1, which is at "
        "late.py:9 in load; its process is sleeping, in a timer"
    )
    assert "  all_reduce #5 (late.py:12, shape (4,)) failed (timeout) after 2." in text
    assert '  File "' in text.partition("stacks of ranks 1:")[2]
    assert 'late.py", line 9 in load' in text
    (file,) = launcher.folder.glob("state/allranks/failed-*.txt")
    assert file.read_text() == text


def test_the_last_calls_of_a_killed_rank_are_shown(launcher: Launcher) -> None:
    lines, text = run(launcher, "kill", "--logs", "logs")
    line = re.sub(r"\d+(\.\d+)? (us|ms|s)", "N s", re.sub(r"rank \d arrived", "rank X arrived", lines[-2]))
    calls = [f"all_reduce #{n} (late.py:12, shape (4,)) took N s, rank X arrived last" for n in (2, 3, 4)]
    assert line == f"allranks run: last calls of rank 1: {'; '.join(calls)}"
    assert "rank 1, pid " in text
    assert text == (launcher.folder / "logs" / "last_calls.txt").read_text()


def test_file_contains_the_calls_before_a_mismatch(launcher: Launcher) -> None:
    _, text = run(launcher, "differ")
    for rank in range(3):
        part = text.partition(f"rank {rank}, pid ")[2].partition("\nrank ")[0]
        assert "  all_reduce #4 (late.py:12, shape (4,)) took " in part
        # The launcher inspects all ranks when the first one fails. Another rank may not have compared the call yet.
        shape = 5 if rank == 2 else 4
        assert re.search(rf"  all_reduce #5 \(late.py:12, shape \({shape},\)\)(,| failed \(mismatch\) after )", part)
    assert "failed (mismatch)" in text


def test_only_ten_reports_are_kept_and_other_files_are_untouched(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    folder = tmp_path / "allranks"
    folder.mkdir()
    for number in range(14):
        (folder / f"failed-20200101-0000{number:02}-1.txt").write_text("old")
    (folder / "notes.txt").write_text("the user's")
    path = write_report("new", None, environ)
    assert path is not None
    assert path.read_text() == "new"
    assert len(list(folder.glob("failed-*"))) == 10
    assert (folder / "notes.txt").exists()


def test_report_that_cannot_be_written_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "allranks").write_text("no folder")
    assert write_report("text", None, {"XDG_STATE_HOME": str(tmp_path)}) is None
    assert write_report("text", tmp_path / "gone", {}) is None
