"""Scripts whose ranks report that they are ready before the test sends a signal or waits."""

from __future__ import annotations

import subprocess

from support.launcher_process import Launcher
from support.marked import wait_for

__all__ = ["WAITING", "end", "start"]

WAITING = """
import os, signal, sys, threading, time
from pathlib import Path
rank = os.environ["RANK"]
def ready(): Path(f"ready{rank}").touch()
"""


def start(launcher: Launcher, body: str, *options: str, nproc: int = 2) -> subprocess.Popen[bytes]:
    """Start a script and wait until each rank has called ``ready``."""
    path = launcher.write(WAITING + body)
    process = launcher.start("-n", str(nproc), "--start", "spawn", *options, str(path))
    wait_for(lambda: len(list(launcher.folder.glob("ready*"))) == nproc)
    return process


def end(process: subprocess.Popen[bytes]) -> tuple[int, list[str], list[str]]:
    """Wait until the launcher exits. Return its exit code, the sorted lines of stdout, and the lines of stderr."""
    out, err = process.communicate(timeout=30)
    return process.returncode, sorted(out.decode().splitlines()), err.decode().splitlines()
