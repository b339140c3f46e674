"""The exit codes of the commands: the numbers and their meanings.

``docs/errors.py`` generates the table of docs/errors.md from them. Exit codes of a user's program are passed on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["EXIT_CODES", "FOUND", "IDLE", "LOST", "REFUSED", "SIGNAL", "STOPPED", "UNWRITABLE", "USAGE", "ExitCode"]

UNWRITABLE = 1
REFUSED = 1
FOUND = 1  # the command found what it searches for (a problem, a difference), as in diff and opposite to grep
USAGE = 2  # as in argparse
IDLE = 124  # as in timeout(1)
SIGNAL = 128  # as in a shell: the number of the signal is added
STOPPED = SIGNAL + signal.SIGINT
LOST = 255  # as in ssh


@dataclass(frozen=True)
class ExitCode:
    """One row of the table of exit codes.

    Attributes:
        commands: The commands that exit with it.
        code: The number, or how it is computed.
        meaning: The situation that it stands for.
    """

    commands: str
    code: str
    meaning: str


_JOBS = "`run`, `torchrun`, `launch`"
EXIT_CODES = (
    ExitCode("all", "0", "Success. For a job: every rank exited with code 0."),
    ExitCode("all", str(USAGE), "The command line or a setting is wrong. No process was started."),
    ExitCode("all", str(STOPPED), "Ctrl-C."),
    ExitCode("all", str(UNWRITABLE), "Stdout cannot be written, for example because the disk is full."),
    ExitCode("all", str(REFUSED), "The system refused a required resource: open files, memory, processes."),
    ExitCode(_JOBS, "the rank's", "The rank that failed first exited with this code: 1 after an exception."),
    ExitCode(_JOBS, f"{SIGNAL} + N", "Signal N killed that rank, or the launcher received it: 137 is SIGKILL."),
    ExitCode(_JOBS, str(IDLE), "No rank wrote any output for the duration of `--idle-timeout`."),
    ExitCode(_JOBS, str(LOST), "A host or its agent was lost."),
    ExitCode("`run --rehearse`", str(FOUND), "A phase ended with an error, or its result is not bit-identical."),
    ExitCode("`doctor`", str(FOUND), "A check failed; warnings do not count."),
    ExitCode("`checkpoint verify`", str(FOUND), "A checkpoint is damaged."),
    ExitCode("`checkpoint diff`", str(FOUND), "The two checkpoints differ."),
    ExitCode("`checkpoint`, `trace`, `top`", str(USAGE), "The requested object does not exist, or cannot be read."),
    ExitCode("`bench`", str(FOUND), "A result was wrong."),
    ExitCode("`submit --now`", "the scheduler's", "The scheduler's command refused the job."),
)
