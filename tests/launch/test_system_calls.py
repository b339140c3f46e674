"""Kernels and containers that lack system calls: RHEL 8 has no pidfd_open, and old container runtimes reject it."""

from __future__ import annotations

import ctypes
import errno
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.launcher_process import Launcher

CALLS = {"pidfd_open": 434, "memfd_create": 319, "process_vm_readv": 310}  # x86-64
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def forbid(name: str, error: int) -> None:
    """Make a system call fail in this process and its children, with a seccomp program of four instructions."""
    load, equal, give = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 1, CALLS[name]), (give, 0, 0, 0x00050000 | error), (give, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def run(name: str, error: int, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, preexec_fn=lambda: forbid(name, error)
    )


SUM = """
import os, sys, torch, allranks as dist
dist.init_process_group(timeout=40)
values = torch.ones(1 << 20)
dist.all_reduce(values)
print(int(values[-1]))
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "fail" in sys.argv:
    sys.exit(3)
dist.barrier()
"""


@pytest.mark.parametrize("name", ["pidfd_open", "process_vm_readv"])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_job_runs_without_an_optional_system_call(launcher: Launcher, name: str, error: int) -> None:
    script = str(launcher.write(SUM))
    done = run(name, error, "run", "-n", "2", script, folder=launcher.folder)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "[0] 2", "[1] 2"]), done
    failed = run(name, error, "run", "-n", "2", "--restarts", "1", script, "fail", folder=launcher.folder)
    assert failed.returncode == 0, failed
    assert "rank 1" in failed.stderr
    assert "exited with code 3" in failed.stderr


def test_missing_system_call_that_every_job_needs_is_reported(launcher: Launcher) -> None:
    done = run("memfd_create", errno.ENOSYS, "run", "-n", "2", str(launcher.write(SUM)), folder=launcher.folder)
    said = "allranks run: error: cannot start 2 ranks: memfd_create: Function not implemented.\n"
    said += "  Check the host with `allranks doctor`.\n"
    assert (done.returncode, done.stderr) == (2, said)
    doctor = run("memfd_create", errno.ENOSYS, "doctor", folder=launcher.folder)
    assert (doctor.returncode, "memfd_create: Function not implemented" in doctor.stdout) == (1, True), doctor
