"""The arguments of ``allranks run``: words in, ``Options`` out.

Options precede the script; all later words belong to the script. Spellings of torchrun and torch.distributed.launch are
accepted if they mean the same. ``torchrun`` handles their complete command lines.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from allranks._base.console import ArgumentParser
from allranks._base.errors import ConfigError
from allranks._base.files import read_text
from allranks._cluster.hostlist import Slots, parse_hostfile, parse_hosts
from allranks.launch.arguments.meeting import MeetingOptions, add_meeting, read_meeting
from allranks.launch.reporter import Reporter
from allranks.launch.spec import values
from allranks.launch.spec.declared import add_options, declarations, values_of
from allranks.launch.spec.options import GROUPS, HOSTS, OUTPUT, PROGRAM, Display, Options
from allranks.launch.spec.target import Mode, read_target

__all__ = ["Parser", "parse", "refuse_inelastic"]

_HIDE = argparse.SUPPRESS

_USAGE = """allranks run [options] script.py [args ...]
       allranks run [options] -m module [args ...]
       allranks run [options] -- command [args ...]"""


# torchrun's options without a counterpart; the value that requests the only behavior, or None if the option has no
# value.
_TORCHRUNS = {
    "--start-method": "",
    "--no-python": None,
    "--run-path": None,
}
_INSTEAD = {"--no-python": "-- command", "--start-method": "--start"}


class _RefusedOption(argparse.Action):
    """An option of torchrun that requests an unsupported feature."""

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
    """A parser that raises ConfigError if the command line is wrong."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized"):
            wrong = message.partition(": ")[2].split()[0].partition("=")[0]
            near = difflib.get_close_matches(wrong, self._option_string_actions, 1)
            message += f" ({f'did you mean {near[0]}? ' if near else ''}see {self.prog} --help)"
        raise ConfigError(message)


def parse(argv: Sequence[str], program: str = "allranks run") -> Options:
    """Parse the arguments.

    Args:
        argv: the arguments.
        program: name of the command, for messages.

    Raises:
        ConfigError: the arguments are wrong.
        SystemExit: help was requested, and printed.
    """
    args = _parser().parse_args(argv)
    target = read_target(args.target, args.module, program, args.mode)
    meeting = read_meeting(args)
    hosts = _hosts(args.hosts, args.hostfile)
    _refuse_contradictions(args, meeting, bool(hosts))
    _check_elastic(args)
    given = values_of(Options, args) | {
        "target": target,
        "nproc": args.nproc if isinstance(args.nproc, int) else None,
        "per_host": args.per_host if isinstance(args.nproc, int) or args.nproc is None else args.nproc,
        "hosts": hosts,
        "nodes": args.nodes,
        "leader": meeting.leader,
        "leads": meeting.leads,
        "run": meeting.run,
        "display": Display(**values_of(Display, args)),
        "last_call_s": 10.0 if meeting.last_call_s is None else meeting.last_call_s,
        "reporter": Reporter(program, args.quiet, args.verbose),
        "statistics": args.stats or args.metrics is not None,
        "rehearse": _rehearsed(args, argv),
    }
    if args.standalone:
        given["env"] = "local"
    if meeting.join_timeout_s is not None:
        given["join_timeout_s"] = meeting.join_timeout_s
    given["iface"] = args.iface or meeting.own
    return Options(**given)


def refuse_inelastic(args: argparse.Namespace) -> None:
    """Refuse options for elastic jobs if the job is not elastic.

    Raises:
        ConfigError: the options are refused; with the name of the option.
    """
    if args.elastic is None and args.respawns is not None:
        raise ConfigError("--respawns is for a job that goes on after a loss: add --elastic MIN")
    if args.elastic is None and args.spares:
        raise ConfigError("--spares is for a job that goes on after a loss: add --elastic MIN")


def _check_elastic(args: argparse.Namespace) -> None:
    """Check for options that contradict an elastic job.

    Raises:
        ConfigError: with the name of the option.
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
    """Return the command line of the jobs of a rehearsal: without ``--rehearse``, and with all output."""
    if not args.rehearse:
        return ()
    end = len(argv) - len(args.target)
    if end and argv[end - 1] == "--":  # argparse drops it
        end -= 1
    own = [word for word in argv[:end] if word != "--rehearse"]
    # A restart would hide the error of a phase. The last value of an option counts, so these override the user's.
    return *own, "--restarts", "0", "--show", "all", *argv[end:]


def _refuse_contradictions(args: argparse.Namespace, meeting: MeetingOptions, listed: bool) -> None:
    """Check for options that contradict each other about the hosts of the job.

    Raises:
        ConfigError: with the names of the options.
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


def _add_hosts(add: Callable[..., Any]) -> None:
    """Add the options that set several fields: number of ranks, hosts, rendezvous."""
    shown = "ranks in all; auto: one per CPU; gpu: one per GPU (default 1)"
    add("-n", "--nproc", type=values.rank_count, metavar="N|auto|gpu", help=shown)
    add("-np", dest="nproc", type=values.rank_count, default=argparse.SUPPRESS, help=_HIDE)
    for name in ("--nproc-per-node", "--nproc_per_node"):
        add(
            name,
            dest="per_host",
            type=values.rank_count,
            metavar="N|auto|gpu",
            help="ranks on each host" if "-per" in name else _HIDE,
        )
    add("-H", "--hosts", metavar="HOST[:N],...", help="run on these hosts by ssh, at most N ranks on each")
    add("--hostfile", type=Path, metavar="FILE", help="the same from a file: a host a line, slots=N behind it")
    for name in ("-N", "--nodes", "--nnodes"):
        shown = "number of hosts; MIN:MAX: go on with fewer, and with those that come back"
        add(name, dest="nodes", type=values.host_count, metavar="MIN[:MAX]", help=shown if name == "-N" else _HIDE)
    add_options(add, Options, ("node",))
    add_meeting(add)


def _add_program(add: Callable[..., Any]) -> None:
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add(
        "--mode",
        choices=get_args(Mode),
        default="group",
        help="master: rank 0 alone runs the program, and drives the others by init_master_worker (default group)",
    )


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
    for title in GROUPS:
        group = parser.add_argument_group(title)
        if title == HOSTS:
            _add_hosts(group.add_argument)
        elif title == PROGRAM:
            _add_program(group.add_argument)
        elif title == OUTPUT:
            loudness = group.add_mutually_exclusive_group()
            shown = "of the launcher's own lines, print only the cause of a failure"
            loudness.add_argument("-q", "--quiet", action="store_true", help=shown)
            shown = "print what is found, started and stopped, and when"
            loudness.add_argument("-v", "--verbose", action="store_true", help=shown)
        for kind in (Options, Display):
            names = [name for name, each in declarations(kind).items() if each.group == title and name != "node"]
            add_options(group.add_argument, kind, names)
    _add_of_torchrun(parser.add_argument)
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_of_torchrun(add: Callable[..., Any]) -> None:
    """Add options of torchrun that have no effect, because their behavior is the only one here, or that are refused."""
    for name in ("--use-env", "--use_env", "--standalone"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    # the exit of a rank is an event here, so no interval applies
    for name in ("--monitor-interval", "--monitor_interval"):
        add(name, type=values.seconds, help=argparse.SUPPRESS)
    for name, fitting in _TORCHRUNS.items():
        for spelling in dict.fromkeys((name, "--" + name[2:].replace("-", "_"))):
            add(
                spelling,
                action=_RefusedOption,
                nargs=0 if fitting is None else 1,
                const=fitting,
                help=argparse.SUPPRESS,
            )


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
