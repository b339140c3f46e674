"""torch's TCPStore, on our server and client: whoever has no secret gets nothing from its port.

The master serves from a thread; every one, the master too, is a client. ``_rendezvous`` uses server and client
directly, as it reports itself who is missing.
"""

from __future__ import annotations

import os
import threading
import weakref
from datetime import timedelta

from allranks._base.errors import JoinError, TimeoutError, UsageError
from allranks._base.forks import Socket, forks
from allranks._base.timeouts import LONGEST_WAIT_S, seconds_of
from allranks._net.secret import load_secret
from allranks._store.client import StoreClient
from allranks._store.server import StoreServer
from allranks._store.stores import Store, Timeout
from allranks._store.table import HIDDEN
from allranks._store.wire import Reply, Request

__all__ = ["TCPStore"]

_WORKERS = HIDDEN + "workers"
_ALL_HERE = HIDDEN + "all here"
_LINGER_S = 1.0  # how long a master that leaves serves those who have not left yet: all leave after one barrier
_tenants: dict[int, _Lease] = {}  # servers that several stores of this process share, by port
_tenants_lock = threading.Lock()


class _Lease:
    """A server, and how many stores of this process hold it."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self.holders = 1

    @classmethod
    def take(cls, host: str, port: int, secret: bytes, shared: bool, descriptor: int | None) -> _Lease:
        with _tenants_lock:
            if shared and (lease := _tenants.get(port)) is not None:
                lease.holders += 1
                return lease
            if descriptor is None:
                server = StoreServer.tcp(host, port, secret)
            else:
                server = StoreServer.on(Socket(fileno=descriptor), host, secret)
            lease = cls(server.start())
            if shared:
                _tenants[server.port] = lease
            return lease

    def release(self) -> None:
        with _tenants_lock:
            self.holders -= 1
            if self.holders:
                return
            if _tenants.get(self.server.port) is self:
                del _tenants[self.server.port]
        self.server.close(_LINGER_S)


class _Use:
    """Lives as long as a store or one of its clones."""


class TCPStore(Store):
    """A store that one process serves on a TCP port, to all that know the job's secret.

    The secret is ALLRANKS_SECRET, or what ALLRANKS_SECRET_FILE holds, or this user's own. Where the server listens
    follows ``host_name``: on a loopback address if that is one, else on this host's addresses that it stands for.

    Args:
        host_name: where the server is: a name or an address.
        port: its port; 0, for the master alone: a free one, which ``port`` has.
        world_size: how many stores there will be, the master's included; None: any number.
        is_master: whether to serve, too.
        timeout: how long to wait for the server, and for keys: a timedelta or seconds.
        wait_for_workers: whether the master waits here until ``world_size`` stores have come.
        multi_tenant: whether the stores of this process that name one port share one server.
        master_listen_fd: a bound socket for the master to listen on, in place of ``port``; the store closes it.
        use_libuv: for torch's signature.

    Raises:
        UsageError: the arguments do not fit together.
        ConfigError: the port cannot be had, or the secrets differ.
        JoinError: the server, or some of the stores, did not come in time.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        if not isinstance(host_name, str) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UsageError(f"TCPStore({host_name!r}, {port!r}): Expected a host name and a port, 0 to 65535")
        if not host_name or (port == 0 and not is_master):
            raise UsageError(f"TCPStore({host_name!r}, {port}): Expected the master's host and port")
        if world_size is not None and world_size < 1:
            raise UsageError(f"TCPStore: world_size={world_size!r}. Expected 1 or more, or None for any number")
        if master_listen_fd is not None and not is_master:
            raise UsageError("TCPStore: master_listen_fd= is the master's, and is_master is false")
        secret, self.timeout_s = load_secret(), seconds_of(timeout, LONGEST_WAIT_S)
        self._host = host_name
        lease = _Lease.take(host_name, port, secret, multi_tenant, master_listen_fd) if is_master else None
        address = f"tcp:[{host_name}]:{port}" if ":" in host_name else f"tcp:{host_name}:{port}"
        try:
            self._client = StoreClient.connect(lease.server.here if lease else address, secret, self.timeout_s)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        self._use = _Use()
        self._finalizer = weakref.finalize(self._use, _end, self._client, lease, forks())
        try:
            if world_size is not None:
                self._count(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The name or address that was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._client.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"TCPStore({self.host}:{self.port})"

    def _elsewhere(self) -> str:
        return f"make it in the other process, too, as TCPStore({self.host!r}, {self.port}), without is_master"

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets how long ``get``, ``wait`` and others wait where no timeout is given, and how long the server may take.

        Raises:
            UsageError: not a time.
        """
        super().set_timeout(timeout)
        self._client.timeout_s = self.timeout_s

    def clone(self) -> TCPStore:
        """Another object on the same connections, with a timeout of its own; the server lives as long as either."""
        return super().clone()

    def close(self) -> None:
        """Ends the connections, and the master's server, once the others have left or 1 s later. Idempotent.

        Dropping the store, and the end of the process, do it too.
        """
        self._finalizer()

    def _ask(self, request: Request) -> Reply:
        return self._client._ask(request)

    def _count(self, world_size: int, wait: bool) -> None:
        if self.add(_WORKERS, 1) == world_size:
            self.set(_ALL_HERE, b"")
        if wait:
            try:
                self.wait([_ALL_HERE])
            except TimeoutError:
                here = (self.peek([_WORKERS])[0] or b"0").decode()
                raise JoinError(
                    f"{self}: {here} of {world_size} stores came in {self.timeout_s:.1f} s (world_size={world_size}).\n"
                    "  Look at the output of the others.    Longer: timeout="
                ) from None


def _end(client: StoreClient, lease: _Lease | None, made: int) -> None:
    client.close()
    if lease is not None and made == forks():  # else the parent's
        lease.release()


def _abandon_in_child() -> None:
    global _tenants_lock
    _tenants_lock = threading.Lock()
    _tenants.clear()


os.register_at_fork(after_in_child=_abandon_in_child)
