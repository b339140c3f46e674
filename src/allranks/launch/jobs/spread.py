"""A job whose ranks run on other hosts, or on several: agents are started or let in, and then rounds are run.

The launcher is where the user is, or the scheduler's script; it forks no ranks itself, and nobody connects to it
but agents that have no pipe to it. The ranks' store is on the host of rank 0: ranks need to reach each other's hosts
anyway, and may not reach this one.
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
from dataclasses import InitVar, dataclass, field
from typing import TextIO

import msgspec

from allranks._base.errors import ConfigError, rank_list
from allranks._cluster.host import usable_cpus, visible_gpus
from allranks._cluster.hostlist import Slots
from allranks._cluster.network import published_addresses
from allranks._cluster.schedulers.interface import PerHost, RemoteCommand
from allranks._store import load_secret
from allranks._store.address import addresses_of
from allranks.launch.agents.agent_command import HERE, agent_words, carried
from allranks.launch.agents.door import Door, dial, store_secret
from allranks.launch.agents.fleet import Fleet, Host, wrong_version
from allranks.launch.agents.link import LinkLost, to_launcher
from allranks.launch.agents.serve import Station, hello
from allranks.launch.arguments.layout import describe_plan, share_out
from allranks.launch.jobs.error_file import write_error_file
from allranks.launch.jobs.supervise import FORWARDED, Supervisor
from allranks.launch.output.screen import Screen
from allranks.launch.ranks.rank import Rank
from allranks.launch.spec.messages import Prepare, Ready, Start
from allranks.launch.spec.options import Options
from allranks.launch.spec.target import check_size

_TELL_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

__all__ = ["Job", "is_here", "join_leader", "lead", "run_there"]


def _name_for_others() -> str:
    """What other hosts may call this one: an address where there is one, as a name may not resolve there."""
    return next(iter(published_addresses()), socket.gethostname())


def is_here(name: str) -> bool:
    """Whether a host's name stands for this host."""
    user, _, name = name.rpartition("@")
    if user and not _is_me(user):
        return False  # ssh makes us somebody else
    if name in ("localhost", socket.gethostname(), os.environ.get("SLURMD_NODENAME")):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False  # ssh may know it
    return bool(found & {*published_addresses({}), "127.0.0.1", "127.0.1.1", "::1"})


def _is_me(user: str) -> bool:
    try:
        return pwd.getpwnam(user).pw_uid == os.getuid()
    except KeyError:
        return False


def run_there(options: Options, hosts: Sequence[Slots], command: RemoteCommand) -> int:
    """Runs a job on these hosts.

    Args:
        options: what the command line says.
        hosts: the hosts; those of an allocation where ``options`` has none.
        command: how they are reached.

    Raises:
        ConfigError: the job cannot be started as asked.
    """
    least, most = options.nodes or (len(hosts), len(hosts))
    if least > len(hosts):
        raise ConfigError(
            f"{least} hosts were asked for (-N), and there are {len(hosts)}: {', '.join(map(str, hosts))}"
        )
    hosts = hosts[:most]
    if least < len(hosts) and options.nproc is not None:
        fewest = sorted(hosts, key=lambda host: 1 if host.count is None else host.count)[:least]
        try:
            share_out(fewest, options.nproc, options.per_host, strict=bool(options.hosts))
        except ConfigError as error:
            raise ConfigError(
                f"with {least} host{'s' * (least != 1)} left (-N), {error}; on each host: --nproc-per-node"
            ) from None
    if not isinstance(options.per_host, str):
        counts = share_out(hosts, options.nproc, options.per_host, strict=bool(options.hosts))
        hosts = [host for host, count in zip(hosts, counts, strict=True) if count]
        if options.nodes is not None and len(hosts) < least:
            raise ConfigError(
                f"{least} hosts were asked for (-N), and {len(hosts)} of them can take all {sum(counts)} ranks:"
                " say --nproc-per-node, or how many each host takes (-H HOST:N,...)"
            )
        words: list[int | str] = [count for count in counts if count]
    else:
        words = ["one rank for each CPU" if options.per_host == "auto" else "one rank for each GPU"] * len(hosts)
    if options.dry_run:
        print(describe_plan([host.name for host in hosts], words, f"by {command.name}", options.target.words()))
        return 0
    job = Job(options, least, len(hosts))
    try:
        job.open_by(command, hosts)
        return job.run()
    finally:
        job.close()


def lead(options: Options, nodes: tuple[int, int], name: str, ports: Sequence[int], secret: bytes) -> int:
    """Runs a job of which the same command is started on each host, as host 0.

    Args:
        options: what this host's command line says; the target is each host's own.
        nodes: the least and the greatest number of hosts.
        name: what other hosts call this one; "" for whatever reaches it.
        ports: where to listen: the first that is free.
        secret: what the hosts must know.

    Raises:
        ConfigError: the job cannot be started as asked.
        OSError: no port is free.
    """
    door = _open_door(addresses_of(name), ports, secret)
    job = Job(options, *nodes, door, name if options.leader is not None and is_here(name) else "", key=secret)
    try:
        with job.told():
            job.open_to_callers()
            return job.run()
    finally:
        job.close()


def join_leader(options: Options, node: int | None, targets: Sequence[tuple[str, int]], secret: bytes) -> int | Rank:
    """Takes part in such a job, as another host. Returns as ``launch`` does.

    Args:
        options: what this host's command line says.
        node: its number; None if whoever leads may say.
        targets: where the leader may be.
        secret: what the hosts must know.

    Raises:
        ConfigError: the leader is not found, or does not want this host.
    """
    where = ", ".join(f"{host}:{port}" for host, port in targets)

    # Told nothing else, hosts look for host 0 on themselves.
    alone = all(host in _LOOPBACK for host, _ in targets)
    hint = "\n  That is this host itself; if host 0 is another, name it: --master-addr" if alone else ""

    def tell(last: str) -> None:
        options.voice.remark(f"waiting for host 0 at {where} (last: {last}){hint}")

    try:
        sock = dial(targets, secret, time.monotonic() + options.join_timeout_s, tell)
    except ConfigError as error:
        raise ConfigError(f"{error}{hint}") from None
    descriptor = sock.detach()
    own = _prepare_of(options, 1, options.leader[0] if options.leader is not None else "")

    def show(start: Start) -> Screen:
        mine = range(start.first, start.first + start.count)
        return Screen(
            mine,
            options.display,
            os.environ,
            world_size=start.world_size,
            hosts=[socket.gethostname()] * start.world_size,
            run_id=start.run,
            attempt=start.restart,
        )

    try:
        last = Station(to_launcher(descriptor, descriptor), secret, own, show, options.voice).run(
            hello(node, _own_slots(options), options.run, options.role, count_gpus=options.per_host == "gpu")
        )
    except LinkLost:
        raise ConfigError(f"host 0 ({where}) is gone; the ranks on this host were stopped") from None
    if isinstance(last, Rank):
        return last
    if last.text:
        os.write(2, last.text + b"\n")
    return last.code


@dataclass
class Job:
    """A job, through all its rounds.

    Attributes:
        options: what was asked for.
        least: the number of hosts without which it does not run.
        most: how many take part.
        streams: what takes the place of this process's stdout and stderr.
        first: number of the first rank. Where that is 1, the caller is rank 0: the ranks meet by what it has told
            them, they may die one by one, and it says when the job is over.
        until: when it is stopped if it still runs (``time.monotonic``).
        world_size: how many ranks the last round had.
        supervisor: of the last round; None before it.
    """

    options: Options
    least: int
    most: int
    door: InitVar[Door | None] = None  # where other hosts come in by themselves
    fleet: Fleet = field(init=False)
    master: str = ""  # what the user calls host 0
    key: bytes = field(default_factory=lambda: secrets.token_hex(32).encode())  # proved by agents that dial
    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    run_id: str = field(init=False)
    restart: int = 0
    port: int = 0
    streams: tuple[TextIO | None, TextIO | None] | None = None
    first: int = 0
    until: float | None = None
    world_size: int = 0
    supervisor: Supervisor | None = None
    _told: set[Host] = field(default_factory=set, init=False)

    def __post_init__(self, door: Door | None) -> None:
        self.fleet = self._new_fleet(door)
        self.run_id = self.options.run or secrets.token_hex(8)

    def _new_fleet(self, door: Door | None) -> Fleet:
        return Fleet(self.options.voice, door, has_master=self.options.target.mode == "master")

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tells those who dialled in why it ends, where it ends by an exception."""
        try:
            yield
        except ConfigError as error:
            self.fleet.end(2, self.options.voice.line(f"error: {error}").encode())
            raise
        except KeyboardInterrupt:
            self.fleet.end(128 + signal.SIGINT, self.options.voice.line("stopped by SIGINT").encode())
            raise

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    def open_by(self, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Starts agents on these hosts."""
        options = self.options
        until = time.monotonic() + options.join_timeout_s
        if command.per_host is not None:
            self._start_each(command.per_host, command, hosts)
        else:
            self._start_all(command, hosts)
        for place, (there, slots) in enumerate(zip(self.fleet, hosts, strict=True)):
            there.place, there.slots = place, slots.count

        def enough() -> bool:
            self._tell_who_has_come()
            for host in [host for host in self.fleet if host.why] if self.elastic else []:
                self._drop(host)
            return self.fleet.greeted()

        self.fleet.gather(until, enough)

    def _start_each(self, words_for: PerHost, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Starts a process for each host, whose pipes connect us with its agent."""
        options, environ = self.options, dict(os.environ)
        agent = self._agent_words()
        needed = [f"{name}={environ[name]}" for name in ("PYTHONPATH",) if name in environ]
        for host in hosts:
            if is_here(host.name):
                options.voice.tell(f"{host.name} is this host")
                self.fleet.start_host(host.name, HERE, agent, sys.executable, environ)
            else:
                words = words_for(host.name, ["env", *needed, *agent] if needed else agent, options.ssh)
                options.voice.tell(f"starting {shlex.join(words)}")
                self.fleet.start_host(host.name, command, words, sys.executable, command.environ(environ))

    def _start_all(self, command: RemoteCommand, hosts: Sequence[Slots]) -> None:
        """Starts commands that start agents on all hosts, which connect to us."""
        if not command.carries_environ:  # the secret is the one of this user then
            self.key = load_secret()
        door = _open_door(["0.0.0.0"], [0], self.key)
        self.fleet.close()
        self.fleet = self._new_fleet(door)
        self.fleet.expect([host.name for host in hosts], command)
        agent = self._agent_words(f"{','.join(published_addresses())}:{door.port}")
        environ = command.environ({**os.environ, "ALLRANKS_SECRET": self.key.decode()})
        assert command.for_all is not None
        for words in command.for_all(hosts, agent):
            self.options.voice.tell(f"starting {shlex.join(words)}")
            self.fleet.start_crowd(command, words, environ)

    def _agent_words(self, dial: str = "") -> list[str]:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return agent_words(sys.executable, flags, dial, count_gpus=self.options.per_host == "gpu")

    def _drop(self, host: Host) -> None:
        """Goes on without a host that is gone, as long as there are enough."""
        if len(self.fleet.hosts) > self.least:
            self.options.voice.say(f"{host.why}; going on without it")
            self.fleet.drop(host, try_again=True)

    def open_to_callers(self) -> None:
        """Starts an agent here, and waits for those of the other hosts."""
        options, fleet = self.options, self.fleet
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        agent = agent_words(sys.executable, flags, count_gpus=options.per_host == "gpu")
        own = fleet.start_host("this host", HERE, agent, sys.executable, os.environ)
        own.slots = _own_slots(options)
        until = time.monotonic() + options.join_timeout_s
        tell_at = time.monotonic() + _TELL_S
        last_call = math.inf

        def enough() -> bool:
            nonlocal tell_at, last_call
            self.admit_callers()
            if own.hello is not None:
                own.name = own.hello.host
            self._tell_who_has_come()
            missing = self.most - len(fleet.hosts)
            now = time.monotonic()
            if len(fleet.hosts) >= self.least:
                last_call = min(last_call, now + options.last_call_s)
            if missing and now >= tell_at:
                tell_at = math.inf
                options.voice.remark(f"waiting for {self._missing()}")
            return fleet.greeted() and (not missing or now >= last_call)

        fleet.gather(until, enough, lambda: f"no answer from {self._missing()} in time (longer: --join-timeout)")
        if not self.elastic:
            self.port = fleet.shut_door()  # so that a program that uses torch.distributed finds it free

    def _tell_who_has_come(self) -> None:
        for host in self.fleet:
            if (hello := host.hello) is not None and host not in self._told:
                self._told.add(host)
                gpus = "" if hello.gpus is None else f", {hello.gpus} GPUs"
                self.options.voice.tell(f"{host.name} is there: python {hello.python}, {hello.cpus} CPUs{gpus}")

    def _missing(self) -> str:
        """Which hosts have not come, where they are awaited, and what to do there."""
        here = {host.place for host in self.fleet}
        numbers = [number for number in range(self.most) if number not in here]
        who = f"{'host' if len(numbers) == 1 else 'hosts'} {', '.join(map(str, numbers))}"
        name = self.master or (self.options.leader[0] if self.options.leader else "") or socket.gethostname()
        port = self.fleet.door_port
        words = f"{who} (they are numbered from 0 to {self.most - 1}; this is 0, and listens as {name}:{port})"
        if self.options.leader and name and not is_here(name):
            words += f"; {name} is not a name of this host: is it host 0?"
        if self.elastic and len(here) >= self.least:
            words += f"; it starts without in {self.options.last_call_s:g} s"
        elif name in _LOOPBACK:
            words += (
                f"; here: the same command, --node-rank {numbers[0]}. No other host can reach {name}: to use another"
                f" one, stop this and give all the address of this host (--master-addr {_name_for_others()})"
            )
        else:
            words += f"; there: the same command, --node-rank {numbers[0]} --master-addr {name} --master-port {port}"
        return f"{words} {self.fleet.refusals()}".strip()

    def admit_callers(self) -> None:
        """Takes those who came, as long as there is room."""
        fleet = self.fleet
        for caller in fleet.callers:
            if why := self._vet(caller):
                fleet.turn_away(caller, why)
                continue
            assert caller.hello is not None
            caller.place = self._place_for(caller)
            if caller.process is None:
                caller.slots = caller.hello.nproc
            fleet.admit(caller)

    def _place_for(self, caller: Host) -> int:
        """Its place in the order of hosts; one beyond the last where there is none for it."""
        assert caller.hello is not None
        taken = {host.place for host in self.fleet}
        place = caller.hello.node if caller.process is None else caller.place
        if place is None or (place in taken and self.elastic):
            place = next((place for place in range(self.most) if place not in taken), self.most)
        return place

    def _vet(self, caller: Host) -> str:
        """Why a caller cannot take part; "" if it can."""
        assert caller.hello is not None
        if caller.process is None and caller.hello.run != self.options.run:
            return _other_job(self.options.run, caller.hello.run)
        if trouble := wrong_version(caller):
            return trouble
        place = self._place_for(caller)
        if place in {host.place for host in self.fleet}:
            return f"there is another host {place} already (--node-rank)"
        return "" if place < self.most else f"the job has its {self.most} hosts already"

    def run(self) -> int:
        """Runs rounds until one is the last."""
        options, fleet = self.options, self.fleet
        budget = options.restarts
        while True:
            code, supervisor = self._round()
            lost = [host for host in fleet if host.why]
            for host in lost:
                fleet.drop(host, try_again=self.elastic)
            again = supervisor.joined
            if supervisor.failed and lost and self.elastic:
                again = True
            elif supervisor.failed and budget > 0 and (not lost or self.elastic):
                again, budget = True, budget - 1
            if not again or not self._enough_hosts():
                fleet.end(code, supervisor.last_words)
                write_error_file(supervisor.cause, os.environ, options.voice)
                return code
            self.restart += 1
            names = ", ".join(host.name for host in fleet)
            left = f" ({budget} of {options.restarts} restarts left)" if options.restarts else ""
            options.voice.say(f"starting again on {names}{left}")

    def _enough_hosts(self) -> bool:
        """Takes who has come back; waits for some to do so where too few are left."""
        fleet = self.fleet
        self.admit_callers()
        if len(fleet.hosts) >= self.least:
            return bool(fleet.hosts)
        if not fleet.may_grow:
            return False
        self.options.voice.say(f"{len(fleet.hosts)} of at least {self.least} hosts are left; waiting for others")

        def enough() -> bool:
            fleet.try_again()
            self.admit_callers()
            return len(fleet.hosts) >= self.least

        try:
            fleet.gather(time.monotonic() + self.options.join_timeout_s, enough)
        except ConfigError as error:
            self.options.voice.say(str(error))
            return False
        return True

    def _prepare(self) -> tuple[list[int], list[Ready]]:
        """Makes all hosts ready. Goes on without those that cannot be, if it may."""
        while True:
            try:
                return self._prepare_all()
            except ConfigError:
                fleet = self.fleet
                unable, lost = fleet.unable(), [host for host in fleet if host.why]
                if not self.elastic or not (unable or lost) or len(fleet.hosts) - len(unable) - len(lost) < self.least:
                    raise
                for host, why in unable.items():  # it would be so the next time, too
                    self.options.voice.say(f"{host.name}: {why}; going on without it")
                    fleet.turn_away(host, why)
                for host in lost:
                    self._drop(host)

    def _prepare_all(self) -> tuple[list[int], list[Ready]]:
        options, fleet = self.options, self.fleet
        counts = self._counts()
        check_size(options.target, self.first + sum(counts))
        secret = store_secret(self.key, self.salt)
        prepare = [
            msgspec.structs.replace(
                # Where host 0 is gone, another is what MASTER_ADDR names.
                _prepare_of(options, count, self.master if fleet.hosts[0].place == 0 else ""),
                secret=secret if host.process is not None else b"",  # a dialled line is no place for it
                salt=self.salt,
                serves=number == self.first == 0,
                spans=len(counts) > 1,
            )
            for number, (host, count) in enumerate(zip(fleet, counts, strict=True))
        ]
        until = time.monotonic() + options.join_timeout_s
        return counts, fleet.prepare(prepare, until if self.until is None else min(until, self.until))

    def _round(self) -> tuple[int, Supervisor]:
        options, fleet = self.options, self.fleet
        counts, ready = self._prepare()
        self.world_size = world_size = self.first + sum(counts)
        names = [host.name for host, count in zip(fleet, counts, strict=True) for _ in range(count)]
        names[:0] = [socket.gethostname()] * self.first
        # Where the same command was typed on each host, each shows its own ranks.
        shown = range(self.first, counts[0] if fleet.by_callers else world_size)
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
        stdio = screen.stdio()
        firsts = [self.first + sum(counts[:number]) for number in range(len(counts))]
        roles = [(host.hello.role if host.hello is not None else "") or options.role for host in fleet]
        start = [
            Start(
                first=first,
                count=count,
                world_size=world_size,
                node=number,
                nodes=len(counts),
                stores=ready[0].stores,
                port=self.port or ready[0].port,
                run=self.run_id,
                restart=self.restart,
                restarts=options.restarts,
                role_first=sum(c for c, r in zip(counts[:number], roles, strict=False) if r == roles[number]),
                role_size=sum(c for c, r in zip(counts, roles, strict=True) if r == roles[number]),
                stdio=stdio[first - self.first :][:count],
            )
            for number, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        supervisor = Supervisor(
            fleet,
            screen,
            options.grace_s,
            options.voice,
            names,
            idle_s=options.idle_s,
            signals=options.signals,
            until=self.until,
            tells=options.target.kind != "function" and not self.first,  # which raises here
            master=-1 if self.first else 0 if options.target.mode == "master" else None,
        )
        self.supervisor = supervisor
        options.voice.tell(f"the store is at {', '.join(ready[0].stores) or 'a unix socket there'}")
        for host, first, count in zip(fleet, firsts, counts, strict=True):
            options.voice.tell(f"{host.name} starts {rank_list(range(first, first + count))}")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, *options.signals))
        screen.open()
        fleet.hear_callers(self._vet if self.elastic and len(fleet.hosts) < self.most else None)
        try:
            fleet.start(start)
            return supervisor.run(mask), supervisor
        finally:
            fleet.hear_callers(None)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            screen.close()

    def _counts(self) -> list[int]:
        """How many ranks each host gets in this round."""
        options, fleet = self.options, self.fleet
        slots = [Slots(host.name, host.slots) for host in fleet]
        if fleet.by_callers and options.nproc is None:  # each host's own command line says
            return [1 if slot.count is None else slot.count for slot in slots]
        has = [(host.hello.cpus, host.hello.gpus or 0) for host in fleet if host.hello is not None]
        counts = share_out(slots, options.nproc, options.per_host, has, strict=bool(options.hosts))
        if not all(counts):  # of hosts that were asked for one by one
            raise ConfigError(
                f"{options.nproc} ranks for {len(counts)} hosts (-n is their number in all; on each host:"
                " --nproc-per-node)"
            )
        return counts

    def close(self) -> None:
        """Ends all agents."""
        self.fleet.close()


def _prepare_of(options: Options, nproc: int, master: str) -> Prepare:
    return Prepare(
        target=options.target,
        nproc=nproc,
        start=options.start,
        folder=os.getcwd(),
        environ=carried(os.environ, options.exports) | options.environ,
        threads=options.threads,
        secret=b"",
        salt="",
        serves=False,
        spans=False,
        bind=options.bind,
        one_gpu_per_rank=options.one_gpu_per_rank,
        role=options.role,
        virtual_local_rank=options.virtual_local_rank,
        master=master,
        signals=options.signals,
    )


def _other_job(ours: str, theirs: str) -> str:
    names = [repr(name) if name else "one without a name" for name in (ours, theirs)]
    return f"its job is {names[0]}, and {names[1]} was asked for (--rdzv-id); another job needs a port of its own"


def _own_slots(options: Options) -> int | None:
    if isinstance(options.per_host, str):
        return usable_cpus() if options.per_host == "auto" else len(visible_gpus(os.environ))
    return options.per_host


def _open_door(addresses: Sequence[str], ports: Sequence[int], secret: bytes) -> Door:
    trouble: OSError | None = None
    for port in ports:
        try:
            return Door(addresses, port, secret)
        except OSError as error:
            trouble = error
    assert trouble is not None
    raise trouble
