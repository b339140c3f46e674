"""A job file of batch systems: a shell script, whose comments are directives.

It comes down to ``allranks run``, which starts the ranks on every host of the allocation. The job keeps the
interpreter, the virtual environment and the folder that it was submitted from. A minute before its time is over it gets
SIGTERM, so that ranks can end by themselves: from the system, or where that cannot do it from timeout(1) in the file.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from allranks._cluster.schedulers.interface import Job

__all__ = ["NOTICE_S", "clock", "job_script", "noticed_after"]

NOTICE_S = 60


def job_script(job: Job, mark: str, directives: Sequence[str], before: Sequence[str] = ()) -> str:
    """The script.

    Args:
        job: what it runs.
        mark: what a directive begins with.
        directives: without the mark; empty ones are left out.
        before: words that stand before the command.
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
    """After how many seconds a job is signalled to end; None if it is to have no notice."""
    return job.time_s - NOTICE_S if job.time_s is not None and job.time_s > NOTICE_S else None


def clock(seconds: int, days: bool = False) -> str:
    """A duration as HH:MM:SS; with ``days`` as D-HH:MM:SS from a day on."""
    day, rest = divmod(seconds, 86400) if days else (0, seconds)
    hours, rest = divmod(rest, 3600)
    return f"{f'{day}-' if day else ''}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
