"""``env://`` under a scheduler or MPI's launcher, if no variable names the host of rank 0.

There are three methods, and the first that applies is used. On one host, rank 0 serves a unix socket whose name is
derived from the job. With PMI, rank 0 publishes its address over PMI. Otherwise, rank 0 serves one of several ports
whose numbers are derived from the job, on a host that the scheduler has named.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import replace

import msgspec

from allranks._base.errors import ConfigError, JoinError
from allranks._base.system import reason
from allranks._cluster.context import PORTS_TRIED, LaunchContext, job_ports, job_secret
from allranks._cluster.detection import read_hosts
from allranks._cluster.env import JobEnv
from allranks._cluster.hostlist import Slots
from allranks._net.secret import load_secret
from allranks._rendezvous.finders.endpoint import Endpoint
from allranks._rendezvous.finders.interface import Finder, NotYet, Request, ServedFinder
from allranks._rendezvous.finders.port import address_of
from allranks._rendezvous.finders.store import GivenStoreFinder
from allranks._rendezvous.join_protocol import Member
from allranks._rendezvous.pmi import PmiBroadcast, mpi_runs
from allranks._rendezvous.pmix import host_of_rank_0
from allranks._store import HashStore, Store, StoreClient, StoreServer

__all__ = ["find_by_context"]

_BROADCAST_READ_S = 1.0  # seconds to wait for PMI before the state machine checks the time again
_PROBE_S = 3.0  # seconds to connect to one port


def find_by_context(request: Request, job: JobEnv, context: LaunchContext) -> Finder:
    """Return the finder for a job that a scheduler has started.

    Raises:
        ConfigError: No method leads to rank 0.
    """
    mpi = mpi_runs()
    if context.job and context.local_size == context.size:
        return _NameFinder(request, job, context)
    if context.pmi is not None and not mpi:
        return _PmiFinder(request, job, context, context.pmi)
    if context.job and (context.hosts or context.hostfile or context.kind == "openmpi"):
        return _PortsFinder(request, job, context)
    if job.world_size == 1:
        return GivenStoreFinder(request, job, HashStore(), "this process")
    why = f"{context.kind} does not provide the address of rank 0"
    if mpi and context.pmi is not None:
        why = "MPI is initialized in this process, and only MPI can use PMI after that"
    raise ConfigError(
        f"rank {context.rank} of {context.size}: the ranks cannot find each other: {why}.\n"
        "  Set MASTER_ADDR and MASTER_PORT, the same on all ranks. If MPI is to move the tensors, call"
        " init_process_group('mpi')."
    )


class _SchedulerFinder(ServedFinder):
    def __init__(self, request: Request, job: JobEnv, context: LaunchContext) -> None:
        super().__init__(request, job)
        self._context = context
        self.started = {slots.name: slots.count for slots in context.hosts if slots.count is not None}

    def _job_secret(self) -> bytes:
        return job_secret(self._context, load_secret(self.request.environ))


class _NameFinder(_SchedulerFinder):
    """Finder of a unix socket whose name is derived from the job. All ranks are on this host."""

    _name = ""

    def open(self, me: Member) -> None:
        self._name = f"allranks-{self._job_secret().hex()[:32]}"
        self.where = f"rank 0 (the server at {self.locate()}, on this host)"
        super().open(me)

    def serve(self) -> StoreServer:
        return StoreServer.unix(name=self._name)

    def locate(self) -> str:
        return f"unix:@{self._name}"


class _PortsFinder(_SchedulerFinder):
    """Finder of a store at one of several ports.

    Any other program may hold one of these ports, including another job of this user. A server that does not prove this
    job's secret is skipped.
    """

    def open(self, me: Member) -> None:
        context = self._context
        hosts = read_hosts(context) or (Slots(host_of_rank_0()),)
        self._context = context = replace(context, hosts=hosts)
        self.secret = self._job_secret()
        self._attempts = itertools.count()
        self._hosts = [slots.name for slots in hosts]
        self._ports = [*context.ports[:PORTS_TRIED], *job_ports(self.secret)]
        ports = ", ".join(map(str, self._ports))
        self.where = f"rank 0 (a server on host {self._hosts[0]}, at one of the ports {ports})"
        super().open(me)

    def serve(self) -> StoreServer:
        node = self._context.node
        host = self._hosts[node if node is not None and node < len(self._hosts) else 0]
        troubles = []
        for port in self._ports:
            try:
                return StoreServer.tcp(host, port, self.secret)
            except ConfigError as error:  # the port is taken
                troubles.append(str(error).partition("\n")[0])
        raise ConfigError(
            "rank 0 cannot listen on any of the ports on which the other ranks search for it:\n  "
            + "\n  ".join(troubles)
            + "\n  Set MASTER_ADDR and MASTER_PORT, the same on all ranks."
        )

    def locate(self) -> str:
        attempt = next(self._attempts)
        # Rank 0 is on the first host, except with srun --distribution=arbitrary. Every fourth attempt tries another
        # host.
        host = self._hosts[0] if attempt % 4 != 3 else self._hosts[(attempt // 4 + 1) % len(self._hosts)]
        refused: dict[str, list[int]] = {}
        for port in self._ports:
            address = address_of(host, port)
            try:
                left_s = max(min(self.request.left_s(), _PROBE_S), 0.01)
                StoreClient.connect(address, self.secret, left_s, retry=False).close()
            except (JoinError, ConfigError) as error:  # no server, or another program
                why = reason(error.__cause__ or error).partition("\n")[0]
                refused.setdefault(why, []).append(port)
            else:
                return address
        most = max(refused, key=lambda why: len(refused[why]))
        others = [f"; at port {', '.join(map(str, refused[why]))}: {why}" for why in refused if why != most]
        raise NotYet(f"host {host}: {most}{''.join(others)}")


class _PmiFinder(_SchedulerFinder):
    """Finder of a unix socket, and of a port for other hosts. Rank 0 posts the addresses over PMI."""

    advice = "A rank that does not print this message has not called init_process_group. Check its output."

    def __init__(self, request: Request, job: JobEnv, context: LaunchContext, fd: int) -> None:
        super().__init__(request, job, context)
        self._fd = fd
        self._attempts = itertools.count()

    def open(self, me: Member) -> None:
        self._broadcast = PmiBroadcast(self._fd)
        self.where = "rank 0 (which posts its address over PMI)"
        self.secret = secrets.token_hex(32).encode()
        super().open(me)
        if self.server is not None:
            elsewhere = self._context.local_size != self._context.size
            # Now, and not on request, because rank 0 can post only one text.
            far = tuple(self.server.listen_to_other_hosts()) if elsewhere else ()
            endpoint = Endpoint(self.server.address, self.secret.decode(), me.host, me.machine, far)
            # As hex digits, because a PMI value must contain neither spaces nor line ends.
            self._broadcast.publish(msgspec.json.encode(endpoint).hex())

    def serve(self) -> StoreServer:
        return StoreServer.unix(self.secret)

    def find(self) -> Store:
        # Rank 0 also reads the address, because all ranks must enter PMI's barrier.
        return self.dial(self.locate(), self.secret)

    def locate(self) -> str:
        text = self._broadcast.read(min(_BROADCAST_READ_S, max(self.request.left_s(), 0.0)))
        if text is None:
            raise NotYet("not all ranks have connected to the PMI server yet")
        endpoint = msgspec.json.decode(bytes.fromhex(text), type=Endpoint)
        self.secret = endpoint.token.encode()
        return endpoint.address_for(self.me, next(self._attempts))
