"""Workers that the master has started itself, on this host or by ssh on others.

The launcher runs in a thread of this process. Its agents import torch once and fork the workers, print their output
with a prefix, and kill them when this process has terminated. Unlike the ranks of a job, workers terminate
independently of each other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks._base.errors import ConfigError, TimeoutError
from allranks._base.threads import Daemon
from allranks._cluster.hostlist import Slots
from allranks._cluster.schedulers.ssh import SSH
from allranks.launch.call import output_streams
from allranks.launch.jobs.multi_host import MultiHostJob
from allranks.launch.reporter import Reporter
from allranks.launch.spec.events import RestartRank
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import SERVE, Target

__all__ = ["WorkerPool", "describe_end", "read_status"]

# Longer than the 1 s after which a worker exits by itself when its connection is closed (`worker_context`).
_END_S = 1.5
_LOOK_S = 0.01  # seconds between two checks


class WorkerPool:
    """Workers with the ranks 1 to n.

    Args:
        hosts: The hosts, and the number of workers on each.
        environ: Environment variables for the workers.
        threads: The threads of each worker. None: a fair share of the CPUs.
        timeout_s: Time limit for the hosts to connect, in seconds.

    Attributes:
        size: The number of workers.
        trouble: The error that prevented their start.
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
        self._job = MultiHostJob(options, len(hosts), len(hosts), streams=output_streams(), first=1)
        # The calling thread starts the agents, so the workers do not inherit the signals that this thread blocks. A
        # daemon thread, because Python joins other threads before it calls functions registered with atexit.
        self._thread = Daemon(target=self._run, name="allranks-workers")

    def start(self) -> None:
        """Start the workers.

        Raises:
            ConfigError: A host cannot be reached.
        """
        try:
            self._job.start_agents(SSH, self._hosts)
            self._thread.start()
        except BaseException:
            self._job.close()
            raise

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the workers raises it
            self.trouble = error
        finally:
            self._job.close()

    @property
    def ended(self) -> dict[int, int | str]:
        """The workers whose process has ended: exit code, minus the signal number, or the reason of a lost host."""
        return {} if self._job.loop is None else dict(self._job.loop.ended)

    def respawn(self, rank: int, until: float) -> None:
        """Start a new worker for a rank. The old worker is killed if it has not terminated.

        Raises:
            ConfigError: Its host is lost.
            TimeoutError: The host did not start it in time.
        """
        loop = self._job.loop
        assert loop is not None
        before = loop.restarts.get(rank)
        loop.restart(RestartRank(rank, {}))
        # The loop runs in another thread. Its record of the rank's restarts changes when the new process has started.
        while loop.restarts.get(rank) == before:
            if isinstance(lost := self.ended.get(rank), str):
                why = lost.partition("\n")[0].removesuffix(".")
                raise ConfigError(
                    f"respawn: rank {rank} cannot be restarted on its host: {why}.\n  Restart the job on other hosts."
                )
            if time.monotonic() > until:
                raise TimeoutError(
                    f"respawn: the host of rank {rank} did not start a new process in time.\n"
                    "  Check whether the host is overloaded, or its agent is stopped."
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Wait briefly until the workers, which have received a request to exit, have terminated. Kill the rest."""
        if self._thread.ident is None:  # it was never started
            return
        until = time.monotonic() + _END_S
        while self._thread.is_alive() and len(self.ended) < self.size and time.monotonic() < until:
            time.sleep(_LOOK_S)
        while self._thread.is_alive() and self._job.loop is None:
            for host in self._job.pool:  # the job has no loop yet, and its thread waits for them
                if host.process is not None:
                    host.process.terminate()
            time.sleep(_LOOK_S)
        if self._thread.is_alive():
            assert self._job.loop is not None
            self._job.loop.kill()
            self._thread.join()


def read_status(pid: int) -> int | None:
    """Return the exit code, or minus the signal number, of a zombie process of this host. Otherwise return None.

    A process is a zombie until its parent has waited for it. Agents wait for ranks when a job ends. Source: proc(5);
    the exit code is the last field.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="surrogateescape").rpartition(")")[2].split()
    except OSError:  # the process no longer exists
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


def describe_end(status: int | str) -> str:
    """Describe how a process ended."""
    if isinstance(status, str):
        return status
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-status}"
