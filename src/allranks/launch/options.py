"""The arguments of ``allranks run``: words in, ``Options`` out.

Options stand before the script; all that follows it is the script's own. torchrun's and torch.distributed.launch's
spellings are accepted where they mean the same on one host.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from allranks._env import split_host_port
from allranks._errors import ConfigError
from allranks._hostlist import Slots, parse_hostfile, parse_hosts
from allranks._places import CHOICES
from allranks.launch.target import Kind, Target

__all__ = ["Options", "Show", "parse"]

Show = Literal["0", "all", "none"]

_HIDE = argparse.SUPPRESS

_USAGE = """allranks run [options] script.py [args ...]
       allranks run [options] -m module [args ...]
       allranks run [options] -- command [args ...]"""


@dataclass(frozen=True)
class Options:
    """What ``allranks run`` was asked for.

    Attributes:
        target: what to run.
        nproc: number of ranks in the job; None if it follows from the hosts.
        per_host: number of ranks on each host, "auto" (one for each CPU) or "gpu" (one for each GPU); None if it
            follows from the above.
        hosts: where to run; empty for where we are.
        nodes: the least and the greatest number of hosts; None for those that are given.
        node: number of this host, where the same command is started on each of them.
        leader: host and port of host 0 in that case.
        env: what kind of place this is; "auto" to find out.
        start: fork ranks from a process that has imported torch, or execute fresh interpreters.
        show: whose output is shown.
        logs: folder for one file per rank.
        grace_s: time that ranks get to end by themselves when the job is stopped.
        threads: threads per rank; None to decide.
        instead_of_gloo: give programs that ask torch.distributed for gloo our groups.
        restarts: how often to start the job again when a rank fails.
        join_timeout_s: how long to wait for hosts.
        exports: variables for ranks on other hosts: NAME, NAME=VALUE or a pattern.
        folder: working directory of the ranks; None for the present one.
        ssh: what to call in place of ssh, with options.
        iface: which networks hosts use among each other.
        dry_run: say what would be started, and where.
        quiet: leave out what need not be said.
    """

    target: Target
    nproc: int | None = None
    per_host: int | Literal["auto", "gpu"] | None = None
    hosts: tuple[Slots, ...] = ()
    nodes: tuple[int, int] | None = None
    node: int | None = None
    leader: tuple[str, int | None] | None = None
    env: str = "auto"
    start: Literal["fork", "spawn"] = "fork"
    show: Show = "all"
    logs: Path | None = None
    grace_s: float = 10.0
    threads: int | None = None
    instead_of_gloo: bool = False
    restarts: int = 0
    join_timeout_s: float = 300.0
    exports: tuple[str, ...] = ()
    folder: Path | None = None
    ssh: str = ""
    iface: str = ""
    dry_run: bool = False
    quiet: bool = False


# torchrun's options that are not here; the value that asks for what is so anyway, or None where the option has none.
_TORCHRUNS = {
    "--rdzv-backend": "",
    "--rdzv-endpoint": "",
    "--rdzv-id": "",
    "--rdzv-conf": "",
    "--local-addr": "",
    "--monitor-interval": "",
    "--start-method": "",
    "--role": "",
    "--log-dir": "",
    "--redirects": "",
    "--tee": "",
    "--local-ranks-filter": "",
    "--no-python": None,
    "--run-path": None,
}
_INSTEAD = {"--log-dir": "--logs DIR", "--no-python": "-- command", "--start-method": "--start"}


class _Elsewhere(argparse.Action):
    """An option of torchrun's that asks for what is not there."""

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str]) -> Options:
    """Reads the arguments.

    Raises:
        ConfigError: they are wrong.
        SystemExit: help was asked for, and given.
    """
    args = _parser().parse_args(argv)
    words: list[str] = args.target
    command = words[:1] == ["--"]
    if command and args.module:
        raise ConfigError("-m and -- exclude each other")
    words = words[1:] if command else words
    if not words:
        what = "a command after --" if command else "a module after -m" if args.module else "a script, -m module or --"
        raise ConfigError(f"nothing to run: expected {what} (see allranks run --help)")
    kind: Kind = "command" if command else "module" if args.module else "script"
    return Options(
        target=Target(kind, words[0], tuple(words[1:])),
        nproc=args.nproc if isinstance(args.nproc, int) else None,
        per_host=args.per_host if isinstance(args.nproc, int) or args.nproc is None else args.nproc,
        hosts=_hosts(args.hosts, args.hostfile),
        nodes=args.nodes,
        node=args.node,
        leader=_leader(args.master_addr, args.master_port),
        env=args.env,
        start=args.start,
        show=args.show,
        logs=args.logs,
        grace_s=args.grace,
        threads=args.threads,
        instead_of_gloo=args.instead_of_gloo,
        restarts=args.restarts,
        join_timeout_s=args.join_timeout,
        exports=tuple(args.exports),
        folder=args.folder,
        ssh=args.ssh,
        iface=args.iface,
        dry_run=args.dry_run,
        quiet=args.quiet,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="allranks run",
        usage=_USAGE,
        description="Runs a program as N processes (ranks), here or on other hosts; all stop when one fails.",
        epilog="Ranks read end-of-file from stdin: give them their input as files or arguments.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--nproc", type=_count, metavar="N", help="ranks in all; auto: one per CPU; gpu: one per GPU (default 1)")
    add("-np", dest="nproc", type=_count, default=argparse.SUPPRESS, help=_HIDE)
    for name in ("--nproc-per-node", "--nproc_per_node"):
        add(name, dest="per_host", type=_count, metavar="N", help="ranks on each host" if "-per" in name else _HIDE)
    add("-H", "--hosts", metavar="HOST[:N],...", help="run on these hosts by ssh, at most N ranks on each")
    add("--hostfile", type=Path, metavar="FILE", help="the same from a file: a host a line, slots=N behind it")
    for name in ("-N", "--nodes", "--nnodes"):
        shown = "number of hosts, or MIN:MAX to go on with fewer and take back who returns"
        add(name, dest="nodes", type=_nodes, metavar="MIN[:MAX]", help=shown if name == "-N" else _HIDE)
    for name in ("--node-rank", "--node_rank"):
        shown = "number of this host, where you start the same command on each of them"
        add(name, dest="node", type=_whole, metavar="I", help=shown if "-r" in name else _HIDE)
    for name in ("--master-addr", "--master_addr"):
        add(name, dest="master_addr", metavar="HOST[:PORT]", help="host 0, in that case" if "-a" in name else _HIDE)
    for name in ("--master-port", "--master_port"):
        add(name, dest="master_port", type=_port, metavar="PORT", help=_HIDE)
    add("--env", default="auto", choices=CHOICES, metavar="KIND", help=f"what this place is: {', '.join(CHOICES)}")
    for name in ("--restarts", "--max-restarts", "--max_restarts"):
        shown = "start the job again when a rank fails, so often (default 0)"
        add(name, dest="restarts", type=_whole, default=0, metavar="K", help=shown if name == "--restarts" else _HIDE)
    add("--join-timeout", type=_seconds, default=300.0, metavar="SECONDS", help="wait so long for hosts (default 300)")
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
    add("--dry-run", action="store_true", help="say what would be started where, and start nothing")
    add("-m", "--module", action="store_true", help="run a python module, as python -m does")
    add(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="fork ranks from a process that has imported torch, or start fresh interpreters (default fork)",
    )
    add(
        "--show",
        choices=("0", "all", "none"),
        default="all",
        help="whose output to print: 0 is rank 0's, unprefixed (default all)",
    )
    add("--logs", type=Path, metavar="DIR", help="also write each rank's output to DIR/rankN.log")
    add("--grace", type=_seconds, default=10.0, metavar="SECONDS", help="between SIGTERM and SIGKILL (default 10)")
    add("--threads", type=_threads, metavar="N", help="OMP_NUM_THREADS per rank, or auto: CPUs / ranks (default auto)")
    add(
        "--instead-of-gloo",
        action="store_true",
        help="give a program that asks torch.distributed for gloo groups on our channel; it need not be changed",
    )
    add("-q", "--quiet", action="store_true", help="of the launcher's own lines, print only the cause of a failure")
    # What they ask for is so anyway.
    for name in ("--use-env", "--use_env", "--standalone"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name, fitting in _TORCHRUNS.items():
        for spelling in {name, "--" + name[2:].replace("-", "_")}:
            add(spelling, action=_Elsewhere, nargs=0 if fitting is None else 1, const=fitting, help=argparse.SUPPRESS)
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int | str:
    # torchrun's word for "CPUs where there are no GPUs" is cpu.
    known = {"auto": "auto", "cpu": "auto", "gpu": "gpu"}
    return known.get(text) or _at_least_one(text, "a number of ranks (1 or more, auto or gpu)")


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (0 or more)")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port (0..65535)")


def _nodes(text: str) -> tuple[int, int]:
    least, colon, greatest = text.partition(":")
    numbers = [
        _at_least_one(part, "a number of hosts (N or MIN:MAX)") for part in (least, greatest if colon else least)
    ]
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: MIN is greater than MAX")
    return numbers[0], numbers[1]


def _hosts(text: str | None, file: Path | None) -> tuple[Slots, ...]:
    if text is not None and file is not None:
        raise ConfigError("--hosts and --hostfile exclude each other")
    if file is None:
        return parse_hosts(text, "--hosts") if text is not None else ()
    try:
        return parse_hostfile(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the hostfile {str(file)!r}: {why}") from None


def _leader(address: str | None, port: int | None) -> tuple[str, int | None] | None:
    if address is None:
        return None if port is None else ("", port)
    host, inner = split_host_port(address, "--master-addr")
    if inner is not None and port not in (None, inner):
        raise ConfigError(f"--master-addr {address} and --master-port {port} name two ports")
    return host, port if inner is None else inner


def _threads(text: str) -> int | None:
    return None if text == "auto" else _at_least_one(text, "a number of threads (1 or more, or auto)")


def _at_least_one(text: str, what: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 or more)")
    return seconds
