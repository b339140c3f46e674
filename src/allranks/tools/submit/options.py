"""The arguments of ``allranks submit``: words in, a ``Job`` out."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from allranks._base.errors import ConfigError
from allranks.launch.arguments.options import Parser
from allranks.launch.ranks.target import check, read_target
from allranks.tools.submit.job import Job

__all__ = ["Options", "parse"]

_SYSTEMS = ("slurm", "pbs", "lsf", "k8s")
_USAGE = """allranks submit --to SYSTEM [options] script.py [args ...]
       allranks submit --to SYSTEM [options] -m module [args ...]
       allranks submit --to SYSTEM [options] -- command [args ...]"""
_UNITS_MIB = {"": 1, "M": 1, "G": 1 << 10, "T": 1 << 20}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# A directive ends at the end of its line, and no system says the same about quotes in it.
_PLAIN = re.compile(r"[\w.,:/@+=%-]*", re.ASCII)
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 56  # a pod's host name is the job's, a dash and a number, of 63 characters


@dataclass(frozen=True)
class Options:
    """What ``allranks submit`` was asked for.

    Attributes:
        to: the system.
        job: the job.
        file: where the file is written; None for stdout.
        now: hand it in.
        quiet: say nothing but the job's id then.
    """

    to: str
    job: Job
    file: str | None
    now: bool
    quiet: bool


def parse(argv: Sequence[str]) -> Options:
    """Reads the arguments.

    Raises:
        ConfigError: they are wrong.
        SystemExit: help was asked for, and given.
    """
    given = _parser().parse_args(argv)
    words = [*(["-m"] if given.module else []), *given.target]
    k8s = given.to == "k8s"
    name = given.name or _name_for(given.target, k8s)
    file = given.file
    if given.folder and not k8s:
        file = file and os.path.abspath(file)
        try:
            os.chdir(given.folder)
        except OSError as error:
            raise ConfigError(f"cannot enter {given.folder!r} (--chdir): {error.strerror}") from None
    target = read_target(given.target, given.module, "allranks submit")
    if not k8s:  # what an image holds cannot be seen from here
        check(target)
    if k8s:
        _check_k8s(given, name)
    elif given.image or given.namespace:
        raise ConfigError(f"--image and --namespace are Kubernetes': --to k8s, not --to {given.to}")
    inside = sys.prefix != sys.base_prefix
    job = Job(
        name=name,
        words=tuple(words),
        nodes=given.nodes,
        nproc=_per_host(given),
        cpus=given.cpus,
        gpus=given.gpus,
        memory_mib=given.memory,
        time_s=given.time,
        queue=given.queue,
        account=given.account,
        folder=given.folder if k8s else os.getcwd(),
        python=sys.executable,
        venv=sys.prefix if inside else "",
        image=given.image,
        namespace=given.namespace,
        secret=secrets.token_hex(32) if k8s else "",
    )
    return Options(given.to, job, file, given.now, given.quiet)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="allranks submit",
        usage=_USAGE,
        description="Writes the job file of a batch system or of Kubernetes, in which allranks run starts the ranks.",
        epilog="The file goes to stdout, or to --file; --now submits it: the job's id is on stdout then.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--to", choices=_SYSTEMS, required=True, help="sbatch's, qsub's or bsub's file, or Kubernetes' manifest")
    add("-N", "--nodes", "--nnodes", type=_count, default=1, metavar="N", help="hosts (default 1)")
    add("-n", "--nproc", type=_count, metavar="N", help="ranks in all, as many on each host")
    add("--nproc-per-node", type=_count, metavar="N", help="ranks on each host (default: its GPUs, or 1)")
    add("--cpus", type=_count, default=1, metavar="N", help="CPUs for each rank (default 1)")
    add("--gpus", type=_none_or_more, default=0, metavar="N", help="GPUs on each host (default 0)")
    add("--memory", type=_mib, metavar="SIZE", help="memory on each host: 500M, 64G")
    add("--time", type=_duration, metavar="T", help="how long at most: 90m, 2h, 1:30:00, 1-12:00:00")
    add("--partition", "--queue", dest="queue", type=_plain, default="", metavar="NAME", help="partition or queue")
    add("--account", "--project", type=_plain, default="", metavar="NAME", help="account or project")
    add("--name", type=_plain, default="", help="the job's (default: the script's; k8s: and a random suffix)")
    add("--image", default="", help="k8s: the container's image, with python, torch, allranks and the script")
    add("--namespace", type=_plain, default="", help="k8s: where it runs")
    add(
        "--chdir",
        dest="folder",
        default="",
        metavar="DIR",
        help="where it runs (default: here; k8s: as the image says)",
    )
    add("--file", metavar="PATH", help="write the file there")
    add("--now", action="store_true", help="submit it: sbatch, qsub, bsub, kubectl create")
    add("-q", "--quiet", action="store_true", help="with --now: say the job's id only")
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _per_host(given: argparse.Namespace) -> int:
    """Ranks on each host."""
    each: int = given.nproc_per_node or max(given.gpus, 1)
    if given.nproc is None:
        return each
    if given.nproc % given.nodes or given.nproc_per_node not in (None, given.nproc // given.nodes):
        also = f", of {given.nproc_per_node} each" if given.nproc_per_node else ""
        raise ConfigError(f"{given.nproc} ranks (-n) cannot be shared out evenly to {given.nodes} hosts{also}")
    return int(given.nproc) // int(given.nodes)


def _check_k8s(given: argparse.Namespace, name: str) -> None:
    if not given.image:
        raise ConfigError("Kubernetes runs an image: give --image REGISTRY/NAME:TAG")
    for option, value in (("--name", name), ("--namespace", given.namespace or "default")):
        if len(value) > _LONGEST_LABEL or not _DNS_LABEL.fullmatch(value):
            raise ConfigError(
                f"{option} {value!r} is no name for Kubernetes. Expected a lower-case letter, then such, digits and"
                f" dashes, at most {_LONGEST_LABEL}, for example train-7."
            )
    if given.folder and not given.folder.startswith("/"):
        raise ConfigError(f"--chdir {given.folder!r}: expected a folder of the image, as /work/train")
    if given.account:
        raise ConfigError("Kubernetes has no accounts: leave out --account")
    if given.queue:
        raise ConfigError("Kubernetes has no queues of its own: leave out --queue")


def _name_for(target: Sequence[str], label: bool) -> str:
    words = [word for word in target if word != "--"]
    stem = os.path.basename(words[0]).removesuffix(".py") if words else ""
    if label:
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")
        suffix = secrets.token_hex(3)  # a second job may be submitted while the first is still there
        return f"{name[: _LONGEST_LABEL - len(suffix) - 1].strip('-') or 'job'}-{suffix}"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)
    return name.strip("-._") or "job"


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
    """Seconds; a number alone is minutes, as SLURM and LSF have it."""
    seconds = 0
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif match := re.fullmatch(r"(\d+)([smhd]?)", text):
        seconds = int(match[1]) * _UNITS_S[match[2] or "m"]
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90m, 2h, 1:30:00 or 1-12:00:00")
    return seconds
