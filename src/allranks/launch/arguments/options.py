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
from allranks.launch.arguments.rendezvous import RendezvousOptions, add_rendezvous, read_rendezvous
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
            hint = f".\n  Use {instead}." if instead else ".\n  Remove it, or use `allranks torchrun`."
            parser.error(f"{words} is an option of torchrun that allranks run does not support{hint}")


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
    rendezvous = read_rendezvous(args)
    hosts = _hosts(args.hosts, args.hostfile)
    _refuse_contradictions(args, rendezvous, bool(hosts))
    _check_elastic(args)
    given = values_of(Options, args) | {
        "target": target,
        "nproc": args.nproc if isinstance(args.nproc, int) else None,
        "per_host": args.per_host if isinstance(args.nproc, int) or args.nproc is None else args.nproc,
        "hosts": hosts,
        "nodes": args.nodes,
        "leader": rendezvous.leader,
        "leads": rendezvous.leads,
        "run": rendezvous.run,
        "display": Display(**values_of(Display, args)),
        "last_call_s": 10.0 if rendezvous.last_call_s is None else rendezvous.last_call_s,
        "reporter": Reporter(program, args.quiet, args.verbose),
        "statistics": args.stats or args.metrics is not None,
        "rehearse": _rehearsed(args, argv),
    }
    if args.standalone:
        given["env"] = "local"
    if rendezvous.join_timeout_s is not None:
        given["join_timeout_s"] = rendezvous.join_timeout_s
    given["iface"] = args.iface or rendezvous.own
    return Options(**given)


def refuse_inelastic(args: argparse.Namespace) -> None:
    """Refuse options for elastic jobs if the job is not elastic.

    Raises:
        ConfigError: the options are refused; with the name of the option.
    """
    if args.elastic is None and args.respawns is not None:
        raise ConfigError("--respawns requires an elastic job.\n  Add --elastic MIN.")
    if args.elastic is None and args.spares:
        raise ConfigError("--spares requires an elastic job.\n  Add --elastic MIN.")


def _check_elastic(args: argparse.Namespace) -> None:
    """Check for options that contradict an elastic job.

    Raises:
        ConfigError: with the name of the option.
    """
    refuse_inelastic(args)
    if args.rehearse and args.elastic is None:
        raise ConfigError("--rehearse requires an elastic job.\n  Add --elastic MIN.")
    if args.rehearse and args.respawns == 0:
        raise ConfigError("--rehearse compares jobs in which lost ranks are replaced.\n  Remove --respawns 0.")
    if args.elastic is not None and args.mode == "master":
        raise ConfigError(
            "--elastic cannot be combined with --mode master, which already tolerates the loss of a worker.\n"
            "  Remove --elastic. The master can restart a worker (respawn)."
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


def _refuse_contradictions(args: argparse.Namespace, rendezvous: RendezvousOptions, listed: bool) -> None:
    """Check for options that contradict each other about the hosts of the job.

    Raises:
        ConfigError: with the names of the options.
    """
    if args.standalone and args.nodes is not None and args.nodes[1] > 1:
        raise ConfigError("--standalone runs the job on one host, but -N requests more.\n  Remove one of the two.")
    if not listed:
        return
    if args.standalone:
        raise ConfigError(
            "--standalone runs the job on this host, but --hosts or --hostfile lists hosts.\n"
            "  Specify only one of them."
        )
    for given, option in (
        (args.node is not None, "--node-rank"),
        (rendezvous.leader is not None, "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr and --master-port"),
    ):
        if given:
            raise ConfigError(
                f"{option} requires that you start the command on each host, but --hosts or --hostfile starts all hosts"
                " from here.\n  Specify only one of them."
            )


def _add_hosts(add: Callable[..., Any]) -> None:
    """Add the options that set several fields: number of ranks, hosts, rendezvous."""
    shown = "number of ranks; auto: one per CPU; gpu: one per GPU (default 1)"
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
    add(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="like --hosts, from a file: one host per line, with slots=N",
    )
    for name in ("-N", "--nodes", "--nnodes"):
        shown = "number of hosts; MIN:MAX: continue with fewer, and add hosts that return"
        add(name, dest="nodes", type=values.host_count, metavar="MIN[:MAX]", help=shown if name == "-N" else _HIDE)
    add_options(add, Options, ("node",))
    add_rendezvous(add)


def _add_program(add: Callable[..., Any]) -> None:
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add(
        "--mode",
        choices=get_args(Mode),
        default="group",
        help="master: only rank 0 runs the program and drives the others with init_master_worker (default group)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="allranks run",
        usage=_USAGE,
        description="Run a program as N processes (ranks), here or on other hosts. If one fails, all stop.",
        epilog="breakpoint() and input() work in a single rank, or in the rank that --stdin selects.",
        examples=(
            ("allranks run -n 4 train.py --epochs 3", "four ranks here, with arguments for the script"),
            ("allranks run -H node0:4,node1:4 train.py", "eight ranks on two hosts, by ssh"),
            ("allranks run train.py", "on the nodes of a job of SLURM, PBS, LSF, SGE or Flux"),
            ("allranks run -n 4 --elastic 2 --restarts 3 train.py", "continue when ranks are lost"),
            ("allranks run -n 4 --trace calls train.py", "record all calls, for allranks trace timeline calls"),
            ("allranks run -n 4 -- ./program --option", "a command that is not a Python script"),
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
            shown = "print no message of the launcher except the cause of a failure"
            loudness.add_argument("-q", "--quiet", action="store_true", help=shown)
            shown = "print each step of the launcher with its time"
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
        raise ConfigError("--hosts and --hostfile are mutually exclusive")
    if file is None:
        return parse_hosts(text, "--hosts") if text is not None else ()
    try:
        return parse_hostfile(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise ConfigError(f"cannot read the hostfile {str(file)!r}: {why}") from None
