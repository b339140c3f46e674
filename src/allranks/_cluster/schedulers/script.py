"""A job file for batch systems: a shell script whose comments are directives.

It runs ``allranks run``, which starts the ranks on every host of the allocation. The job uses the interpreter, the
virtual environment and the working directory from which it was submitted. A minute before its time limit it receives
SIGTERM, so that ranks can terminate in order. The scheduler sends the signal. If the scheduler cannot, timeout(1) in
the file sends it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from allranks._cluster.schedulers.interface import Job

__all__ = ["NOTICE_S", "clock", "job_script", "noticed_after"]

NOTICE_S = 60  # seconds between SIGTERM and the time limit


def job_script(job: Job, mark: str, directives: Sequence[str], before: Sequence[str] = ()) -> str:
    """Return the script.

    Args:
        job: The job.
        mark: Prefix of a directive.
        directives: Directives without the prefix; empty ones are skipped.
        before: Words before the command.
    """
    words = [*before, job.python, "-m", "allranks", "run", "--nproc-per-node", str(job.nproc), *job.words]
    environment = (
        [f"export VIRTUAL_ENV={shlex.quote(job.venv)}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"'] if job.venv else []
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"{mark} {directive}" for directive in directives if directive),
            "",
            "set -e",
            f"cd {shlex.quote(job.folder)}",
            *environment,
            f"exec {shlex.join(words)}",
            "",
        ]
    )


def noticed_after(job: Job) -> int | None:
    """Return the seconds after which the job is signaled to end. None if it receives no such signal."""
    return job.time_s - NOTICE_S if job.time_s is not None and job.time_s > NOTICE_S else None


def clock(seconds: int, days: bool = False) -> str:
    """Return a duration as HH:MM:SS. With ``days``, a duration of a day or more is D-HH:MM:SS."""
    day, rest = divmod(seconds, 86400) if days else (0, seconds)
    hours, rest = divmod(rest, 3600)
    return f"{f'{day}-' if day else ''}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
