"""The arguments of ``allranks submit``, parsed into a ``Job``."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from allranks._base.errors import ConfigError
from allranks._cluster.schedulers import SCHEDULERS, scheduler_named
from allranks._cluster.schedulers.interface import Job, Scheduler, Submission
from allranks.launch.arguments.layout import check_elastic
from allranks.launch.arguments.options import Parser, refuse_inelastic
from allranks.launch.spec.declared import add_options
from allranks.launch.spec.options import Options as RunOptions
from allranks.launch.spec.target import check, read_target

__all__ = ["SubmitOptions", "parse"]

_USAGE = """allranks submit --to SYSTEM [options] script.py [args ...]
       allranks submit --to SYSTEM [options] -m module [args ...]
       allranks submit --to SYSTEM [options] -- command [args ...]"""
_UNITS_MIB = {"": 1, "M": 1, "G": 1 << 10, "T": 1 << 20}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# A directive ends at the end of its line, and systems parse quotes in it differently, so only plain names are allowed.
_PLAIN = re.compile(r"[\w.,:/@+=%-]*", re.ASCII)


@dataclass(frozen=True)
class SubmitOptions:
    """Options of ``allranks submit``.

    Attributes:
        to: The system.
        submission: The submission of this system.
        job: The job.
        file: The file to write. None for stdout.
        now: Submit the job.
        quiet: With ``now``, print only the job's id.
    """

    to: Scheduler
    submission: Submission
    job: Job
    file: str | None
    now: bool
    quiet: bool


def parse(argv: Sequence[str]) -> SubmitOptions:
    """Parse the arguments.

    Raises:
        ConfigError: The arguments are wrong.
        SystemExit: The user requested help, and the parser printed it.
    """
    given = _parser().parse_args(argv)
    given.spares = given.spares or 0
    refuse_inelastic(given)
    words = [*_elastic_words(given), *(["--trace", given.trace] if given.trace else [])]
    words += [*(["-m"] if given.module else []), *given.target]
    to: Scheduler = given.to
    assert to.submission is not None
    submission = to.submission
    name = given.name or (submission.name_for or _plain_name)(_stem(given.target))
    file = given.file
    if given.folder and not submission.containers:
        # Before `chdir`, because the path is relative to the directory of the command.
        file = file and os.path.abspath(file)
        try:
            os.chdir(given.folder)
        except OSError as error:
            raise ConfigError(f"cannot enter {given.folder!r} (--chdir): {error.strerror}") from None
    target = read_target(given.target, given.module, "allranks submit")
    if not submission.containers:  # the contents of an image are not visible here
        check(target)
    if not submission.containers and (given.image or given.namespace):
        raise ConfigError(
            f"--image and --namespace are options for Kubernetes, not for --to {to.name}.\n"
            "  Use --to k8s, or omit the options."
        )
    inside = sys.prefix != sys.base_prefix
    job = Job(
        name=name,
        words=tuple(words),
        nodes=given.nodes,
        nproc=(nproc := _per_host(given)),
        cpus=given.cpus,
        gpus=given.gpus,
        memory_mib=given.memory,
        time_s=given.time,
        queue=given.queue,
        account=given.account,
        folder=given.folder if submission.containers else os.getcwd(),
        python=sys.executable,
        venv=sys.prefix if inside else "",
        image=given.image,
        namespace=given.namespace,
        secret=secrets.token_hex(32) if submission.containers else "",
        least=None if given.elastic is None else given.elastic[0],
        spares=given.spares,
        respawns=RunOptions.respawns if given.respawns is None else given.respawns,
    )
    check_elastic(given.elastic, nproc * (given.nodes - given.spares))
    submission.check(job)
    return SubmitOptions(to, submission, job, file, given.now, given.quiet)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="allranks submit",
        usage=_USAGE,
        description="Write a job file for a batch system or Kubernetes. In the job, allranks run starts the ranks.",
        epilog="The file is written to stdout, or to --file. With --now, the job is submitted and its id is printed.",
        examples=(
            ("allranks submit --to slurm -N 2 -n 8 --time 2h train.py >job.sh", "the file, for review"),
            ("allranks submit --to slurm -N 2 --gpus 4 --now train.py", "submit the job"),
            ("allranks submit --to k8s -N 2 --image train:7 t.py | kubectl create -f -", "in Kubernetes"),
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = ",".join(each.name for each in SCHEDULERS if each.submission is not None)
    files = "sbatch's, qsub's or bsub's file, or Kubernetes' manifest"
    add("--to", type=_system, required=True, metavar=f"{{{names}}}", help=files)
    add("-N", "--nodes", "--nnodes", type=_count, default=1, metavar="N", help="hosts (default 1)")
    add(
        "-n", "--nproc", type=_count, metavar="N", help="number of ranks on all hosts together, a multiple of the hosts"
    )
    add("--nproc-per-node", type=_count, metavar="N", help="ranks on each host (default: its GPUs, or 1)")
    add("--cpus", type=_count, default=1, metavar="N", help="CPUs for each rank (default 1)")
    add("--gpus", type=_none_or_more, default=0, metavar="N", help="GPUs on each host (default 0)")
    add("--memory", type=_mib, metavar="SIZE", help="memory on each host: 500M, 64G")
    add("--time", type=_duration, metavar="T", help="time limit: 90m, 2h, 1:30:00, 1-12:00:00")
    add("--partition", "--queue", dest="queue", type=_plain, default="", metavar="NAME", help="partition or queue")
    add("--account", "--project", type=_plain, default="", metavar="NAME", help="account or project")
    add("--name", type=_plain, default="", help="name of the job (default: the script's; k8s: with a random suffix)")
    add("--image", default="", help="k8s: the container's image, with python, torch, allranks and the script")
    add("--namespace", type=_plain, default="", help="k8s: namespace of the job")
    add(
        "--chdir",
        dest="folder",
        default="",
        metavar="DIR",
        help="working directory (default: the current one; k8s: set by the image)",
    )
    add_options(add, RunOptions, ("elastic", "respawns", "spares"))
    add("--trace", default="", metavar="DIR", help="record all calls of all ranks in DIR, as allranks run does")
    add("--file", metavar="PATH", help="write the file to PATH")
    add("--now", action="store_true", help="submit the job: sbatch, qsub, bsub, kubectl create")
    add("-q", "--quiet", action="store_true", help="with --now: print only the id of the job")
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _per_host(given: argparse.Namespace) -> int:
    """Return the number of ranks on each host."""
    each: int = given.nproc_per_node or max(given.gpus, 1)
    hosts = int(given.nodes) - int(given.spares)
    if hosts < 1:
        raise ConfigError(
            f"--spares {given.spares}: no host is left for ranks, because the job has {given.nodes} hosts (-N).\n"
            "  Reduce --spares, or increase -N."
        )
    if given.nproc is None:
        return each
    if given.nproc % hosts or given.nproc_per_node not in (None, given.nproc // hosts):
        also = f", of {given.nproc_per_node} each" if given.nproc_per_node else ""
        action = "Omit -n or --nproc-per-node" if also else f"Change -n to a multiple of {hosts}"
        raise ConfigError(
            f"{given.nproc} ranks (-n) cannot be distributed evenly over {hosts} hosts{also}.\n  {action}."
        )
    return int(given.nproc) // hosts


def _elastic_words(given: argparse.Namespace) -> list[str]:
    """Return the options of an elastic job for ``allranks run``."""
    if given.elastic is None:
        return []
    words = ["--elastic", ":".join(str(number) for number in given.elastic if number is not None)]
    words += ["--spares", str(given.spares)] if given.spares else []
    return words + (["--respawns", str(given.respawns)] if given.respawns is not None else [])


def _stem(target: Sequence[str]) -> str:
    words = [word for word in target if word != "--"]
    return os.path.basename(words[0]).removesuffix(".py") if words else ""


def _plain_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._") or "job"


def _system(name: str) -> Scheduler:
    try:
        scheduler = scheduler_named(name)
    except ConfigError as error:  # it is a ValueError, whose message argparse would replace
        raise argparse.ArgumentTypeError(str(error)) from error
    if scheduler is None or scheduler.submission is None:
        known = ", ".join(repr(each.name) for each in SCHEDULERS if each.submission is not None)
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {known})")
    return scheduler


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number, 1 or more")


def _none_or_more(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _plain(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a plain name (letters, digits and . , : / @ + = % - _)")


def _mib(text: str) -> int:
    match = re.fullmatch(r"(\d+)([MGT]?)(?:I?B)?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 64G")
    return int(match[1]) * _UNITS_MIB[match[2]]


def _duration(text: str) -> int:
    """Parse a duration into seconds. A plain number is in minutes, as in SLURM and LSF."""
    seconds = 0
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif match := re.fullmatch(r"(\d+)([smhd]?)", text):
        seconds = int(match[1]) * _UNITS_S[match[2] or "m"]
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90m, 2h, 1:30:00 or 1-12:00:00")
    return seconds
