"""Descriptors and paths with unexpected targets: files of the program, devices, pipes, links and endless files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import allranks as dist
from allranks._engines.native.tuning import read_tuning
from support.launcher_process import Launcher

CLOSES = """
import os, sys, time
os.closerange(3, 4096)
files = [open(f"data{number}.bin", "wb", buffering=0) for number in range(40)]
for file in files:
    file.write(b"MINE")
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_files_that_reuse_descriptors_of_allranks_are_not_written(launcher: Launcher, start: str) -> None:
    """Close all descriptors as a daemon does, including those for the error report and for stacks."""

    def contents() -> set[bytes]:
        return {path.read_bytes() for path in launcher.folder.glob("data*.bin")}

    raises = launcher.write(CLOSES + 'raise RuntimeError("boom")')
    done = launcher.run("--start", start, "-n", "1", str(raises))
    assert done.code == 1
    assert done.err.splitlines()[0].endswith("Traceback (most recent call last):")
    assert "RuntimeError: boom" in done.err
    assert "rank.py" not in done.err
    assert contents() == {b"MINE"}
    done = launcher.run(
        "--start", start, "--idle-timeout", "1", "-n", "1", str(launcher.write(CLOSES + "time.sleep(60)"))
    )
    assert done.code == 124
    assert "has closed the descriptor for its stacks" in done.err
    assert contents() == {b"MINE"}


def test_function_that_closes_the_descriptor_of_its_result_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, allranks\ndef f():\n    os.closerange(3, 4096)\n    return 5\n"
        "if __name__ == '__main__':\n    print(allranks.run(f, n=1))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done
    assert "f closed the descriptor that transfers its result" in done.stderr


def test_path_that_is_not_a_regular_file_is_not_replaced(launcher: Launcher, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("behind")
    program = str(launcher.write("import allranks as dist; dist.init_process_group()"))
    refused = launcher.run("-n", "1", "--metrics", str(pipe), program, real_torch=True)
    assert (refused.code, "it is not a regular file" in refused.err) == (2, True), refused
    assert launcher.run("-n", "1", "--metrics", str(link), program, real_torch=True).code == 0
    assert link.is_symlink()
    assert (tmp_path / "behind").is_file()
    with pytest.raises(dist.ConfigError, match="not a regular file"):
        dist.FileStore(str(pipe), 1).set("key", "value")
    with pytest.raises(dist.UsageError, match="not a regular file"):
        dist.checkpoint.save({}, pipe)
    dist.checkpoint.save({"a": 1}, tmp_path / "saved", step=1)
    export = [sys.executable, "-m", "allranks", "checkpoint", "export", "--force", str(tmp_path / "saved"), str(pipe)]
    done = subprocess.run(export, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "it is not a regular file" in done.stderr) == (2, True), done
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_endless_files_are_rejected(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "--hostfile", "/dev/zero", str(launcher.write("")))
    assert done.err == "allranks run: error: cannot read the hostfile '/dev/zero': it is longer than 16 MiB\n"
    with pytest.raises(dist.ConfigError, match="longer than 16 MiB"):
        read_tuning({"ALLRANKS_TUNING": "/dev/zero"})
