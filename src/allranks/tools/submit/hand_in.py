"""Submits a job file through stdin, so that no file is needed.

Only the job's id goes to stdout, for ``id=$(allranks submit --now ...)``. The text for the user goes to stderr: the
submitted job and the next commands. gh uses the same convention.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

from allranks._base.console import put
from allranks._base.errors import ConfigError
from allranks._cluster.schedulers.interface import Job, Scheduler, Submission

__all__ = ["describe", "hand_in", "id_in"]


def hand_in(to: Scheduler, text: str, job: Job, quiet: bool = False) -> int:
    """Pass the file to the system's command, and print the result.

    Args:
        to: The system, which has a submission.
        text: The content of the file.
        job: The job in the file.
        quiet: Print only the job's id.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: The command is not installed, or its output contains no id.
    """
    assert to.submission is not None
    command = to.submission.command
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed on this host: run this on a host where jobs are submitted, or omit --now"
            " and copy the file (--file) to that host"
        )
    # The stderr of the command is not captured, so the user sees its errors immediately.
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        put(done.stdout)
        print(f"allranks submit: error: {command[0]} rejected the job (exit code {done.returncode})", file=sys.stderr)
        return done.returncode
    name = id_in(to.submission, done.stdout)
    put(name + "\n")
    if not quiet:
        print(describe(to, name, job), file=sys.stderr)
    return 0


def describe(to: Scheduler, name: str, job: Job) -> str:
    """Return a text about the submitted job and the next commands.

    Args:
        to: The system, which has a submission.
        name: The job's id in the system.
        job: The job.
    """
    size = (job.nodes - job.spares) * job.nproc
    ranks, hosts = f"{size} rank{'s' * (size > 1)}", f"{job.nodes} host{'s' * (job.nodes > 1)}"
    space = f" --namespace {job.namespace}" if job.namespace else ""
    number = name.partition(".")[0]
    assert to.submission is not None
    texts = (to.submission.state, to.submission.output, to.submission.stop)
    commands = [text.format(id=name, name=job.name, number=number, nodes=job.nodes, space=space) for text in texts]
    lines = [f"submitted to {to.title}: {shlex.join(job.words)}, {ranks} on {hosts}"]
    lines += [f"  {what:8}{words}" for what, words in zip(("state:", "output:", "stop:"), commands, strict=True)]
    return "allranks submit: " + "\n".join(lines)


def id_in(submission: Submission, output: str) -> str:
    """Return the job's id in the output of the command.

    Raises:
        ConfigError: The output contains no id.
    """
    match = re.search(submission.id, output, re.MULTILINE)
    if match is None:
        raise ConfigError(
            f"{submission.command[0]} accepted the job, but its output has no known job id: {output.strip()!r}"
        )
    return match[1]
