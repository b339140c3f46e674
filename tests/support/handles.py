"""Exchange of process handles for ``reconfigure`` through files, independent of allranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["pass_on", "wait_for"]


def pass_on(folder: Path, step: str, handle: str, size: int, number: int | None = None) -> list[str]:
    """Publish this process's handle and return the handles of ``size`` processes, by number.

    The number of this process defaults to its RANK.
    """
    here = folder / f"{step}.{int(os.environ['RANK']) if number is None else number}"
    draft = here.with_suffix(f".draft{os.getpid()}")
    draft.write_text(handle)
    draft.replace(here)
    return [wait_for(folder / f"{step}.{each}") for each in range(size)]


def wait_for(path: Path, timeout_s: float = 30.0) -> str:
    """Return the content of a file as soon as it exists."""
    until = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not written in time")
        time.sleep(0.002)
    return path.read_text()
