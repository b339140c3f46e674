"""What ``allranks run`` was asked for, whichever command line or call asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from allranks._cluster.env import NOTICE_S
from allranks._cluster.hostlist import Slots
from allranks.launch.reporter import Reporter
from allranks.launch.spec.target import Target

__all__ = ["Bind", "Display", "Options", "RankOptions", "STATISTICS_S", "Show", "Streams", "given"]

STATISTICS_S = 10.0
"""How often agents report what their ranks' calls took, where that is wanted."""

Show = Literal["0", "all", "none"]
Bind = Literal["none", "core", "numa"]


@dataclass(frozen=True)
class Streams:
    """torchrun's words for output streams: 0 none, 1 stdout, 2 stderr, 3 both.

    Attributes:
        of_all: for all ranks.
        of_some: local rank -> its own; the others then have none.
    """

    of_all: int = 0
    of_some: Mapping[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.of_all or self.of_some)

    def has(self, local_rank: int, stream: int) -> bool:
        """True if it names a stream (1 or 2) of a rank."""
        chosen = self.of_all if self.of_some is None else self.of_some.get(local_rank, 0)
        return bool(chosen & stream)


@dataclass(frozen=True)
class Display:
    """How the output of ranks is shown and kept.

    Attributes:
        show: whose output is shown.
        only: of these local ranks only; None for all.
        timestamps: put the time before each line.
        collapse: show a line that many ranks write once; auto: from 8 ranks on.
        logs: folder for one file per rank.
        redirects: streams that go to torchrun's files and are not shown.
        tee: streams that go to torchrun's files and are shown.
        log_dir: folder for torchrun's files; None for a temporary one, if there are such files at all.
    """

    show: Show = "all"
    only: frozenset[int] | None = None
    timestamps: bool = False
    collapse: Literal["auto", "always", "never"] = "auto"
    logs: Path | None = None
    redirects: Streams = Streams()
    tee: Streams = Streams()
    log_dir: Path | None = None


@dataclass(frozen=True)
class RankOptions:
    """Those options that the agent of each host needs: they travel to it whole (``Prepare``).

    Attributes:
        target: what to run.
        start: fork ranks from a process that has imported torch, or execute fresh interpreters.
        threads: threads per rank; None to decide.
        bind: which CPUs a rank may use.
        one_gpu_per_rank: let each rank see one GPU of its own.
        virtual_local_rank: in that case LOCAL_RANK is 0 for each rank.
        role: name of what the ranks do.
        signals: those that are passed on to the ranks and stop nothing.
        notice_s: how long a rank may wait in one call before it is told for whom; 0: that is not told.
        statistics: report what ranks' calls took.
        elastic: the least and the greatest number of ranks of a job that goes on after a loss; None: a lost rank ends
            the job. The greatest is None for the number that is started.
    """

    target: Target
    start: Literal["fork", "spawn"] = "fork"
    threads: int | None = None
    bind: Bind = "none"
    one_gpu_per_rank: bool = False
    virtual_local_rank: bool = False
    role: str = "default"
    signals: tuple[int, ...] = (signal.SIGUSR1, signal.SIGUSR2)
    notice_s: float = NOTICE_S
    statistics: bool = False
    elastic: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class Options(RankOptions):
    """What ``allranks run`` was asked for.

    Attributes:
        nproc: number of ranks in the job; None if it follows from the hosts.
        per_host: number of ranks on each host, "auto" (one for each CPU) or "gpu" (one for each GPU); None if it
            follows from the above.
        hosts: where to run; empty for where we are.
        nodes: the least and the greatest number of hosts; None for those that are given.
        node: number of this host, where the same command is started on each of them.
        leader: host and port of host 0 in that case.
        leads: this is host 0, or is not, in that case; None to find out by the leader's name.
        run: name of the job, which all hosts must give in that case; "" for a random one.
        env: what kind of place this is; "auto" to find out.
        display: how output is shown and kept.
        grace_s: time that ranks get to end by themselves when the job is stopped.
        instead_of_gloo: give programs that request gloo from torch.distributed our groups.
        restarts: how often to start the job again when a rank fails.
        join_timeout_s: how long to wait for hosts.
        last_call_s: how long to wait for more hosts once there are enough.
        exports: variables for ranks on other hosts: NAME, NAME=VALUE or a pattern.
        folder: working directory of the ranks; None for the present one.
        ssh: what to call in place of ssh, with options.
        iface: which networks hosts use among each other.
        dry_run: print what would be started, and where.
        reporter: prints the launcher's own lines.
        backend: what the program's ``init_process_group()`` without backend takes; "" for the default.
        idle_s: stop the job when no rank has written anything for so long; None: never.
        stdin: the rank that has the launcher's stdin, or "none"; "auto": a single rank, or the master.
        trace: the folder in which all ranks record their calls; None for none.
        stats: print what the calls took, at the end.
        metrics: file for the same in Prometheus' text format; None for none.
        respawns: how often each lost rank of an elastic job is started again.
        spares: how many of an elastic job's hosts run no rank at first: the last ones.
        rehearse: the command line of each job of a rehearsal; empty for an ordinary job.
    """

    nproc: int | None = None
    per_host: int | Literal["auto", "gpu"] | None = None
    hosts: tuple[Slots, ...] = ()
    nodes: tuple[int, int] | None = None
    node: int | None = None
    leader: tuple[str, int | None] | None = None
    leads: bool | None = None
    run: str = ""
    env: str = "auto"
    display: Display = Display()
    grace_s: float = 10.0
    instead_of_gloo: bool = False
    restarts: int = 0
    join_timeout_s: float = 300.0
    last_call_s: float = 10.0
    exports: tuple[str, ...] = ()
    folder: Path | None = None
    ssh: str = ""
    iface: str = ""
    dry_run: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    backend: str = ""
    idle_s: float | None = None
    stdin: int | Literal["auto", "none"] = "auto"
    trace: Path | None = None
    stats: bool = False
    metrics: Path | None = None
    respawns: int = 3
    spares: int = 0
    rehearse: tuple[str, ...] = ()

    def for_ranks(self) -> RankOptions:
        """Those that every agent gets."""
        return RankOptions(**{each.name: getattr(self, each.name) for each in fields(RankOptions)})

    @property
    def environ(self) -> dict[str, str]:
        """The variables that they set for all ranks, wherever these run."""
        asked = {"ALLRANKS_INSTEAD_OF_GLOO": "1"} if self.instead_of_gloo else {}
        if self.backend:
            asked["ALLRANKS_BACKEND"] = self.backend
        if self.trace is not None:  # a rank may change its folder
            asked["ALLRANKS_TRACE"] = os.path.abspath(self.trace)
        return given(self.exports) | asked


def given(wanted: Sequence[str]) -> dict[str, str]:
    """The variables whose value is in ``-x``: NAME=VALUE. Others are in the launcher's environment already."""
    pairs = (word.partition("=") for word in wanted)
    return {name: value for name, given, value in pairs if given}
