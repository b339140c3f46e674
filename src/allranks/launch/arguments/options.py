"""The arguments of ``allranks run``: words in, ``Options`` out.

Options stand before the script; all that follows it is the script's own. torchrun's and torch.distributed.launch's
spellings are accepted where they mean the same; all of them are ``torchrun``'s business.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from allranks._base.console import ArgumentParser
from allranks._base.errors import ConfigError
from allranks._base.files import plain_file, read_text
from allranks._cluster.detection import CHOICES
from allranks._cluster.env import notice_seconds, parse_seconds
from allranks._cluster.hostlist import Slots, parse_hostfile, parse_hosts
from allranks._cluster.schedulers import scheduler_named
from allranks._engines import registry
from allranks.launch.arguments.meeting import Meeting, add_meeting, read_meeting
from allranks.launch.reporter import Reporter
from allranks.launch.spec.options import Display, Options, Streams
from allranks.launch.spec.target import Mode, read_target

__all__ = ["RESPAWNS", "Parser", "add_elastic", "environment_kind", "parse", "refuse_inelastic"]

_HIDE = argparse.SUPPRESS

RESPAWNS = Options.respawns
_USAGE = """allranks run [options] script.py [args ...]
       allranks run [options] -m module [args ...]
       allranks run [options] -- command [args ...]"""


# torchrun's options that are not here; the value that requests what is always so, or None where the option has none.
_TORCHRUNS = {
    "--start-method": "",
    "--no-python": None,
    "--run-path": None,
}
_INSTEAD = {"--no-python": "-- command", "--start-method": "--start"}


class _Elsewhere(argparse.Action):
    """An option of torchrun's that requests what is not here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.const is None or list(values or ()) != [self.const]:
            option = str(option_string)
            words = " ".join([option, *(values or ())])
            instead = _INSTEAD.get(option.replace("_", "-"))
            hint = f"; use {instead}" if instead else ""
            parser.error(f"{words} is torchrun's, and not in this version of allranks run{hint}")


class Parser(ArgumentParser):
    """Raises ConfigError where the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized"):
            wrong = message.partition(": ")[2].split()[0].partition("=")[0]
            near = difflib.get_close_matches(wrong, self._option_string_actions, 1)
            message += f" ({f'did you mean {near[0]}? ' if near else ''}see {self.prog} --help)"
        raise ConfigError(message)


def parse(argv: Sequence[str], program: str = "allranks run") -> Options:
    """Reads the arguments.

    Args:
        argv: the arguments.
        program: whose they are.

    Raises:
        ConfigError: they are wrong.
        SystemExit: help was asked for, and given.
    """
    args = _parser().parse_args(argv)
    target = read_target(args.target, args.module, program, args.mode)
    meeting = read_meeting(args)
    hosts = _hosts(args.hosts, args.hostfile)
    _refuse_contradictions(args, meeting, bool(hosts))
    _check_elastic(args)
    return Options(
        target=target,
        nproc=args.nproc if isinstance(args.nproc, int) else None,
        per_host=args.per_host if isinstance(args.nproc, int) or args.nproc is None else args.nproc,
        hosts=hosts,
        nodes=args.nodes,
        node=args.node,
        leader=meeting.leader,
        leads=meeting.leads,
        run=meeting.run,
        role=args.role,
        env="local" if args.standalone else args.env,
        start=args.start,
        display=Display(
            show=args.show,
            only=args.local_ranks_filter,
            timestamps=args.timestamps,
            collapse=args.collapse,
            logs=args.logs,
            redirects=args.redirects,
            tee=args.tee,
            log_dir=args.log_dir,
        ),
        grace_s=args.grace,
        threads=args.threads,
        instead_of_gloo=args.instead_of_gloo,
        restarts=args.restarts,
        join_timeout_s=args.join_timeout if meeting.join_timeout_s is None else meeting.join_timeout_s,
        last_call_s=10.0 if meeting.last_call_s is None else meeting.last_call_s,
        exports=tuple(args.exports),
        folder=args.folder,
        ssh=args.ssh,
        iface=args.iface or meeting.own,
        dry_run=args.dry_run,
        reporter=Reporter(program, args.quiet, args.verbose),
        backend=args.backend or "",
        idle_s=args.idle_timeout,
        trace=args.trace,
        notice_s=notice_seconds(os.environ) if args.notice_after is None else args.notice_after,
        signals=args.signals,
        bind=args.bind,
        one_gpu_per_rank=args.one_gpu_per_rank,
        stdin=args.stdin,
        stats=args.stats,
        metrics=args.metrics,
        statistics=args.stats or args.metrics is not None,
        elastic=args.elastic,
        spares=args.spares,
        respawns=RESPAWNS if args.respawns is None else args.respawns,
        rehearse=_rehearsed(args, argv),
    )


def refuse_inelastic(args: argparse.Namespace) -> None:
    """Raises if there is an option for elastic jobs only, and the job is not elastic.

    Raises:
        ConfigError: with its name.
    """
    if args.elastic is None and args.respawns is not None:
        raise ConfigError("--respawns is for a job that goes on after a loss: add --elastic MIN")
    if args.elastic is None and args.spares:
        raise ConfigError("--spares is for a job that goes on after a loss: add --elastic MIN")


def _check_elastic(args: argparse.Namespace) -> None:
    """Raises if an option contradicts what an elastic job is.

    Raises:
        ConfigError: with its name.
    """
    refuse_inelastic(args)
    if args.rehearse and args.elastic is None:
        raise ConfigError("--rehearse is for a job that goes on after a loss: add --elastic MIN")
    if args.rehearse and args.respawns == 0:
        raise ConfigError("--rehearse compares jobs in which lost ranks are replaced: leave out --respawns 0")
    if args.elastic is not None and args.mode == "master":
        raise ConfigError(
            "--elastic is for ranks that are all alike. With --mode master a worker may be lost anyway, and"
            " the master starts it again (respawn)"
        )


def _rehearsed(args: argparse.Namespace, argv: Sequence[str]) -> tuple[str, ...]:
    """The command line of the jobs of a rehearsal: without ``--rehearse``, and with all output."""
    if not args.rehearse:
        return ()
    end = len(argv) - len(args.target)
    if end and argv[end - 1] == "--":  # argparse drops it
        end -= 1
    own = [word for word in argv[:end] if word != "--rehearse"]
    # A restart would hide the error of a phase; the last value of an option counts.
    return *own, "--restarts", "0", "--show", "all", *argv[end:]


def _refuse_contradictions(args: argparse.Namespace, meeting: Meeting, listed: bool) -> None:
    """Raises if two options contradict each other about where the job runs.

    Raises:
        ConfigError: with their names.
    """
    if args.standalone and args.nodes is not None and args.nodes[1] > 1:
        raise ConfigError("--standalone is for one host, and more were asked for (-N)")
    if not listed:
        return
    if args.standalone:
        raise ConfigError("--standalone is for this host, and hosts were listed (--hosts or --hostfile)")
    for given, option in (
        (args.node is not None, "--node-rank"),
        (meeting.leader is not None, "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr and --master-port"),
    ):
        if given:
            raise ConfigError(
                f"{option}: for hosts on which the same command is started, and --hosts or --hostfile starts them all"
                " from here; expected one of both"
            )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shown = "ranks in all; auto: one per CPU; gpu: one per GPU (default 1)"
    add("-n", "--nproc", type=_count, metavar="N|auto|gpu", help=shown)
    add("-np", dest="nproc", type=_count, default=argparse.SUPPRESS, help=_HIDE)
    for name in ("--nproc-per-node", "--nproc_per_node"):
        add(
            name,
            dest="per_host",
            type=_count,
            metavar="N|auto|gpu",
            help="ranks on each host" if "-per" in name else _HIDE,
        )
    add("-H", "--hosts", metavar="HOST[:N],...", help="run on these hosts by ssh, at most N ranks on each")
    add("--hostfile", type=Path, metavar="FILE", help="the same from a file: a host a line, slots=N behind it")
    for name in ("-N", "--nodes", "--nnodes"):
        shown = "number of hosts; MIN:MAX: go on with fewer, and with those that come back"
        add(name, dest="nodes", type=_nodes, metavar="MIN[:MAX]", help=shown if name == "-N" else _HIDE)
    for name in ("--node-rank", "--node_rank"):
        shown = "number of this host, where you start the same command on each of them"
        add(name, dest="node", type=_whole, metavar="I", help=shown if "-r" in name else _HIDE)
    add_meeting(parser)
    add("--role", default="default", help=_HIDE)


def _add_program(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add(
        "--mode",
        choices=get_args(Mode),
        default="group",
        help="master: rank 0 alone runs the program, and drives the others by init_master_worker (default group)",
    )
    add(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork ranks from a process that has imported torch, or start fresh interpreters (default fork)",
    )
    add(
        "--stdin",
        type=_stdin,
        default="auto",
        metavar="RANK|none",
        help="the rank that has stdin, or none; the others read end-of-file (default: a single rank, or the master)",
    )
    add("--grace", type=_seconds, default=10.0, metavar="TIME", help="between SIGTERM and SIGKILL (default 10s)")
    add(
        "--threads",
        type=_threads,
        metavar="N|auto",
        help="OMP_NUM_THREADS per rank, or auto: CPUs / ranks (default auto)",
    )
    add(
        "--instead-of-gloo",
        action="store_true",
        help="give a program that asks torch.distributed for gloo groups on our channel; it need not be changed",
    )
    add(
        "--backend",
        type=_backend,
        metavar="NAME",
        help="what init_process_group() takes where the program names none, as native, gloo or cpu:gloo,cuda:nccl",
    )


def add_elastic(add: Callable[..., Any]) -> None:
    """Adds the options of a job that goes on after a loss."""
    add(
        "--elastic",
        type=_elastic,
        metavar="MIN[:MAX]",
        help="a lost rank does not end the job as long as MIN are left (docs/resilience.md: how a program goes on)",
    )
    shown = f"with --elastic: start each lost rank again, up to K times (default {RESPAWNS}; 0: go on without it)"
    add("--respawns", type=_whole, metavar="K", help=shown)
    shown = "with --elastic, of several hosts: the last N run no rank at first; a lost host's ranks are started there"
    add("--spares", type=_whole, default=0, metavar="N", help=shown)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="allranks run",
        usage=_USAGE,
        description="Runs a program as N processes (ranks), here or on other hosts; all stop when one fails.",
        epilog="A single rank has this terminal, or other stdin, for breakpoint() and input(); of several, --stdin's.",
        examples=(
            ("allranks run -n 4 train.py --epochs 3", "four ranks here; what follows the script is its own"),
            ("allranks run -H node0:4,node1:4 train.py", "eight ranks on two hosts, by ssh"),
            ("allranks run train.py", "in a job of SLURM, PBS, LSF, SGE or Flux: on its nodes"),
            ("allranks run -n 4 --elastic 2 --restarts 3 train.py", "goes on when ranks are lost"),
            ("allranks run -n 4 --trace calls train.py", "records all calls, for allranks trace timeline calls"),
            ("allranks run -n 4 -- ./program --option", "a command that is no Python script"),
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    _add_hosts(parser)
    kinds = f"what has started this process: {', '.join(CHOICES)}"
    add("--env", default="auto", type=environment_kind, metavar="KIND", help=kinds)
    for name in ("--restarts", "--max-restarts", "--max_restarts"):
        shown = "start the job again when a rank fails, up to K times (default 0)"
        add(name, dest="restarts", type=_whole, default=0, metavar="K", help=shown if name == "--restarts" else _HIDE)
    add_elastic(add)
    shown = "with --elastic: kill ranks in each phase of the first steps, and print whether the result is the same"
    add("--rehearse", action="store_true", help=shown)
    add("--join-timeout", type=_seconds, default=300.0, metavar="TIME", help="how long to wait for hosts (default 5m)")
    add(
        *("-x", "--export"),
        dest="exports",
        action="append",
        default=[],
        metavar="VAR[=V]",
        help="pass a variable on to other hosts, or all that match a pattern such as WANDB_*",
    )
    for name in ("--chdir", "--wdir"):
        add(name, dest="folder", type=Path, metavar="DIR", help="working directory" if name == "--chdir" else _HIDE)
    add("--ssh", default="", metavar="COMMAND", help="call this in place of ssh, for example 'ssh -i key'")
    add("--iface", default="", metavar="NAME|CIDR", help="interfaces or networks that hosts use among each other")
    add("--dry-run", action="store_true", help="print what would be started where, and start nothing")
    _add_program(parser)
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument(
        "-q", "--quiet", action="store_true", help="of the launcher's own lines, print only the cause of a failure"
    )
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="print what is found, started and stopped, and when"
    )
    _add_display(parser)
    _add_placement(parser)
    _add_watch(parser)
    # Accepted without an effect: what they request is always so.
    for name in ("--use-env", "--use_env", "--standalone"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--monitor-interval", "--monitor_interval"):  # a rank's end is an event here
        add(name, type=_seconds, help=argparse.SUPPRESS)
    for name, fitting in _TORCHRUNS.items():
        for spelling in dict.fromkeys((name, "--" + name[2:].replace("-", "_"))):
            add(spelling, action=_Elsewhere, nargs=0 if fitting is None else 1, const=fitting, help=argparse.SUPPRESS)
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def environment_kind(text: str) -> str:
    """The value of ``--env``: one of ``CHOICES``, or a scheduler that an installed package brings."""
    try:
        if text in CHOICES or scheduler_named(text) is not None:
            return text
    except ConfigError as error:  # a ValueError, which argparse would replace
        raise argparse.ArgumentTypeError(str(error)) from error
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(map(repr, CHOICES))})")


def _count(text: str) -> int | str:
    # torchrun's word for "CPUs where there are no GPUs" is cpu.
    known = {"auto": "auto", "cpu": "auto", "gpu": "gpu"}
    return known.get(text) or _at_least_one(text, "a number of ranks (1 or more, auto or gpu)")


def _stdin(text: str) -> int | str:
    return text if text in ("auto", "none") else _whole(text)


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (0 or more)")


def _nodes(text: str) -> tuple[int, int]:
    least, greatest = _interval(text, "a number of hosts (N or MIN:MAX)")
    return least, least if greatest is None else greatest


def _elastic(text: str) -> tuple[int, int | None]:
    return _interval(text, "a number of ranks (MIN or MIN:MAX)")


def _interval(text: str, what: str) -> tuple[int, int | None]:
    least, colon, greatest = text.partition(":")
    numbers = [_at_least_one(part, what) for part in ([least, greatest] if colon else [least])]
    if numbers[0] > numbers[-1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is greater than MAX")
    return numbers[0], numbers[1] if colon else None


def _hosts(text: str | None, file: Path | None) -> tuple[Slots, ...]:
    if text is not None and file is not None:
        raise ConfigError("--hosts and --hostfile exclude each other")
    if file is None:
        return parse_hosts(text, "--hosts") if text is not None else ()
    try:
        return parse_hostfile(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the hostfile {str(file)!r}: {why}") from None


def _replaced(text: str) -> Path:
    try:
        return plain_file(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be replaced: {error.strerror}") from None


def _backend(text: str) -> str:
    for part in text.lower().split(","):
        if not registry.is_known(name := part.rpartition(":")[2].strip()):
            known = ", ".join(registry.names())
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}; expected NAME, or cpu:NAME,cuda:NAME")
    return text


def _threads(text: str) -> int | None:
    return None if text == "auto" else _at_least_one(text, "a number of threads (1 or more, or auto)")


def _at_least_one(text: str, what: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some_seconds(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError("it must be more than 0")
    return seconds


def _add_display(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--show",
        choices=("0", "all", "none"),
        default="all",
        help="whose output to print: 0 is rank 0's, unprefixed (default all)",
    )
    add("--timestamps", action="store_true", help="put the time before each line, on the screen and in files")
    add(
        "--collapse",
        choices=("auto", "always", "never"),
        default="auto",
        help="print a line that several ranks write at the same time once (default auto: from 8 ranks on)",
    )
    add("--logs", type=Path, metavar="DIR", help="also write each rank's output to DIR/rankN.log")
    for short, name, what in (("-t", "--tee", "also"), ("-r", "--redirects", "only")):
        text = f"write streams {what} to files under --log-dir: 1 stdout, 2 stderr, 3 both; or 0:3,10:1 by local rank"
        add(short, name, type=_streams, default=Streams(), metavar="STREAMS", help=text)
    help_of_log_dir = "folder for -t and -r: DIR/<run>_<random>/attempt_0/<local rank>/stdout.log, stderr.log"
    _add_both(add, "--log-dir", type=Path, metavar="DIR", help=help_of_log_dir)
    help_of_filter = "print the output of these local ranks only"
    _add_both(add, "--local-ranks-filter", type=_ranks, metavar="0,1,...", help=help_of_filter)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("placement").add_argument
    add(
        "--bind",
        choices=("none", "core", "numa"),
        default="none",
        help="give each rank cores of its own, or the cores of a NUMA node, its GPU's if it has one (default none)",
    )
    add("--one-gpu-per-rank", action="store_true", help="let each rank see one GPU, by CUDA_VISIBLE_DEVICES")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hangs, statistics and signals").add_argument
    add(
        "--notice-after",
        type=_seconds,
        metavar="TIME",
        help="how long a rank may wait in one call before a line says for whom, and where that rank is; 0 for never"
        " (default 10s)",
    )
    add("--stats", action="store_true", help="at the end, print what the calls took, per verb, and who came last")
    add(
        "--metrics",
        type=_replaced,
        metavar="FILE",
        help="write the same there every 10 s, in Prometheus' text format, as node_exporter's textfile collector reads",
    )
    add(
        "--trace",
        type=_folder,
        metavar="DIR",
        help="record all calls of all ranks, rank 3 in DIR/rank-3.trace; allranks trace timeline DIR draws them",
    )
    add(
        "--idle-timeout",
        type=_some_seconds,
        metavar="TIME",
        help="when no rank has written anything for so long, print the stacks of all, stop and exit with 124",
    )
    add(
        "--signals",
        type=_signals,
        default=(signal.SIGUSR1, signal.SIGUSR2),
        metavar="NAMES",
        help="signals to pass on to the ranks; the job goes on (default USR1,USR2; none for none)",
    )


def _add_both(add: Callable[..., Any], name: str, **how: Any) -> None:
    """Adds an option in its spellings with - and, as torchrun has it, with _."""
    add(name, **how)
    add("--" + name[2:].replace("-", "_"), **how | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS})


def _streams(text: str) -> Streams:
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        return Streams(of_some={int(rank): int(value) for rank, value in (x.split(":") for x in text.split(","))})
    raise argparse.ArgumentTypeError(f"{text!r} is neither 0, 1, 2 or 3 nor a map as 0:3,1:2 of local ranks to these")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder")
    return Path(text)


def _ranks(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of local ranks as 0,1")
    return frozenset(map(int, text.split(",")))


def _signals(text: str) -> tuple[int, ...]:
    numbers = []
    for word in text.split(",") if text != "none" else ():
        name = "SIG" + word.strip().upper().removeprefix("SIG")
        if name not in signal.Signals.__members__:
            raise argparse.ArgumentTypeError(f"there is no signal {word!r}; names are as USR1,USR2")
        if name in _NOT_PASSED:
            raise argparse.ArgumentTypeError(f"{name} has a meaning for the job itself and cannot be passed on")
        numbers.append(signal.Signals[name])
    return tuple(numbers)


_NOT_PASSED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "SIGWINCH", "SIGPIPE")
