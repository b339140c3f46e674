"""Workers that a master has started itself: on this host, or by ssh on others.

The launcher does it, in a thread of this process: agents import torch once and fork the workers, show what they write
behind their numbers, and kill them when this process is gone. Unlike a job's ranks, workers die one by one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks._base.errors import ConfigError, TimeoutError
from allranks._cluster.hostlist import Slots
from allranks._cluster.schedulers.ssh import SSH
from allranks.launch.call import output_streams
from allranks.launch.jobs.spread import SpreadJob
from allranks.launch.reporter import Reporter
from allranks.launch.spec.events import RestartRank
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import SERVE, Target

__all__ = ["WorkerPool", "describe_end", "read_status"]

_END_S = 1.5
_LOOK_S = 0.01


class WorkerPool:
    """Some workers, ranks 1 to n.

    Args:
        hosts: where, and how many on each.
        environ: variables for them.
        threads: of each; None for a fair share of the CPUs.
        timeout_s: how long to wait for the hosts.

    Attributes:
        size: how many they are.
        trouble: why they could not be started.
    """

    def __init__(
        self, hosts: Sequence[Slots], environ: Mapping[str, str], threads: int | None, timeout_s: float
    ) -> None:
        self.size = sum(1 if host.count is None else host.count for host in hosts)
        self.trouble: BaseException | None = None
        self._hosts = hosts
        options = Options(
            Target("module", SERVE),
            hosts=tuple(hosts),
            threads=threads,
            exports=tuple(f"{name}={value}" for name, value in environ.items()),
            join_timeout_s=timeout_s,
            reporter=Reporter("init_master_worker", quiet=True),
            signals=(),
        )
        self._job = SpreadJob(options, len(hosts), len(hosts), streams=output_streams(), first=1)
        # A daemon: python joins others before it calls what is registered with atexit.
        self._thread = threading.Thread(target=self._run, name="allranks-workers", daemon=True)

    def start(self) -> None:
        """Starts them.

        Raises:
            ConfigError: a host cannot be reached.
        """
        try:
            self._job.open_by(SSH, self._hosts)
        except BaseException:
            self._job.close()
            raise
        self._thread.start()

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the workers
            self.trouble = error
        finally:
            self._job.close()

    @property
    def ended(self) -> dict[int, int | str]:
        """The workers whose process has ended: its exit code, minus its signal, or why its host was lost."""
        return {} if self._job.loop is None else dict(self._job.loop.ended)

    def respawn(self, rank: int, until: float) -> None:
        """Starts a worker in the place of one, which is killed if it has not ended.

        Raises:
            ConfigError: its host is lost.
            TimeoutError: the host did not do so in time.
        """
        loop = self._job.loop
        assert loop is not None
        before = loop.restarts.get(rank)
        loop.restart(RestartRank(rank, {}))
        while loop.restarts.get(rank) == before:
            if isinstance(lost := self.ended.get(rank), str):
                raise ConfigError(f"respawn: rank {rank} cannot be started again: {lost}")
            if time.monotonic() > until:
                raise TimeoutError(f"respawn: the host of rank {rank} did not start it in time")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Waits a moment for the workers to end, which have been asked to, and kills those that have not."""
        if self._thread.ident is None:
            return
        until = time.monotonic() + _END_S
        while self._thread.is_alive() and len(self.ended) < self.size and time.monotonic() < until:
            time.sleep(_LOOK_S)
        while self._thread.is_alive() and self._job.loop is None:
            for host in self._job.pool:  # which the thread waits for
                if host.process is not None:
                    host.process.terminate()
            time.sleep(_LOOK_S)
        if self._thread.is_alive():
            assert self._job.loop is not None
            self._job.loop.kill()
            self._thread.join()


def read_status(pid: int) -> int | None:
    """The exit code of a process of this host, or minus its signal, until its parent has taken note; else None.

    Agents take note of ranks when a job ends. Source: proc(5), whose last field it is.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it is gone
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


def describe_end(status: int | str) -> str:
    """How a process ended, in words."""
    if isinstance(status, str):
        return status
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"killed by signal {-status}"
