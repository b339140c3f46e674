"""Hands a job file in: by stdin, so that there need be no file.

The job's id alone goes to stdout, for ``id=$(allranks submit --now ...)``; to stderr goes what people want to know:
what was submitted, and what to type next. gh does so, too.
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
    """Gives the file to the system's command, and prints what has become of it.

    Args:
        to: the system, which has a submission.
        text: the file.
        job: what is in it.
        quiet: print the job's id only.

    Returns:
        The exit code: the command's.

    Raises:
        ConfigError: the command is not here, or what it prints has no id.
    """
    assert to.submission is not None
    command = to.submission.command
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no {command[0]} on this host: run this where jobs are submitted, or leave out --now and take"
            " the file (--file) there"
        )
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)  # its errors are shown
    if done.returncode:
        put(done.stdout)
        print(f"allranks submit: error: {command[0]} refused it (exit code {done.returncode})", file=sys.stderr)
        return done.returncode
    name = id_in(to.submission, done.stdout)
    put(name + "\n")
    if not quiet:
        print(describe(to, name, job), file=sys.stderr)
    return 0


def describe(to: Scheduler, name: str, job: Job) -> str:
    """What was submitted, and what to type next.

    Args:
        to: the system, which has a submission.
        name: the job's id there.
        job: the job.
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
    """The job's id in what the command has printed.

    Raises:
        ConfigError: there is none.
    """
    match = re.search(submission.id, output, re.MULTILINE)
    if match is None:
        raise ConfigError(
            f"{submission.command[0]} took the job, and printed no id that is known here: {output.strip()!r}"
        )
    return match[1]
