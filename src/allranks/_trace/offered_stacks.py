"""Python stacks of this process for other processes of its host, also while a thread blocks and holds the GIL.

The process keeps a memory file. On a signal, ``faulthandler``, which is written in C, writes the stacks of all threads
into it. Other processes of the same user find the file by its name in /proc/PID/fd. The name also identifies the
rank and the job of the process: /proc/PID/environ of a process that was forked shows the environment of its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import signal
import time

from allranks._base.forks import Descriptor, forks
from allranks._trace.kernel import memory_files

__all__ = ["STACKS", "find_ranks", "offer_stacks", "stacks_of"]

STACKS = signal.SIGRTMAX - 3
"""The signal. The launcher uses SIGRTMAX - 2 for its own request, which writes into a pipe to the agent."""

_NAME = "allranks-stacks"
# What all ranks of a job have in common in their environment.
_OF_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_WAIT_S = 0.3  # for a process to write its stacks, which takes milliseconds

_file: Descriptor | None = None
_made = -1  # value of forks() when the file was created; it is closed in a forked child


def offer_stacks() -> None:
    """Let other processes of this host request the stacks of this process. Idempotent.

    A handler that the program has set for the signal stays in place; then no stacks are available.
    """
    global _file, _made
    if _made == forks():
        return
    _made = forks()
    _file = Descriptor.of(lambda: os.memfd_create(_file_name(os.environ.get("RANK", "")), os.MFD_CLOEXEC))
    if signal.getsignal(STACKS) is signal.SIG_DFL:
        faulthandler.register(STACKS, _file.fileno())


def _file_name(rank: str) -> str:
    # A digest, because the name of a memory file is limited to 249 bytes.
    job = hashlib.sha256(repr([os.environ.get(name) for name in _OF_JOB]).encode()).hexdigest()[:16]
    return f"{_NAME}-{job}-{rank}"


def find_ranks() -> dict[int, int]:
    """Return the pids of the processes of this host that are ranks of the same job and offer their stacks, by rank."""
    prefix = _file_name("")
    found = {}
    for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdecimal()):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            for path in memory_files(pid, prefix):
                rank = os.readlink(path).partition(prefix)[2].removesuffix(" (deleted)")
                if rank.isdecimal():
                    found[int(rank)] = pid
    return found


def stacks_of(pid: int) -> str:
    """Return the stacks of another process of this host, as ``faulthandler`` writes them; "" if it offers none."""
    try:
        paths = memory_files(pid, _NAME) if _catches(pid) else []
        if not paths:
            return ""
        with open(paths[0], "rb") as file:
            # Skip the stacks that earlier signals have written.
            file.seek(0, os.SEEK_END)
            os.kill(pid, STACKS)
            time.sleep(_WAIT_S)
            return file.read().decode(errors="replace")
    except (OSError, ValueError):  # it has exited, or belongs to another user
        return ""


def _catches(pid: int) -> bool:
    """Return whether the process has a handler for the signal. Without one, the signal would terminate the process."""
    with open(f"/proc/{pid}/status", errors="surrogateescape") as file:
        status = dict(line.rstrip("\n").partition(":\t")[::2] for line in file)
    return bool(int(status.get("SigCgt", "0"), 16) >> (STACKS - 1) & 1)
