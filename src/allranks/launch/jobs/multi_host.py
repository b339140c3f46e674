"""A job whose ranks run on other hosts, or on several: agents are started or accepted, and then rounds are run.

The launcher runs where the user or the scheduler's script starts it. It forks no ranks itself. Only agents without a
pipe to the launcher connect to it. The ranks' store is on the host of rank 0: ranks must reach each other's hosts
anyway, and may be unable to reach the launcher's host. An elastic job is the exception: its launcher runs the store.
"""

from __future__ import annotations

import contextlib
import math
import os
import pwd
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TextIO

import msgspec

from allranks._base.errors import ConfigError, rank_list
from allranks._cluster.host import usable_cpus, visible_gpus
from allranks._cluster.hostlist import Slots
from allranks._cluster.network import published_addresses
from allranks._cluster.schedulers.interface import PerHost, RemoteCommand
from allranks._cluster.schedulers.ssh import SSH
from allranks._elastic.rank_slots import ElasticRules, first_table
from allranks._elastic.slot_table import TABLE_KEY
from allranks._net.listener import Listener, dial
from allranks._net.secret import load_secret, store_secret
from allranks._store import StoreServer
from allranks._store.address import addresses_of
from allranks.launch.agents.agent_command import HERE, agent_words, exported_environ
from allranks.launch.agents.agent_pool import AgentPool
from allranks.launch.agents.hosts import Host, wrong_version
from allranks.launch.agents.link import LinkLost, to_launcher
from allranks.launch.agents.serve import AgentServer, hello
from allranks.launch.arguments.layout import check_elastic, describe_plan, share_out
from allranks.launch.jobs.error_file import write_error_file
from allranks.launch.output.bar import bar_for
from allranks.launch.output.screen import Screen
from allranks.launch.policy import job as policy
from allranks.launch.policy.root_cause import consequence
from allranks.launch.policy.round import Rules
from allranks.launch.ranks.rank import Rank
from allranks.launch.runtime.loop import FORWARDED, Ports, RoundLoop, RoundSpec, elastic_rules
from allranks.launch.spec.messages import AgentReady, Prepare, StartRanks
from allranks.launch.spec.options import Options
from allranks.launch.spec.stdio import Stdio
from allranks.launch.spec.target import check_size

_REMARK_S = 10.0  # seconds before a remark names the missing hosts
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

__all__ = ["MultiHostJob", "is_this_host", "join_leader", "lead", "run_on_hosts"]


def _name_for_others() -> str:
    """Return a name of this host for other hosts: an address if there is one, because a name may not resolve there."""
    return next(iter(published_addresses()), socket.gethostname())


def is_this_host(name: str) -> bool:
    """Return whether a host's name refers to this host."""
    user, _, name = name.rpartition("@")
    if user and not _is_me(user):
        return False  # ssh changes the user
    if name in ("localhost", socket.gethostname(), os.environ.get("SLURMD_NODENAME")):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False  # ssh may resolve it
    return bool(found & {*published_addresses({}), "127.0.0.1", "127.0.1.1", "::1"})


def _is_me(user: str) -> bool:
    try:
        return pwd.getpwnam(user).pw_uid == os.getuid()
    except KeyError:
        return False


def run_on_hosts(options: Options, hosts: Sequence[Slots], command: RemoteCommand) -> int:
    """Run a job on these hosts.

    Args:
        options: the options of the command line.
        hosts: the hosts; the hosts of the allocation if ``options`` has none.
        command: the command that starts agents on them.

    Raises:
        ConfigError: the job cannot be started with these options.
    """
    least, most = options.nodes or (len(hosts), len(hosts))
    if least > len(hosts):
        raise ConfigError(
            f"-N requests {least} hosts, but the job has {len(hosts)}: {', '.join(map(str, hosts))}.\n"
            "  Decrease -N, or add hosts."
        )
    hosts = hosts[:most]
    hosts, spares = _split(hosts, options.spares)
    if least < len(hosts) and options.nproc is not None:
        fewest = sorted(hosts, key=lambda host: 1 if host.count is None else host.count)[:least]
        try:
            share_out(fewest, options.nproc, options.per_host, strict=bool(options.hosts))
        except ConfigError as error:
            raise ConfigError(
                f"with {least} remaining host{'s' * (least != 1)} (-N): {error}\n  Or set --nproc-per-node."
            ) from None
    if not isinstance(options.per_host, str):
        counts = share_out(hosts, options.nproc, options.per_host, strict=bool(options.hosts))
        if options.elastic is not None:  # a host without ranks is used as a spare
            spares = [*(h for h, count in zip(hosts, counts, strict=True) if not count and h.count != 0), *spares]
            options = replace(options, spares=len(spares))
        hosts = [host for host, count in zip(hosts, counts, strict=True) if count]
        if options.nodes is not None and len(hosts) < least:
            raise ConfigError(
                f"-N requests {least} hosts, but all {sum(counts)} ranks fit on {len(hosts)} of them.\n"
                "  Use --nproc-per-node, or set the number of ranks of each host (-H HOST:N,...)."
            )
        words: list[int | str] = [count for count in counts if count]
    else:
        words = ["one rank for each CPU" if options.per_host == "auto" else "one rank for each GPU"] * len(hosts)
    hosts, words = [*hosts, *spares], [*words, *(0 for _ in spares)]
    if options.dry_run:
        print(describe_plan([host.name for host in hosts], words, f"by {command.name}", options.target.words()))
        return 0
    job = MultiHostJob(options, least if options.nodes is not None else len(hosts), len(hosts))
    try:
        job.start_agents(command, hosts)
        return job.run()
    finally:
        job.close()


def _split(hosts: Sequence[Slots], spares: int) -> tuple[Sequence[Slots], Sequence[Slots]]:
    """Split the hosts into those that run ranks and the spare hosts.

    Raises:
        ConfigError: no host would run ranks.
    """
    if spares >= len(hosts):
        raise ConfigError(
            f"--spares {spares}: no host is left for ranks, because the job has {len(hosts)} hosts.\n"
            "  Reduce --spares, or add hosts."
        )
    return hosts[: len(hosts) - spares], hosts[len(hosts) - spares :]


def lead(options: Options, nodes: tuple[int, int], name: str, ports: Sequence[int], secret: bytes) -> int:
    """Run a job as host 0, if the same command is started on each host.

    Args:
        options: the options of this host's command line. Each host has its own target.
        nodes: the least and the greatest number of hosts.
        name: the name of this host for other hosts; "" for any address that reaches it.
        ports: ports to try. The first free port is used.
        secret: the secret that the hosts must prove.

    Raises:
        ConfigError: the job cannot be started with these options.
        OSError: no port is free.
    """
    listener = _open_listener(addresses_of(name), ports, secret)
    job = MultiHostJob(
        options, *nodes, listener, name if options.leader is not None and is_this_host(name) else "", key=secret
    )
    try:
        with job.reporting_errors():
            job.accept_hosts()
            return job.run()
    finally:
        job.close()


def join_leader(options: Options, node: int | None, targets: Sequence[tuple[str, int]], secret: bytes) -> int | Rank:
    """Join such a job as another host. Return the same as ``launch``.

    Args:
        options: the options of this host's command line.
        node: number of this host; None if host 0 may choose it.
        targets: candidate addresses of the leader.
        secret: the secret that the hosts must prove.

    Raises:
        ConfigError: the leader is not found, or refuses this host.
    """
    where = ", ".join(f"{host}:{port}" for host, port in targets)

    # Without an address, hosts search for host 0 on themselves.
    only_loopback = all(host in _LOOPBACK for host, _ in targets)
    hint = (
        "\n  This is the address of this host. If host 0 is another host, pass --master-addr." if only_loopback else ""
    )

    def remark(last: str) -> None:
        options.reporter.remark(f"waiting for host 0 at {where} (last error: {last}){hint}")

    try:
        sock = dial(targets, secret, time.monotonic() + options.join_timeout_s, remark)
    except ConfigError as error:
        raise ConfigError(f"{error}{hint}") from None
    descriptor = sock.detach()
    own = _prepare_of(options, 1, options.leader[0] if options.leader is not None else "")

    def show(start: StartRanks) -> Screen:
        shown_ranks = range(start.first, start.first + start.count)
        return Screen(
            shown_ranks,
            options.display,
            os.environ,
            world_size=start.world_size,
            hosts=[socket.gethostname()] * start.world_size,
            run_id=start.run,
            attempt=start.restart,
        )

    try:
        last = AgentServer(to_launcher(descriptor, descriptor), secret, own, show, options.reporter).run(
            hello(node, _own_slots(options), options.run, options.role, count_gpus=options.per_host == "gpu")
        )
    except LinkLost:
        raise ConfigError(
            f"lost the connection to host 0 ({where}); the ranks on this host were stopped.\n"
            "  Check the end of the launcher's output on host 0."
        ) from None
    if isinstance(last, Rank):
        return last
    if last.text:
        os.write(2, last.text + b"\n")
    return last.code


@dataclass
class MultiHostJob:
    """A job, with all its rounds.

    Attributes:
        options: the requested options.
        least: the number of hosts that it needs to run.
        most: the greatest number of hosts that take part.
        streams: replacements for this process's stdout and stderr.
        first: number of the first rank. If it is 1, the caller is rank 0: the ranks connect to the address that it gave
            them, they may fail one by one, and the caller ends the job.
        until: time when the job is stopped if it still runs (``time.monotonic``).
        world_size: number of ranks in the last round.
        loop: loop of the last round; None before it.
        progress: show the progress of the ranks.
    """

    options: Options
    least: int
    most: int
    listener: InitVar[Listener | None] = None  # other hosts connect to it
    pool: AgentPool = field(init=False)
    master: str = ""  # the user's name for host 0
    key: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())  # agents that connect prove it
    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    run_id: str = field(init=False)
    restart: int = 0
    port: int = 0
    streams: tuple[TextIO | None, TextIO | None] | None = None
    first: int = 0
    until: float | None = None
    world_size: int = 0
    loop: RoundLoop | None = None
    progress: bool = False
    _reported: set[Host] = field(default_factory=set, init=False)

    def __post_init__(self, listener: Listener | None) -> None:
        self.pool = self._new_pool(listener)
        self.run_id = self.options.run or secrets.token_hex(8)

    def _new_pool(self, listener: Listener | None) -> AgentPool:
        has_master, elastic = self.options.target.mode == "master", self.options.elastic is not None
        return AgentPool(self.options.reporter, listener, has_master=has_master, elastic=elastic)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Send the agents the reason if the job ends by an exception."""
        try:
            yield
        except ConfigError as error:
            self.pool.end(2, self.options.reporter.line(f"error: {error}").encode())
            raise
        except KeyboardInterrupt:
            self.pool.end(128 + signal.SIGINT, self.options.reporter.line("stopped by SIGINT").encode())
            raise

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    @property
    def rules(self) -> policy.JobRules:
        replaces = self.options.elastic is not None
        # Without a range of hosts, ``least`` includes the spare hosts.
        least = self.least - self.options.spares if replaces and not self.elastic else self.least
        return policy.JobRules(self.options.restarts, least, self.elastic, replaces)

    def start_agents(self, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Start agents on these hosts."""
        options = self.options
        until = time.monotonic() + options.join_timeout_s
        if command.per_host is not None:
            self._start_each(command.per_host, command, hosts)
        else:
            self._start_all(command, hosts)
        for place, (there, slots) in enumerate(zip(self.pool, hosts, strict=True)):
            there.place, there.slots = place, slots.count

        def enough() -> bool:
            self._report_new_hosts()
            for host in [host for host in self.pool if host.why] if self.elastic else []:
                self._drop(host)
            return self.pool.all_identified()

        self.pool.gather(until, enough)

    def _start_each(self, words_for: PerHost, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Start a process for each host, whose pipes connect this process with its agent."""
        options, environ = self.options, dict(os.environ)
        agent = self._agent_words()
        # The agent needs it to import allranks. Other variables follow in ``Prepare``.
        needed = [f"{name}={environ[name]}" for name in ("PYTHONPATH",) if name in environ]
        for host in hosts:
            if is_this_host(host.name):
                options.reporter.detail(f"{host.name} is this host")
                self.pool.start_host(host.name, HERE, agent, sys.executable, environ)
            else:
                words = words_for(host.name, ["env", *needed, *agent] if needed else agent, options.ssh)
                words = self._elastic_command(words, command)
                options.reporter.detail(f"starting {shlex.join(words)}")
                self.pool.start_host(host.name, command, words, sys.executable, command.environ(environ))

    def _start_all(self, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Start commands that start agents on all hosts. The agents connect to this process."""
        # the command does not transfer a job secret, so all hosts use this user's secret
        if not command.carries_environ:
            self.key = load_secret()
        listener = _open_listener(["0.0.0.0"], [0], self.key)
        self.pool.close()
        self.pool = self._new_pool(listener)
        self.pool.add_expected([host.name for host in hosts], command)
        agent = self._agent_words(f"{','.join(published_addresses())}:{listener.port}")
        environ = command.environ({**os.environ, "ALLRANKS_SECRET": self.key.decode()})
        assert command.for_all is not None
        for words in command.for_all(hosts, agent):
            words = self._elastic_command(words, command)
            self.options.reporter.detail(f"starting {shlex.join(words)}")
            self.pool.start_shared(command, words, environ)

    def _elastic_command(self, words: list[str], command: RemoteCommand) -> list[str]:
        """Return the command with the options of an elastic job; unchanged if the user has replaced the program."""
        if self.options.elastic is None or os.path.basename(words[0]) != command.name:
            return words
        # the user's options precede, and take precedence
        own = len(shlex.split(self.options.ssh)) if command is SSH else 0
        return [*words[: own or 1], *command.outlives, *words[own or 1 :]]

    def _agent_words(self, dial: str = "") -> list[str]:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return agent_words(sys.executable, flags, dial, count_gpus=self.options.per_host == "gpu")

    def _drop(self, host: Host) -> None:
        """Continue without a lost host, if enough hosts are left."""
        if self.rules.may_go_on_without(1, len(self.pool.hosts)):
            self.options.reporter.report(consequence(host.why, "continuing without it"))
            self.pool.drop(host, try_again=True)

    def accept_hosts(self) -> None:
        """Start an agent here, and wait for the agents of the other hosts."""
        options, pool = self.options, self.pool
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        agent = agent_words(sys.executable, flags, count_gpus=options.per_host == "gpu")
        own = pool.start_host("this host", HERE, agent, sys.executable, os.environ)
        own.slots = _own_slots(options)
        until = time.monotonic() + options.join_timeout_s
        remark_at = time.monotonic() + _REMARK_S
        last_call = math.inf

        def enough() -> bool:
            nonlocal remark_at, last_call
            self.admit_callers()
            if own.hello is not None:
                own.name = own.hello.host
            self._report_new_hosts()
            missing = self.most - len(pool.hosts)
            now = time.monotonic()
            if len(pool.hosts) >= self.least:
                # Set once, when enough hosts have joined; later hosts do not extend it.
                last_call = min(last_call, now + options.last_call_s)
            if missing and now >= remark_at:
                remark_at = math.inf  # only one remark
                options.reporter.remark(f"waiting for {self._missing()}")
            return pool.all_identified() and (not missing or now >= last_call)

        pool.gather(
            until,
            enough,
            lambda: f"no answer in time from {self._missing()}\n  To wait longer, use --join-timeout.",
        )
        if not (self.elastic or options.elastic is not None):
            self.port = pool.close_listener()  # so that a program that uses torch.distributed finds it free

    def _report_new_hosts(self) -> None:
        for host in self.pool:
            if (hello := host.hello) is not None and host not in self._reported:
                self._reported.add(host)
                gpus = "" if hello.gpus is None else f", {hello.gpus} GPUs"
                self.options.reporter.detail(f"{host.name} connected: python {hello.python}, {hello.cpus} CPUs{gpus}")

    def _missing(self) -> str:
        """Describe the missing hosts, the address that they must reach, and the command to start there."""
        here = {host.place for host in self.pool}
        numbers = [number for number in range(self.most) if number not in here]
        missing_hosts = f"{'host' if len(numbers) == 1 else 'hosts'} {', '.join(map(str, numbers))}"
        name = self.master or (self.options.leader[0] if self.options.leader else "") or socket.gethostname()
        port = self.pool.listener_port
        words = f"{missing_hosts} (of hosts 0 to {self.most - 1}; this is host 0, which listens on {name}:{port})"
        if refused := self.pool.refusals():
            words += f" {refused}"
        if self.options.leader and name and not is_this_host(name):
            words += f"; {name} is not a name of this host, so this may not be host 0"
        if self.elastic and len(here) >= self.least:
            words += f"; the job starts without the missing hosts within {self.options.last_call_s:g} s"
        elif name in _LOOPBACK:
            words += (
                f".\n  Start the same command here with --node-rank {numbers[0]}.\n  No other host can reach {name}. To"
                f" use another host, start all with the address of this host (--master-addr {_name_for_others()})."
            )
        else:
            words += (
                f".\n  Start the same command there with --node-rank {numbers[0]} --master-addr {name}"
                f" --master-port {port}."
            )
        return words

    def admit_callers(self) -> None:
        """Admit agents that have connected, as long as the job needs hosts."""
        pool = self.pool
        for caller in pool.callers:
            if why := self._check_caller(caller):
                pool.refuse_caller(caller, why)
                continue
            assert caller.hello is not None
            caller.place = self._place_for(caller)
            if caller.process is None:
                caller.slots = caller.hello.nproc
            pool.admit(caller)

    @property
    def _taken(self) -> set[int]:
        """The places of the available hosts in the order of hosts."""
        return {host.place for host in self.pool if not host.why}

    def _admit_caller(self, caller: Host) -> Prepare:
        """Admit a host to a round that continues without it. Return what it must prepare."""
        assert caller.hello is not None
        lost = [len(host.ranks) for host in self.pool if host.name == caller.name]
        caller.place = self._place_for(caller)
        if caller.process is None:
            caller.slots = caller.hello.nproc
        self.pool.admit(caller)
        # A host that returns needs room for the ranks that it has lost.
        count = max([1 if caller.slots is None else caller.slots, *lost])
        return self._prepare_for(caller, count, self.master if 0 in self._taken else "", spans=True)

    def _place_for(self, caller: Host) -> int:
        """Return its place in the order of hosts; one after the last if there is no place for it."""
        assert caller.hello is not None
        taken_places = self._taken
        place = caller.hello.node if caller.process is None else caller.place
        if place is None or (place in taken_places and self.elastic):
            place = next((place for place in range(self.most) if place not in taken_places), self.most)
        return place

    def _check_caller(self, caller: Host) -> str:
        """Return why a caller cannot take part; "" if it can."""
        assert caller.hello is not None
        if caller.process is None and caller.hello.run != self.options.run:
            return _other_job(self.options.run, caller.hello.run)
        if trouble := wrong_version(caller):
            return trouble
        place = self._place_for(caller)
        if place in self._taken:
            return f"the job already has a host {place} (--node-rank).\n  Use a different --node-rank on each host."
        return "" if place < self.most else f"the job already has its {self.most} hosts.\n  Increase -N to add hosts."

    def run(self) -> int:
        """Run rounds until the last one."""
        options, pool = self.options, self.pool
        state = policy.JobState(self.rules)
        event: policy.Event = policy.JobStarted()
        while True:
            match policy.step(state, event):
                case policy.StartRound(restart, left):
                    self.restart = restart
                    if restart:
                        names = ", ".join(host.name for host in pool)
                        how_often = f" ({left} of {options.restarts} restarts left)" if options.restarts else ""
                        options.reporter.report(f"restarting on {names}{how_often}")
                    event = self._round()
                case policy.CountHosts():
                    self.admit_callers()
                    event = policy.HostsCounted(len(pool.hosts), pool.may_grow)
                case policy.AwaitHosts(count):
                    event = self._await_hosts(count)
                case policy.EndJob(code):
                    assert self.loop is not None
                    pool.end(code, self.loop.summary)
                    write_error_file(self.loop.cause, os.environ, options.reporter)
                    return code

    def _await_hosts(self, count: int) -> policy.Event:
        """Wait for hosts to join, or to return, if too few are left."""
        pool, least = self.pool, self.rules.least
        self.options.reporter.report(f"{count} of at least {least} hosts are left; waiting for other hosts")

        def enough() -> bool:
            pool.retry_lost()
            self.admit_callers()
            return len(pool.hosts) >= least

        try:
            pool.gather(time.monotonic() + self.options.join_timeout_s, enough)
        except ConfigError as error:
            self.options.reporter.report(str(error))
            return policy.HostsMissing()
        return policy.HostsCounted(len(pool.hosts))

    def _prepare(self) -> tuple[list[int], list[AgentReady]]:
        """Prepare all hosts. Continue without the hosts that fail, if this is allowed."""
        while True:
            try:
                return self._prepare_all()
            except ConfigError:
                pool = self.pool
                unable, lost = pool.unable(), [host for host in pool if host.why]
                if not self.rules.may_go_on_without(len(unable) + len(lost), len(pool.hosts)):
                    raise
                for host, why in unable.items():  # it would fail the next time, too
                    self.options.reporter.report(consequence(f"{host.name}: {why}", "continuing without it"))
                    pool.refuse_caller(host, why)
                for host in lost:
                    self._drop(host)

    def _prepare_all(self) -> tuple[list[int], list[AgentReady]]:
        options, pool = self.options, self.pool
        counts, elastic = self._counts(), options.elastic is not None
        check_size(options.target, self.first + sum(counts))
        check_elastic(options.elastic, sum(counts))
        master = self.master if pool.hosts[0].place == 0 else ""  # if host 0 is lost, another host runs rank 0
        spans = len(counts) > 1 or elastic
        # A spare host may receive the ranks of any other host, so it prepares for the largest number.
        prepare = [
            self._prepare_for(
                host, count or max(counts), master, serves=number == self.first == 0 and not elastic, spans=spans
            )
            for number, (host, count) in enumerate(zip(pool, counts, strict=True))
        ]
        until = time.monotonic() + options.join_timeout_s
        return counts, pool.prepare(prepare, until if self.until is None else min(until, self.until))

    def _prepare_for(self, host: Host, nproc: int, master: str, *, serves: bool = False, spans: bool) -> Prepare:
        # the secret is not sent over plain TCP
        secret = store_secret(self.key, self.salt) if host.process is not None else b""
        made = _prepare_of(self.options, nproc, master)
        return msgspec.structs.replace(made, secret=secret, salt=self.salt, serves=serves, spans=spans)

    def _round(self) -> policy.RoundEnded:
        options, pool = self.options, self.pool
        counts, ready = self._prepare()
        self.world_size = world_size = self.first + sum(counts)
        names = [host.name for host, count in zip(pool, counts, strict=True) for _ in range(count)]
        names[:0] = [socket.gethostname()] * self.first
        # If the same command was started on each host, each host shows its own ranks.
        shown = range(self.first, counts[0] if pool.hosts_connect else world_size)
        screen = Screen(
            shown,
            options.display,
            os.environ,
            world_size=world_size,
            hosts=names if len(counts) > 1 or self.elastic else None,
            run_id=self.run_id,
            attempt=self.restart,
            streams=self.streams,
        )
        server = self._open_store() if options.elastic is not None else None
        start = self._start_commands(counts, ready[0], screen.stdio(), server)
        rules = Rules(
            options.grace_s,
            names,
            options.idle_s,
            self.until,
            options.signals,
            master=-1 if self.first else 0 if options.target.mode == "master" else None,
            elastic=self._elastic_rules(counts),
        )
        spec = RoundSpec(
            rules,
            options.target.words(),
            self.restart,
            # the failure of a function raises in the caller
            prints=options.target.kind != "function" and not self.first,
            table=options.stats,
            metrics=options.metrics,
        )
        bar = bar_for(screen, options.target.name, world_size, self.streams) if self.progress else None
        loop = RoundLoop(spec, Ports(pool, screen, options.reporter, store=server, bar=bar))
        self.loop = loop
        options.reporter.detail(f"the store is at {', '.join(start[0].stores) or 'a unix socket there'}")
        for host, command in zip(pool, start, strict=True):
            ranks = rank_list(range(command.first, command.first + command.count))
            options.reporter.detail(f"{host.name} starts {ranks}" if command.count else f"{host.name} is a spare host")
        # The signals stay blocked until the loop has installed its handlers, so none is lost while the ranks start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, *options.signals))
        screen.open()
        self._report_callers()
        try:
            if server is not None:
                server.start()
            pool.start(start)
            code = loop.run(mask)
        finally:
            # Between rounds, ``admit_callers`` admits hosts that connect.
            pool.report_callers(None)
            # If the loop did not start, the signals are still blocked.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            screen.close()
            if server is not None:
                server.close()
        lost = [host for host in pool if host.why]
        for host in lost:
            pool.drop(host, try_again=self.elastic or options.elastic is not None)
        return policy.RoundEnded(code, loop.failed, loop.joined, len(lost))

    def _elastic_rules(self, counts: Sequence[int]) -> ElasticRules | None:
        spares = [host.name for host, count in zip(self.pool, counts, strict=True) if not count]
        return elastic_rules(self.options, spares, None if self.pool.hosts_connect else sum(counts))

    def _report_callers(self) -> None:
        """Decide what happens to hosts that connect in a round: they join it, restart all ranks, or must wait."""
        if self.options.elastic is not None:
            self.pool.report_callers(self._check_caller, self._admit_caller)
        elif self.elastic and len(self.pool.hosts) < self.most:
            self.pool.report_callers(self._check_caller)

    def _open_store(self) -> StoreServer:
        """Open the store of an elastic job, which survives the loss of every host except this one."""
        least = self.options.elastic[0] if self.options.elastic is not None else 0
        server = StoreServer.tcp("", 0, store_secret(self.key, self.salt))
        server.set_locally(TABLE_KEY, first_table(range(self.world_size), least).encode())
        return server

    def _start_commands(
        self, counts: Sequence[int], ready: AgentReady, stdio: tuple[Stdio, ...], server: StoreServer | None
    ) -> list[StartRanks]:
        """Return the command for each host.

        Args:
            counts: the number of ranks of each host.
            ready: the reply of the host of rank 0.
            stdio: the standard streams of the ranks that are shown here.
            server: the job's store, if it is in this process.
        """
        stores = ready.stores if server is None else server.published() or (server.here,)
        firsts = [self.first + sum(counts[:number]) for number in range(len(counts))]
        roles = [(host.hello.role if host.hello is not None else "") or self.options.role for host in self.pool]
        return [
            StartRanks(
                first=first,
                count=count,
                world_size=self.world_size,
                node=number,
                nodes=sum(map(bool, counts)),
                stores=stores,
                port=self.port or ready.port,
                run=self.run_id,
                restart=self.restart,
                restarts=self.options.restarts,
                role_first=sum(c for c, r in zip(counts[:number], roles, strict=False) if r == roles[number]),
                role_size=sum(c for c, r in zip(counts, roles, strict=True) if r == roles[number]),
                stdio=stdio[first - self.first :][:count],
                leader=ready.addresses,
            )
            for number, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]

    def _counts(self) -> list[int]:
        """Return the number of ranks of each host in this round."""
        slots, spares = _split([Slots(host.name, host.slots) for host in self.pool], self._spares)
        return [*self._counts_of(slots), *(0 for _ in spares)]

    @property
    def _spares(self) -> int:
        """Number of spare hosts in this round: the hosts beyond those that must run ranks."""
        return max(0, self.options.spares - (self.most - len(self.pool.hosts)))

    def _counts_of(self, slots: Sequence[Slots]) -> list[int]:
        options, pool = self.options, self.pool
        if pool.hosts_connect and options.nproc is None:  # each host's own command line has the number
            return [1 if slot.count is None else slot.count for slot in slots]
        has = [(host.hello.cpus, host.hello.gpus or 0) for host in pool if host.hello is not None][: len(slots)]
        counts = share_out(slots, options.nproc, options.per_host, has, strict=bool(options.hosts))
        if not all(counts):  # hosts were requested by number
            raise ConfigError(
                f"-n {options.nproc} leaves some of the {len(counts)} hosts without ranks.\n"
                "  Increase -n, the number of all ranks, or set the number on each host with --nproc-per-node."
            )
        return counts

    def close(self) -> None:
        """Stop all agents."""
        self.pool.close()


def _prepare_of(options: Options, nproc: int, master: str) -> Prepare:
    return Prepare(
        ranks=options.for_ranks(),
        nproc=nproc,
        folder=os.getcwd(),
        environ=exported_environ(os.environ, options.exports) | options.environ,
        secret=b"",
        salt="",
        serves=False,
        spans=False,
        master=master,
    )


def _other_job(own_name: str, other_name: str) -> str:
    names = [repr(name) if name else "a job without a name" for name in (own_name, other_name)]
    return (
        f"host 0 runs {names[0]}, but this host requests {names[1]} (--rdzv-id).\n"
        "  Use a separate port for each job (--master-port)."
    )


def _own_slots(options: Options) -> int | None:
    if isinstance(options.per_host, str):
        return usable_cpus() if options.per_host == "auto" else len(visible_gpus(os.environ))
    return options.per_host


def _open_listener(addresses: Sequence[str], ports: Sequence[int], secret: bytes) -> Listener:
    trouble: OSError | None = None
    for port in ports:
        try:
            return Listener(addresses, port, secret)
        except OSError as error:
            trouble = error
    assert trouble is not None
    raise trouble
