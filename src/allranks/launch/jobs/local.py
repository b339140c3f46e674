"""A job on this host, whose ranks are forked from this process.

The store's thread starts after the ranks were forked, and has ended before the next round forks its own.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from collections.abc import Set
from dataclasses import dataclass, replace

from allranks._base.errors import ConfigError
from allranks._elastic.rank_slots import first_table
from allranks._elastic.slot_table import TABLE_KEY
from allranks._store import StoreServer
from allranks.launch.arguments.layout import check_elastic
from allranks.launch.jobs.error_file import write_error_file
from allranks.launch.output.screen import Screen
from allranks.launch.policy.job import (
    AwaitHosts,
    CountHosts,
    EndJob,
    HostsCounted,
    JobRules,
    JobStarted,
    JobState,
    RoundEnded,
    StartRound,
    step,
)
from allranks.launch.policy.round import Rules
from allranks.launch.ranks.agent import Agent, RankPlan
from allranks.launch.ranks.environ import JobShare, free_port
from allranks.launch.ranks.host_round import HostRound
from allranks.launch.ranks.placement import describe
from allranks.launch.ranks.rank import Rank
from allranks.launch.ranks.terminal import Terminal
from allranks.launch.runtime.job_control import SIGNALS, JobControl
from allranks.launch.runtime.loop import FORWARDED, Ports, RoundLoop, RoundSpec, elastic_rules
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import check_size

__all__ = ["run_here"]


def run_here(options: Options, nproc: int) -> int | Rank:
    """Run a job of ``nproc`` ranks.

    Returns:
        The exit code; or, in each of the forked ranks, the rank. The caller must call its ``run``, outside of
        everything that belongs to the launcher.

    Raises:
        ConfigError: the job cannot be started with these options.
    """
    check_size(options.target, nproc)
    check_elastic(options.elastic, nproc)
    masters = int(options.target.mode == "master")
    share = JobShare(
        nproc, nproc, run=options.run or secrets.token_hex(8), restarts=options.restarts, role=options.role
    )
    share = replace(share, elastic=options.elastic is not None)
    job = JobState(JobRules(options.restarts))
    event: JobStarted | RoundEnded | HostsCounted = JobStarted()
    loop: RoundLoop | None = None
    while True:
        action = step(job, event)
        match action:
            case StartRound(restart):
                if restart:
                    options.reporter.report(f"restarting ({restart} of {options.restarts})")
                prepared = _prepare(options, replace(share, restart=restart, masters=masters))
                if isinstance(prepared, Rank):
                    return prepared
                code, loop = prepared.run()
                event = RoundEnded(code, loop.failed)
            case CountHosts() | AwaitHosts():
                event = HostsCounted(1)
            case EndJob(code):
                assert loop is not None
                write_error_file(loop.cause, os.environ, options.reporter)
                return code


@dataclass(frozen=True)
class _Round:
    options: Options
    agent: Agent
    server: StoreServer
    screen: Screen
    control: JobControl
    mask: Set[int]
    restart: int

    def run(self) -> tuple[int, RoundLoop]:
        """Run the round. Return the exit code, and the loop with its results."""
        # ``preload`` disabled collections until the ranks were forked.
        gc.enable()
        self.screen.open()
        options = self.options
        master = 0 if options.target.mode == "master" else None
        rules = Rules(
            options.grace_s,
            idle_s=options.idle_s,
            passed_on=options.signals,
            master=master,
            reader=self.control.reader,
            elastic=elastic_rules(options),
        )
        spec = RoundSpec(rules, options.target.words(), self.restart, table=options.stats, metrics=options.metrics)
        loop = RoundLoop(spec, Ports(self.agent, self.screen, options.reporter, self.control, self.server))
        with self.server:
            self.server.start()  # a thread, so only after the last fork
            try:
                return loop.run(self.mask), loop
            finally:
                self.control.reclaim()
                self.agent.close()
                self.screen.close()


def _prepare(options: Options, share: JobShare) -> _Round | Rank:
    nproc = share.nproc
    reader = _reader(options, nproc)
    terminal = Terminal.of_this_process() if reader is not None else None
    here = HostRound(options.for_ranks(), nproc, open_store=StoreServer.unix, terminal=terminal)
    assert here.server is not None
    screen = Screen(
        range(nproc),
        options.display,
        os.environ,
        run_id=share.run,
        attempt=share.restart,
        stdin=reader,
        terminal=terminal is not None,
        watched=options.idle_s is not None,
    )
    os.environ.update(options.environ)  # torch reads some of them at import, here or in the ranks
    master = ("127.0.0.1", (options.leader[1] if options.leader else None) or free_port())
    environ = here.environ(share, here.server.address, master)
    for line in describe(here.cpu_places):
        options.reporter.detail(line)
    options.reporter.detail(f"the store is at {here.server.address}, OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}")
    here.preload(share.masters)
    if options.start == "fork" and options.target.is_python:
        forked = "with torch imported" if "torch" in sys.modules else "without torch, which the script does not import"
        options.reporter.detail(
            f"ranks are forked {forked}"
            if here.ranks.start == "fork"
            else "ranks are not forked: torch cannot be imported"
        )
    if options.elastic is not None:
        # Before the ranks start, because they read the table.
        here.server.set_locally(TABLE_KEY, first_table(range(nproc), options.elastic[0]).encode())
    # The signals stay blocked until the loop has installed its handlers, so none is lost while the ranks start.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, *options.signals, *SIGNALS))
    plan = RankPlan(nproc, here.ranks, environ, screen.stdio(), cpu_places=here.cpu_places)
    agent = here.start(plan, mask)
    if isinstance(agent, Rank):
        return agent
    return _Round(options, agent, here.server, screen, JobControl(agent, terminal, reader), mask, share.restart)


def _reader(options: Options, nproc: int) -> int | None:
    """Return the rank that has this process's stdin; None if none has.

    Raises:
        ConfigError: the requested rank does not exist.
    """
    if options.stdin == "auto":
        return 0 if nproc == 1 or options.target.mode == "master" else None
    if options.stdin == "none":
        return None
    if options.stdin >= nproc:
        raise ConfigError(f"--stdin {options.stdin}: no such rank; expected 0 to {nproc - 1}, or none")
    return options.stdin
