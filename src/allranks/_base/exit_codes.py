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
    ExitCode("all", "0", "It is done. Of a job: every rank ended with 0."),
    ExitCode("all", str(USAGE), "The command line or a setting is wrong: nothing was started."),
    ExitCode("all", str(STOPPED), "Ctrl-C."),
    ExitCode("all", str(UNWRITABLE), "Stdout cannot be written to, as on a full disk."),
    ExitCode("all", str(REFUSED), "The system refused what the command needs: open files, memory, processes."),
    ExitCode(_JOBS, "the rank's", "The rank that failed first ended with this code: 1 after an exception."),
    ExitCode(_JOBS, f"{SIGNAL} + N", "That rank was killed by signal N, or the launcher got it: 137 is SIGKILL."),
    ExitCode(_JOBS, str(IDLE), "No rank wrote anything for as long as `--idle-timeout`."),
    ExitCode(_JOBS, str(LOST), "A host was lost, or its agent."),
    ExitCode("`run --rehearse`", str(FOUND), "A phase does not end with the same bits, or with an error."),
    ExitCode("`doctor`", str(FOUND), "A check failed; warnings do not count."),
    ExitCode("`checkpoint verify`", str(FOUND), "A checkpoint is damaged."),
    ExitCode("`checkpoint diff`", str(FOUND), "The two differ."),
    ExitCode("`checkpoint`, `trace`, `top`", str(USAGE), "What was asked for is not there, or cannot be read."),
    ExitCode("`bench`", str(FOUND), "A result was wrong."),
    ExitCode("`submit --now`", "the scheduler's", "Its command refused the job."),
)
