"""Programs on torch's gloo that hang, under torchrun, ``allranks run`` and ``allranks watch``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks._base.exit_codes import IDLE

PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist

mode, rank = sys.argv[1], int(os.environ["RANK"])
x = torch.ones(4)
dist.init_process_group("gloo")
dist.all_reduce(x)
if mode == "again":
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.all_reduce(x)
if rank == 1:
    if mode in ("sleep", "again"):
        time.sleep(60)  # sleeps
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "barrier":
        dist.barrier()  # odd
if mode == "recv" and rank == 0:
    dist.irecv(x, 1).wait()  # waits
if mode == "recv" and rank == 1:
    time.sleep(60)  # late
if mode == "slow":
    time.sleep(1.5 * rank)
dist.all_reduce(x)  # reduces
dist.barrier()
"""
LINES = {line.partition("# ")[2]: number for number, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line}
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-port",
    "0",
    "--standalone",
]
ALLRANKS = [sys.executable, "-m", "allranks", "run", "-n", "2"]


def run(folder: Path, launcher: list[str], mode: str, until: str, **more: str) -> str:
    """Run the program until its output contains a pattern, then kill it. Return the output."""
    script = folder / "hung.py"
    script.write_text(PROGRAM)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "ALLRANKS_NOTICE_AFTER": "4s"} | more
    environ |= {"ALLRANKS_WATCH_FOLDER": str(folder)}
    with subprocess.Popen(
        [*launcher, "hung.py", mode],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        text = ""
        try:
            for line in job.stdout:
                text += line
                if re.search(until, text):
                    break
        finally:
            # The ranks of torchrun and of allranks exit when their launcher is killed or interrupted.
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", _report(folder))]
            for pid in {job.pid, *pids}:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    return text


def _report(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("allranks-watch-*.txt"))


@pytest.mark.parametrize(
    ("launcher", "watch"),
    [
        pytest.param(TORCHRUN, {"ALLRANKS_WATCH": "1"}, id="torchrun"),
        pytest.param([sys.executable, "-m", "allranks", "watch", "--", *TORCHRUN], {}, id="watch"),
        pytest.param(ALLRANKS, {}, id="allranks"),
    ],
)
def test_late_rank_is_named_with_its_line(tmp_path: Path, launcher: list[str], watch: dict[str, str]) -> None:
    text = run(tmp_path, launcher, "sleep", "calls and stacks", **watch)
    reduces, sleeps = LINES["reduces"], LINES["sleeps"]
    assert re.search(
        rf"allranks watch: rank 0 has waited \d+ s in all_reduce #2 \(hung.py:{reduces} in <module>\) for rank 1, which"
        rf" is at hung.py:{sleeps} in <module>; its process is sleeping, in a timer\n",
        text,
    )
    report = _report(tmp_path)
    assert "rank 1: pid" in report
    assert f'hung.py", line {LINES["sleeps"]} in <module>' in report


def test_stopped_rank_is_named(tmp_path: Path) -> None:
    text = run(tmp_path, ALLRANKS, "stop", "calls and stacks")
    assert "for rank 1, whose process is stopped\n" in text


def test_default_group_that_is_created_again_is_watched(tmp_path: Path) -> None:
    # Under torchrun, torch 2.13 itself fails in some runs: gloo reads the addresses of the first group.
    text = run(tmp_path, ALLRANKS, "again", "calls and stacks")
    assert f"for rank 1, which is at hung.py:{LINES['sleeps']} in <module>" in text


def test_ranks_out_of_step_are_named_with_both_lines(tmp_path: Path) -> None:
    text = run(tmp_path, ALLRANKS, "barrier", "calls and stacks")
    assert f"rank 0 is in all_reduce #2 (hung.py:{LINES['reduces']} in <module>) of 4 float32; rank 1" in text
    assert f"is in barrier #2 (hung.py:{LINES['odd']} in <module>)" in text


def test_message_without_a_sender_is_named(tmp_path: Path) -> None:
    text = run(tmp_path, ALLRANKS, "recv", "calls and stacks")
    assert "rank 0 has waited" in text
    assert (
        f"in recv from rank 1 (hung.py:{LINES['waits']} in <module>) for rank 1, which is at hung.py:{LINES['late']}"
        in text
    )


def test_slow_rank_is_no_hang(tmp_path: Path) -> None:
    text = run(tmp_path, ALLRANKS, "slow", "never")
    assert "waited" not in text
    assert "Error" not in text


def test_all_ranks_exit_after_the_time_to_abort(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "allranks", "watch", "--abort-after", "5s", "--", *TORCHRUN]
    text = run(tmp_path, launcher, "sleep", "never")
    assert "all ranks exit, because a wait has lasted 5 s (--abort-after)" in text
    assert f"exitcode  : {IDLE}" in text


def test_watch_without_a_command_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "allranks", "watch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a command is required, such as: allranks watch -- torchrun train.py" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "watch", "--", "/no/such"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "allranks watch: error: cannot execute '/no/such': No such file or directory\n"
