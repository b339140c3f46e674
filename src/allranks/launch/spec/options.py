"""The options of ``allranks run``, from any command line or call.

If a single option of the command line sets a field, the field declares that option (`declared`). Options that set
several fields are in ``arguments/options``: number of ranks, hosts, rendezvous, and target.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from allranks._cluster.detection import CHOICES
from allranks._cluster.env import NOTICE_S, notice_seconds
from allranks._cluster.hostlist import Slots
from allranks.launch.reporter import Reporter
from allranks.launch.spec import values
from allranks.launch.spec.declared import option
from allranks.launch.spec.stdio import Streams
from allranks.launch.spec.target import Target

__all__ = ["GROUPS", "Bind", "Display", "Options", "RankOptions", "STATISTICS_S", "Show", "given"]

GROUPS = HOSTS, PROGRAM, LOSSES, OUTPUT, PLACEMENT, WATCH = (
    "hosts",
    "program",
    "losses",
    "output",
    "placement",
    "hangs, statistics and signals",
)
"""Headings of the help, in the order of the help."""

_STREAMS = "write streams {} to files under --log-dir: 1 stdout, 2 stderr, 3 both; or 0:3,10:1 by local rank"

STATISTICS_S = 10.0
"""Seconds between two reports of the durations of ranks' calls by agents, if statistics are requested."""

Show = Literal["0", "all", "none"]
Bind = Literal["none", "core", "numa"]


@dataclass(frozen=True)
class Display:
    """How the output of ranks is shown and kept.

    Attributes:
        show: the ranks whose output is shown.
        only: show these local ranks only; None for all.
        timestamps: print the time before each line.
        collapse: show a line that several ranks write only once; auto: from 8 ranks on.
        logs: folder for one file per rank.
        redirects: streams that are written to torchrun's files and not shown.
        tee: streams that are written to torchrun's files and shown.
        log_dir: folder for torchrun's files; None for a temporary folder, if there are such files.
    """

    show: Show = option(
        "--show",
        default="all",
        group=OUTPUT,
        choices=("0", "all", "none"),
        help="ranks whose output is printed; 0: rank 0 only, without prefix (default all)",
    )
    timestamps: bool = option(
        "--timestamps",
        default=False,
        group=OUTPUT,
        action="store_true",
        help="print the time before each line, on the screen and in files",
    )
    collapse: Literal["auto", "always", "never"] = option(
        "--collapse",
        default="auto",
        group=OUTPUT,
        choices=("auto", "always", "never"),
        help="print a line only once if several ranks write it at the same time (default auto: from 8 ranks on)",
    )
    logs: Path | None = option(
        "--logs",
        default=None,
        group=OUTPUT,
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rankN.log",
    )
    tee: Streams = option(
        *("-t", "--tee"),
        default=Streams(),
        group=OUTPUT,
        type=values.streams,
        metavar="STREAMS",
        help=_STREAMS.format("also"),
    )
    redirects: Streams = option(
        *("-r", "--redirects"),
        default=Streams(),
        group=OUTPUT,
        type=values.streams,
        metavar="STREAMS",
        help=_STREAMS.format("only"),
    )
    log_dir: Path | None = option(
        "--log-dir",
        default=None,
        hidden=("--log_dir",),
        group=OUTPUT,
        type=Path,
        metavar="DIR",
        help="folder for -t and -r: DIR/<run>_<random>/attempt_0/<local rank>/stdout.log, stderr.log",
    )
    only: frozenset[int] | None = option(
        "--local-ranks-filter",
        default=None,
        hidden=("--local_ranks_filter",),
        group=OUTPUT,
        type=values.local_ranks,
        metavar="0,1,...",
        help="print the output of these local ranks only",
    )


@dataclass(frozen=True)
class RankOptions:
    """The options that the agent of each host needs. ``Prepare`` sends all of them.

    Attributes:
        target: the program that the ranks run.
        start: fork ranks from a process that has imported torch, or execute fresh interpreters.
        threads: threads per rank; None for an automatic choice.
        bind: the CPUs that a rank may use.
        one_gpu_per_rank: each rank sees one GPU only, its own.
        virtual_local_rank: with one_gpu_per_rank, LOCAL_RANK is 0 for each rank.
        role: name of the task of the ranks.
        signals: signals that are forwarded to the ranks and do not stop the job.
        notice_s: seconds that a rank may wait in one call before a wait report; 0: no wait reports.
        statistics: report the durations of ranks' calls.
        elastic: the least and the greatest number of ranks of a job that continues after a loss; None: a lost rank
            stops the job. The greatest is None for the number of ranks that are started.
    """

    target: Target
    start: Literal["fork", "spawn"] = option(
        "--start",
        default="fork",
        group=PROGRAM,
        in_place=True,
        choices=("fork", "spawn"),
        help="fork ranks from a process that has imported torch, or start fresh interpreters (default fork)",
    )
    threads: int | None = option(
        "--threads",
        default=None,
        group=PROGRAM,
        in_place=True,
        type=values.thread_count,
        metavar="N|auto",
        help="OMP_NUM_THREADS per rank, or auto: CPUs / ranks (default auto)",
    )
    bind: Bind = option(
        "--bind",
        default="none",
        group=PLACEMENT,
        choices=("none", "core", "numa"),
        help="core: bind each rank to its own cores; numa: to a NUMA node, its GPU's if it has one (default none)",
    )
    one_gpu_per_rank: bool = option(
        "--one-gpu-per-rank",
        default=False,
        group=PLACEMENT,
        action="store_true",
        help="make only one GPU visible to each rank, with CUDA_VISIBLE_DEVICES",
    )
    virtual_local_rank: bool = False
    role: str = option("--role", default="default", group=HOSTS, help=argparse.SUPPRESS)
    signals: tuple[int, ...] = option(
        "--signals",
        default=(signal.SIGUSR1, signal.SIGUSR2),
        group=WATCH,
        type=values.signal_names,
        metavar="NAMES",
        help="signals to forward to the ranks, without stopping the job (default USR1,USR2; none: no signals)",
    )
    notice_s: float = option(
        "--notice-after",
        default=NOTICE_S,
        group=WATCH,
        convert=lambda given: notice_seconds(os.environ) if given is None else given,
        type=values.seconds,
        metavar="TIME",
        help="time that a rank may wait in one call before the missing ranks and their source lines are printed;"
        " 0: never (default 10s)",
    )
    statistics: bool = False
    elastic: tuple[int, int | None] | None = option(
        "--elastic",
        default=None,
        group=LOSSES,
        type=values.elastic_range,
        metavar="MIN[:MAX]",
        help="continue after the loss of ranks while at least MIN are left (see docs/resilience.md)",
    )


@dataclass(frozen=True)
class Options(RankOptions):
    """All options of ``allranks run``.

    Attributes:
        nproc: number of ranks in the job; None if it follows from the hosts.
        per_host: number of ranks on each host, "auto" (one for each CPU) or "gpu" (one for each GPU); None if it
            follows from the fields above.
        hosts: hosts of the ranks; empty for this host.
        nodes: the least and the greatest number of hosts; None for the given hosts.
        node: number of this host, if the same command is started on each host.
        leader: host and port of host 0 in that case.
        leads: this host is host 0, or is not, in that case; None to compare with the leader's name.
        run: name of the job, which must be the same on all hosts in that case; "" for a random one.
        env: the scheduler or launcher that started this process; "auto" to detect it.
        display: how output is shown and kept.
        grace_s: seconds that ranks have to exit by themselves when the job is stopped.
        instead_of_gloo: programs that request gloo from torch.distributed get allranks's groups.
        restarts: how often the job restarts when a rank fails.
        join_timeout_s: seconds to wait for hosts.
        last_call_s: seconds to wait for more hosts after enough hosts have joined.
        exports: variables for ranks on other hosts: NAME, NAME=VALUE or a pattern.
        folder: working directory of the ranks; None for the current one.
        ssh: command that replaces ssh, with options.
        iface: networks that hosts use between each other.
        dry_run: only print which ranks would be started on which hosts.
        reporter: prints the launcher's own lines.
        backend: backend of the program's ``init_process_group()`` without an explicit backend; "" for the default.
        idle_s: stop the job after this many seconds without output of any rank; None: never.
        stdin: the rank that receives the launcher's stdin, or "none"; "auto": a single rank, or the master.
        trace: the folder in which all ranks record their calls; None for none.
        stats: print the durations of the calls at the end.
        metrics: file for the same statistics in Prometheus' text format; None for none.
        respawns: how often each lost rank of an elastic job is restarted.
        spares: number of hosts of an elastic job that run no rank at first: the last ones.
        rehearse: the command line of each job of a rehearsal; empty for an ordinary job.
    """

    nproc: int | None = None
    per_host: int | Literal["auto", "gpu"] | None = None
    hosts: tuple[Slots, ...] = ()
    nodes: tuple[int, int] | None = None
    node: int | None = option(
        "--node-rank",
        default=None,
        hidden=("--node_rank",),
        group=HOSTS,
        type=values.whole,
        metavar="I",
        help="number of this host, if you start the same command on each host",
    )
    leader: tuple[str, int | None] | None = None
    leads: bool | None = None
    run: str = ""
    env: str = option(
        "--env",
        default="auto",
        group=HOSTS,
        in_place=True,
        type=values.environment_kind,
        metavar="KIND",
        help=f"scheduler or launcher that started this process: {', '.join(CHOICES)}",
    )
    display: Display = Display()
    grace_s: float = option(
        "--grace",
        default=10.0,
        group=PROGRAM,
        type=values.seconds,
        metavar="TIME",
        help="time between SIGTERM and SIGKILL (default 10s)",
    )
    instead_of_gloo: bool = option(
        "--instead-of-gloo",
        default=False,
        group=PROGRAM,
        in_place=True,
        action="store_true",
        help="replace gloo groups of torch.distributed by allranks groups, in an unchanged program",
    )
    restarts: int = option(
        "--restarts",
        default=0,
        hidden=("--max-restarts", "--max_restarts"),
        group=LOSSES,
        type=values.whole,
        metavar="K",
        help="restart the job if a rank fails, up to K times (default 0)",
    )
    join_timeout_s: float = option(
        "--join-timeout",
        default=300.0,
        group=HOSTS,
        type=values.seconds,
        metavar="TIME",
        help="time to wait for hosts (default 5m)",
    )
    last_call_s: float = 10.0
    exports: tuple[str, ...] = option(
        *("-x", "--export"),
        default=(),
        convert=lambda given: tuple(given or ()),
        group=HOSTS,
        in_place=True,
        action="append",
        metavar="VAR[=V]",
        help="set a variable on other hosts, or all variables that match a pattern such as WANDB_*",
    )
    folder: Path | None = option(
        "--chdir",
        default=None,
        hidden=("--wdir",),
        group=HOSTS,
        in_place=True,
        type=Path,
        metavar="DIR",
        help="working directory",
    )
    ssh: str = option(
        "--ssh",
        default="",
        group=HOSTS,
        metavar="COMMAND",
        help="command to use instead of ssh, for example 'ssh -i key'",
    )
    iface: str = option(
        "--iface",
        default="",
        group=HOSTS,
        in_place=True,
        metavar="NAME|CIDR",
        help="interfaces or networks for the traffic between hosts",
    )
    dry_run: bool = option(
        "--dry-run",
        default=False,
        group=HOSTS,
        in_place=True,
        action="store_true",
        help="print which ranks would run on which hosts, and start nothing",
    )
    reporter: Reporter = field(default_factory=Reporter)
    backend: str = option(
        "--backend",
        default="",
        group=PROGRAM,
        in_place=True,
        type=values.backend_names,
        metavar="NAME",
        help="default backend of init_process_group(), for example native, gloo or cpu:gloo,cuda:nccl",
    )
    idle_s: float | None = option(
        "--idle-timeout",
        default=None,
        group=WATCH,
        type=values.some_seconds,
        metavar="TIME",
        help="if no rank writes anything for this time, print all stacks, stop and exit with 124",
    )
    stdin: int | Literal["auto", "none"] = option(
        "--stdin",
        default="auto",
        group=PROGRAM,
        type=values.stdin_rank,
        metavar="RANK|none",
        help="rank that receives stdin, or none; other ranks read end-of-file (default: a single rank, or the master)",
    )
    trace: Path | None = option(
        "--trace",
        default=None,
        group=WATCH,
        in_place=True,
        type=values.folder,
        metavar="DIR",
        help="record all calls of all ranks in DIR/rank-N.trace; show them with allranks trace timeline DIR",
    )
    stats: bool = option(
        "--stats",
        default=False,
        group=WATCH,
        action="store_true",
        help="at the end, print the duration of the calls per verb, and the ranks that arrived last",
    )
    metrics: Path | None = option(
        "--metrics",
        default=None,
        group=WATCH,
        type=values.replaced_file,
        metavar="FILE",
        help="write these statistics every 10 s in Prometheus' text format, for node_exporter's textfile collector",
    )
    respawns: int = option(
        "--respawns",
        default=3,
        group=LOSSES,
        type=values.whole,
        metavar="K",
        help="with --elastic: restart each lost rank, up to K times (default 3; 0: continue without it)",
    )
    spares: int = option(
        "--spares",
        default=0,
        group=LOSSES,
        type=values.whole,
        metavar="N",
        help="with --elastic on several hosts: keep the last N hosts as spares for the ranks of a lost host",
    )
    rehearse: tuple[str, ...] = option(
        "--rehearse",
        default=(),
        group=LOSSES,
        action="store_true",
        help="with --elastic: kill ranks in each phase of the first steps, and print whether the result is the same",
    )

    def for_ranks(self) -> RankOptions:
        """Return the options that every agent receives."""
        return RankOptions(**{each.name: getattr(self, each.name) for each in fields(RankOptions)})

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the options set for all ranks, on every host."""
        asked = {"ALLRANKS_INSTEAD_OF_GLOO": "1"} if self.instead_of_gloo else {}
        if self.backend:
            asked["ALLRANKS_BACKEND"] = self.backend
        if self.trace is not None:  # an absolute path, because a rank may change its working directory
            asked["ALLRANKS_TRACE"] = os.path.abspath(self.trace)
        return given(self.exports) | asked


def given(wanted: Sequence[str]) -> dict[str, str]:
    """Return the variables with a value in ``-x`` (NAME=VALUE). The launcher's environment already has the others."""
    pairs = (word.partition("=") for word in wanted)
    return {name: value for name, given, value in pairs if given}
