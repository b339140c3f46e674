"""A job whose ranks run on other hosts, or on several: agents are started or let in, and then rounds are run.

The launcher is where the user is, or the scheduler's script; it forks no ranks itself, and nobody connects to it
but agents that have no pipe to it. The ranks' store is on the host of rank 0: ranks need to reach each other's hosts
anyway, and may not reach this one.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from allranks._errors import ConfigError
from allranks._hostlist import Slots
from allranks._network import published_addresses
from allranks.launch.door import Door
from allranks.launch.fleet import Fleet
from allranks.launch.layout import describe_plan, share_out
from allranks.launch.messages import Prepare, Start
from allranks.launch.options import Options
from allranks.launch.rank import Rank
from allranks.launch.screen import Screen
from allranks.launch.supervise import FORWARDED, Supervisor
from allranks.launch.ways import LIKE_SSH, agent_words, carried, like_ssh, srun_words

__all__ = ["is_here", "join_leader", "lead", "run_there"]


def is_here(name: str) -> bool:
    """Whether a host's name stands for this host."""
    name = name.rpartition("@")[2]
    if name in ("localhost", socket.gethostname(), os.environ.get("SLURMD_NODENAME")):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False  # ssh may know it
    return bool(found & {*published_addresses({}), "127.0.0.1", "127.0.1.1", "::1"})


def run_there(options: Options, hosts: Sequence[Slots], way: str) -> int:
    """Runs a job on these hosts.

    Raises:
        ConfigError: the job cannot be started as asked.
    """
    least, most = options.nodes or (len(hosts), len(hosts))
    if least > len(hosts):
        raise ConfigError(
            f"{least} hosts were asked for (-N), and there are {len(hosts)}: {', '.join(map(str, hosts))}"
        )
    hosts = hosts[:most]
    if not isinstance(options.per_host, str):
        counts = share_out(hosts, options.nproc, options.per_host)
        hosts = [host for host, count in zip(hosts, counts, strict=True) if count]
        words: list[int | str] = [count for count in counts if count]
    else:
        words = ["one rank for each CPU" if options.per_host == "auto" else "one rank for each GPU"] * len(hosts)
    if options.dry_run:
        print(describe_plan([host.name for host in hosts], words, f"by {way}", options.target.words()))
        return 0
    job = _Job(options, [host.count for host in hosts])
    try:
        job.open_by(way, [host.name for host in hosts])
        return job.run()
    finally:
        job.close()


@dataclass
class _Job:
    options: Options
    counts: list[int | None]
    fleet: Fleet = field(default_factory=Fleet)
    secret: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    restart: int = 0
    screen: Screen | None = None

    def open_by(self, way: str, names: Sequence[str]) -> None:
        """Starts agents."""
        options = self.options
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        until = time.monotonic() + options.join_timeout_s
        environ = dict(os.environ)
        if way in LIKE_SSH:
            agent = agent_words(sys.executable, flags)
            needed = {name: environ[name] for name in ("PYTHONPATH",) if name in environ}
            for name in names:
                if is_here(name):
                    self.fleet.start_host(name, "agent", agent, sys.executable, environ)
                else:
                    words = like_ssh(way, name, agent, needed, options.ssh)
                    self.fleet.start_host(name, way, words, sys.executable, environ)
        else:
            door = Door(["0.0.0.0"], 0, self.secret)
            self.fleet.close()
            self.fleet = Fleet(door)
            self.fleet.expect(names, way)
            dialled = f"{','.join(published_addresses())}:{door.port}"
            words = srun_words(names, agent_words(sys.executable, flags, dialled))
            self.fleet.start_crowd(way, words, environ | {"ALLRANKS_SECRET": self.secret.decode()})
        self.fleet.gather(until, self.fleet.greeted)

    def run(self) -> int:
        """Runs rounds until one is the last."""
        options = self.options
        while True:
            supervisor = self._round()
            code = supervisor[0]
            if not supervisor[1].failed or self.restart == options.restarts:
                self.fleet.end(code, supervisor[1].last_words)
                return code
            self.restart += 1
            print(f"allranks run: starting again ({self.restart} of {options.restarts})", file=sys.stderr, flush=True)

    def _round(self) -> tuple[int, Supervisor]:
        options, fleet = self.options, self.fleet
        slots = [Slots(host.name, count) for host, count in zip(fleet, self.counts, strict=True)]
        has = [(host.hello.cpus, host.hello.gpus) for host in fleet if host.hello is not None]
        counts = share_out(slots, options.nproc, options.per_host, has)
        world_size = sum(counts)
        environ = carried(os.environ, options.exports)
        if options.instead_of_gloo:
            environ["ALLRANKS_INSTEAD_OF_GLOO"] = "1"
        prepare = [
            Prepare(
                target=options.target,
                nproc=count,
                start=options.start,
                folder=os.getcwd(),
                environ=environ,
                threads=options.threads,
                secret=self.secret,
                serves=number == 0,
                spans=len(counts) > 1,
                bind=options.bind,
                one_gpu_per_rank=options.one_gpu_per_rank,
            )
            for number, count in enumerate(counts)
        ]
        ready = fleet.prepare(prepare, time.monotonic() + options.join_timeout_s)
        names = [host.name for host, count in zip(fleet, counts, strict=True) for _ in range(count)]
        several = names if len(counts) > 1 else None
        screen = Screen(
            range(world_size), options.display, os.environ, hosts=several, run_id=self.run_id, attempt=self.restart
        )
        stdio = screen.stdio()
        first = 0
        start = []
        for number, count in enumerate(counts):
            start.append(
                Start(
                    first=first,
                    world_size=world_size,
                    node=number,
                    nodes=len(counts),
                    stores=ready[0].stores,
                    port=ready[0].port,
                    run=self.run_id,
                    restart=self.restart,
                    restarts=options.restarts,
                    stdio=stdio[first : first + count],
                )
            )
            first += count
        supervisor = Supervisor(
            fleet, screen, options.grace_s, options.quiet, names, idle_s=options.idle_s, signals=options.signals
        )
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, *options.signals))
        screen.open()
        try:
            fleet.start(start)
            return supervisor.run(mask), supervisor
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            screen.close()

    def close(self) -> None:
        """Ends all agents."""
        self.fleet.close()


def lead(options: Options, nodes: tuple[int, int], name: str, port: int) -> int:
    """Runs a job of which the same command is started on each host, as host 0."""
    raise NotImplementedError


def join_leader(options: Options, node: int, name: str, port: int) -> int | Rank:
    """Takes part in such a job, as another host."""
    raise NotImplementedError
