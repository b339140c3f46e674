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

__all__ = ["describe", "submit_job", "parse_job_id"]


def submit_job(scheduler: Scheduler, text: str, job: Job, quiet: bool = False) -> int:
    """Pass the file to the system's command, and print the result.

    Args:
        scheduler: The system, which has a submission.
        text: The content of the file.
        job: The job in the file.
        quiet: Print only the job's id.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: The command is not installed, or its output contains no id.
    """
    assert scheduler.submission is not None
    command = scheduler.submission.command
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed on this host.\n"
            "  Run this command on a host where jobs are submitted, or omit --now and copy the file (--file)"
            " to that host."
        )
    # The stderr of the command is not captured, so the user sees its errors immediately.
    completed = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if completed.returncode:
        put(completed.stdout)
        print(
            f"allranks submit: error: {command[0]} rejected the job (exit code {completed.returncode})", file=sys.stderr
        )
        return completed.returncode
    name = parse_job_id(scheduler.submission, completed.stdout)
    put(name + "\n")
    if not quiet:
        print(describe(scheduler, name, job), file=sys.stderr)
    return 0


def describe(scheduler: Scheduler, name: str, job: Job) -> str:
    """Return a text about the submitted job and the next commands.

    Args:
        scheduler: The system, which has a submission.
        name: The job's id in the system.
        job: The job.
    """
    size = (job.nodes - job.spares) * job.nproc
    ranks, hosts = f"{size} rank{'s' * (size > 1)}", f"{job.nodes} host{'s' * (job.nodes > 1)}"
    space = f" --namespace {job.namespace}" if job.namespace else ""
    number = name.partition(".")[0]
    assert scheduler.submission is not None
    texts = (scheduler.submission.state, scheduler.submission.output, scheduler.submission.stop)
    commands = [text.format(id=name, name=job.name, number=number, nodes=job.nodes, space=space) for text in texts]
    lines = [f"submitted to {scheduler.title}: {shlex.join(job.words)}, {ranks} on {hosts}"]
    lines += [f"  {what:8}{words}" for what, words in zip(("state:", "output:", "stop:"), commands, strict=True)]
    return "allranks submit: " + "\n".join(lines)


def parse_job_id(submission: Submission, output: str) -> str:
    """Return the job's id in the output of the command.

    Raises:
        ConfigError: The output contains no id.
    """
    match = re.search(submission.id, output, re.MULTILINE)
    if match is None:
        raise ConfigError(
            f"{submission.command[0]} accepted the job, but its output has no known job id: {output.strip()!r}.\n"
            "  Find the job in the queue by its name."
        )
    return match[1]
