"""Hands a job file in: by stdin, so that there need be no file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from allranks._errors import ConfigError

__all__ = ["COMMANDS", "hand_in", "id_in"]

COMMANDS: dict[str, tuple[str, ...]] = {
    "slurm": ("sbatch", "--parsable"),
    "pbs": ("qsub",),
    "lsf": ("bsub",),
    "k8s": ("kubectl", "apply", "-f", "-"),
}
_IDS = {
    "slurm": r"^(\d+)(?:;.*)?$",  # and the cluster's name, where there are several
    "pbs": r"^(\d+\S*)$",
    "lsf": r"^Job <(\d+)>",
    "k8s": r"^(job\.batch/\S+)",
}


def hand_in(to: str, text: str) -> int:
    """Gives the file to the system's command, and prints the job's id.

    Returns:
        The exit code: the command's.

    Raises:
        ConfigError: the command is not here, or what it says holds no id.
    """
    command = COMMANDS[to]
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no {command[0]} on this host: run this where jobs are submitted, or leave out --now and take"
            " the file (--file) there"
        )
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)  # its errors are shown
    if done.returncode:
        sys.stdout.write(done.stdout)
        print(f"allranks submit: error: {command[0]} refused it (exit code {done.returncode})", file=sys.stderr)
        return done.returncode
    print(id_in(to, done.stdout))
    return 0


def id_in(to: str, said: str) -> str:
    """The job's id in what the command has printed.

    Raises:
        ConfigError: there is none.
    """
    match = re.search(_IDS[to], said, re.MULTILINE)
    if match is None:
        raise ConfigError(f"{COMMANDS[to][0]} took the job, and said no id that is known here: {said.strip()!r}")
    return match[1]
