"""One job on this host, from options to exit code: the order in which things must happen.

The guard is forked while this process is small. Threads per rank are decided before torch is imported, as its
libraries read them then. The store's socket is bound before ranks are forked, as they are told its address; its
thread starts after, as a process with threads cannot be forked safely.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from allranks._errors import ConfigError
from allranks._store import StoreServer
from allranks.launch.agent import Agent, Plan
from allranks.launch.environ import Share, common_environ, free_port
from allranks.launch.guard import Guard
from allranks.launch.options import Options
from allranks.launch.preload import preload
from allranks.launch.rank import Rank
from allranks.launch.screen import Screen, ensure_standard_streams
from allranks.launch.supervise import FORWARDED, Supervisor
from allranks.launch.wires import reserve_descriptors

__all__ = ["launch"]


def launch(options: Options) -> int | Rank:
    """Runs a job.

    Returns:
        The exit code; or, in each of the forked ranks, the rank, which the caller must let ``run``, outside of
        everything that belongs to the launcher.

    Raises:
        ConfigError: the job cannot be started as asked.
    """
    try:
        job = _prepare(options)
        return job if isinstance(job, Rank) else job.run()
    except KeyboardInterrupt:  # while nothing has been started
        return 128 + signal.SIGINT


@dataclass(frozen=True)
class _Job:
    options: Options
    agent: Agent
    server: StoreServer
    screen: Screen
    mask: Set[int]

    def run(self) -> int:
        gc.enable()
        self.screen.open()
        supervisor = Supervisor(self.agent, self.screen, self.options.grace_s, self.options.quiet)
        with self.server:
            self.server.start()
            try:
                return supervisor.run(self.mask)
            finally:
                self.agent.close()
                self.screen.close()


def _prepare(options: Options) -> _Job | Rank:
    ensure_standard_streams()
    if options.logs is not None:
        _make_folder(options.logs)
    files = reserve_descriptors(options.nproc)
    guard = Guard()
    server = StoreServer.unix()
    screen = Screen(options.nproc, options.show, options.logs, os.environ)
    if options.instead_of_gloo:
        os.environ["ALLRANKS_INSTEAD_OF_GLOO"] = "1"  # read when torch is imported, here or in the ranks
    share = Share(options.nproc, options.nproc)
    environ = common_environ(os.environ, share, options.threads, server.address, ("127.0.0.1", free_port()))
    start = options.start
    if start == "fork" and options.target.is_python and not preload(environ["OMP_NUM_THREADS"]):
        start = "spawn"
    agent = Agent(Plan(options.nproc, options.target, start, environ, screen.stdio()), guard)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        rank = agent.start(mask, files)
    except OSError as error:
        agent.close()
        raise ConfigError(f"cannot start {options.nproc} ranks: {error.strerror}") from error
    if rank is not None:
        server.close()
        return rank
    return _Job(options, agent, server, screen, mask)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {str(path)!r} for --logs: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into the folder {str(path)!r} for --logs")
