"""One round on one host, in the order that forking ranks from this process requires.

A job on one host and the agent of each host of a larger job prepare and start their ranks here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Set
from dataclasses import replace

from allranks._base.errors import ConfigError
from allranks._cluster.env import NOTICE_AFTER, WATCH, notice_seconds
from allranks._store import StoreServer
from allranks.launch.ranks.agent import Agent, RankPlan
from allranks.launch.ranks.environ import JobShare, common_environ
from allranks.launch.ranks.guard import Guard
from allranks.launch.ranks.pipes import reserve_descriptors
from allranks.launch.ranks.placement import cpu_places_of
from allranks.launch.ranks.preload import preload
from allranks.launch.ranks.rank import Rank
from allranks.launch.ranks.terminal import Terminal
from allranks.launch.spec.options import RankOptions

__all__ = ["HostRound"]


class HostRound:
    """The ranks of this host in one round, from before the import of torch until they are started.

    The guard is forked while this process is small. The store's socket is bound before ranks are forked, because their
    environment contains its address; the caller starts the store's thread after `start`, because a process with threads
    cannot be forked safely.

    Args:
        ranks: the options of the ranks.
        nproc: the greatest number of ranks that `start` will start.
        open_store: binds the job's store; None if this host does not serve it.
        terminal: the terminal that a rank borrows, or None.

    Attributes:
        server: The job's store; None if this host does not serve it. `close` closes it.
        ranks: The options, whose ``start`` is "spawn" after `preload` if torch cannot be imported.
        cpu_places: The CPUs and the GPU of each rank; empty if they are not bound.

    Raises:
        ConfigError: the host has too few CPUs, GPUs or descriptors for these ranks.
    """

    def __init__(
        self,
        ranks: RankOptions,
        nproc: int,
        *,
        open_store: Callable[[], StoreServer] | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        self.ranks = ranks
        self.nproc = nproc
        self.cpu_places = cpu_places_of(nproc, ranks.bind, ranks.one_gpu_per_rank, os.environ)
        self._descriptor_limits = reserve_descriptors(nproc)
        self.server: StoreServer | None = None
        self._guard: Guard | None = Guard(terminal)
        try:
            self.server = open_store() if open_store is not None else None
        except BaseException:
            self.close()  # the caller has no object that it could close
            raise

    def environ(self, share: JobShare, store: str, master: tuple[str, int]) -> dict[str, str]:
        """Return the environment that the ranks share; see ``common_environ``."""
        environ = common_environ(os.environ, share, self.ranks.threads, store, master, self.cpu_places)
        # A group of torch's own backends reports its waits itself, after the same time as the launcher.
        environ.setdefault(WATCH, "1")
        if self.ranks.notice_s != notice_seconds(os.environ):
            environ[NOTICE_AFTER] = f"{self.ranks.notice_s:g}s"
        return environ

    def preload(self, masters: int) -> None:
        """Import what all ranks need, if they are forked: torch, for example.

        Args:
            masters: the number of these ranks that only control others. They count for no threads, which are decided
                now, because torch's libraries read their number at import.
        """
        target = self.ranks.target
        if self.ranks.start != "fork" or not target.is_python:
            return
        if target.kind == "function":
            # Only for functions: other targets do not need the module.
            importlib.import_module("allranks.launch.ranks.function")
        share = JobShare(self.nproc, self.nproc, masters=masters)
        # A function cannot be started in a fresh interpreter. Its ranks raise the error of the import again.
        if not preload(target, self.environ(share, "", ("", 0))) and target.kind != "function":
            self.ranks = replace(self.ranks, start="spawn")

    def start(self, plan: RankPlan, mask: Set[int]) -> Agent | Rank:
        """Start the ranks. Return in each of the processes, as ``os.fork`` does.

        The caller blocks the signals that it will handle, so that none is lost between the fork and its handlers.

        Args:
            plan: the ranks to start.
            mask: the signal mask for the ranks.

        Returns:
            The agent of the ranks, which now owns the guard; in a forked rank, the rank, whose ``run`` the caller must
            call.

        Raises:
            ConfigError: a process, pipe or terminal could not be created. No rank is left.
        """
        assert self._guard is not None
        agent = Agent(plan, self._guard)
        self._guard = None
        try:
            rank = agent.start(mask, self._descriptor_limits)
        except OSError as error:
            agent.close()
            raise ConfigError(
                f"cannot start {plan.nproc} ranks: {error.strerror}.\n  Check the host with `allranks doctor`."
            ) from error
        return agent if rank is None else rank

    def close(self) -> None:
        """Dismiss the guard, unless an agent owns it, and close the store."""
        guard, server = self._guard, self.server
        # Cleared first, so that an error below does not make a second call close them again.
        self._guard = self.server = None
        if guard is not None:
            guard.dismiss()
        if server is not None:
            server.close()
