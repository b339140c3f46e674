"""The exit codes of the commands: the numbers that the code uses, and what each means.

``docs/errors.py`` makes the table of docs/errors.md from them. Codes that a user's program chose are passed on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["EXIT_CODES", "FOUND", "IDLE", "LOST", "REFUSED", "SIGNAL", "STOPPED", "UNWRITABLE", "USAGE", "ExitCode"]

UNWRITABLE = 1
REFUSED = 1
FOUND = 1  # as grep's and diff's, the other way round: what was looked for is there
USAGE = 2  # as argparse's
IDLE = 124  # as timeout(1)'s
SIGNAL = 128  # as a shell's: the signal is added
STOPPED = SIGNAL + signal.SIGINT
LOST = 255  # as ssh's


@dataclass(frozen=True)
class ExitCode:
    """One row of the table of exit codes.

    Attributes:
        commands: which commands end with it.
        code: the number, or how it is made.
        meaning: what was so.
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
