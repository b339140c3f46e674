"""torch's TCPStore on allranks's server and client. The server requires the job's secret from every client.

The master serves from a thread. Every user of the store is a client, including the master. ``_rendezvous`` uses server
and client directly, because it reports the missing ranks itself.
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
from allranks._store.stores import Store, Timeout, UserToken
from allranks._store.table import HIDDEN
from allranks._store.wire import Reply, Request

__all__ = ["TCPStore"]

_WORKERS = HIDDEN + "workers"
_ALL_JOINED = HIDDEN + "all here"
_LINGER_S = 1.0  # a closing master still serves the other stores this long: all of them close after one barrier
_tenants: dict[int, _Lease] = {}  # servers that several stores of this process share, by port
_tenants_lock = threading.Lock()


class _Lease:
    """A server, and the number of stores of this process that hold it."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self.holders = 1

    @classmethod
    def take(cls, host: str, port: int, secret: bytes, shared: bool, descriptor: int | None) -> _Lease:
        # The lock is held while the server starts: a second store for the same port must not start another server.
        with _tenants_lock:
            if shared and (lease := _tenants.get(port)) is not None:
                lease.holders += 1
                return lease
            if descriptor is None:
                server = StoreServer.tcp(host, port, secret)
            else:
                server = StoreServer.on_socket(Socket(fileno=descriptor), host, secret)
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
        self.server.close(_LINGER_S)  # without the lock, because it can take _LINGER_S


class TCPStore(Store):
    """A store that one process serves on a TCP port, for all processes that have the job's secret.

    The secret is ALLRANKS_SECRET, or the content of ALLRANKS_SECRET_FILE, or this user's own secret. ``host_name``
    determines where the server listens. If it is a loopback address, the server listens on that address. Otherwise it
    listens on the addresses of this host to which the name resolves.

    Args:
        host_name: Name or address of the server's host.
        port: Port of the server. The master may pass 0 for a free port; the property ``port`` then has its number.
        world_size: The number of stores, including the master's; None: any number.
        is_master: If true, this process also runs the server.
        timeout: Timeout of the wait for the server and of waits for keys: a timedelta or seconds.
        wait_for_workers: If true, the master waits in this call until ``world_size`` stores have joined.
        multi_tenant: If true, the stores of this process with the same port share one server.
        master_listen_fd: A bound socket on which the master listens instead of ``port``. The store closes it.
        use_libuv: Ignored. It exists for compatibility with torch's signature.

    Raises:
        UsageError: The arguments contradict each other.
        ConfigError: The port is not available, or the secrets differ.
        JoinError: The server did not answer in time, or some of the stores did not join in time.
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
            raise UsageError(f"TCPStore({host_name!r}, {port!r}): expected a host name and a port, 0 to 65535")
        if not host_name or (port == 0 and not is_master):
            raise UsageError(f"TCPStore({host_name!r}, {port}): expected the master's host and port")
        if world_size is not None and world_size < 1:
            raise UsageError(f"TCPStore: world_size={world_size!r}. Expected 1 or more, or None for any number")
        if master_listen_fd is not None and not is_master:
            raise UsageError("TCPStore: master_listen_fd= requires is_master=True")
        secret, self.timeout_s = load_secret(), seconds_of(timeout, LONGEST_WAIT_S)
        self._host = host_name
        lease = _Lease.take(host_name, port, secret, multi_tenant, master_listen_fd) if is_master else None
        address = f"tcp:[{host_name}]:{port}" if ":" in host_name else f"tcp:{host_name}:{port}"
        try:
            # The master dials its own listener, which works even if the name service does not answer.
            self._client = StoreClient.connect(lease.server.here if lease else address, secret, self.timeout_s)
        except BaseException:
            # Otherwise the server keeps the port, although no store refers to it.
            if lease is not None:
                lease.release()
            raise
        self._user_token = UserToken()
        self._finalizer = weakref.finalize(self._user_token, _end, self._client, lease, forks())
        try:
            if world_size is not None:
                self._count_stores(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The name or address that was passed as ``host_name``."""
        return self._host

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._client.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"TCPStore({self.host}:{self.port})"

    def _copy_advice(self) -> str:
        return f"Create TCPStore({self.host!r}, {self.port}) in the other process, too, without is_master."

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of ``get``, ``wait`` and similar methods, and of all requests to the server.

        Raises:
            UsageError: The timeout is neither a timedelta nor a number.
        """
        super().set_timeout(timeout)
        # The client limits every request by its own timeout, so both must agree.
        self._client.timeout_s = self.timeout_s

    def clone(self) -> TCPStore:
        """Return another object for the same connections, with a separate timeout.

        The master's server runs until the last of these objects is dropped, or until one of them is closed.
        """
        return super().clone()

    def close(self) -> None:
        """Close the connections, and the master's server once the other stores have disconnected, after 1 s at most.

        Idempotent. Dropping the store and exiting the process have the same effect.
        """
        self._finalizer()

    def _execute(self, request: Request) -> Reply:
        return self._client._execute(request)

    def _count_stores(self, world_size: int, wait: bool) -> None:
        if self.add(_WORKERS, 1) == world_size:
            # The last store sets one key, so the master waits for a key and does not poll the counter.
            self.set(_ALL_JOINED, b"")
        if wait:
            try:
                self.wait([_ALL_JOINED])
            except TimeoutError:
                joined = (self.peek([_WORKERS])[0] or b"0").decode()
                raise JoinError(
                    f"{self}: {joined} of {world_size} stores connected in {self.timeout_s:.1f} s"
                    f" (world_size={world_size}).\n"
                    "  Check the output of the other processes.\n  To wait longer, set timeout=."
                ) from None


def _end(client: StoreClient, lease: _Lease | None, made: int) -> None:
    # Before the server closes: it waits until all clients have disconnected, and this is one of them.
    client.close()
    if lease is not None and made == forks():  # in a forked child, the server is the parent's
        lease.release()


def _abandon_in_child() -> None:
    # Another thread of the parent may have held the lock at the fork, and the servers are the parent's.
    global _tenants_lock
    _tenants_lock = threading.Lock()
    _tenants.clear()


os.register_at_fork(after_in_child=_abandon_in_child)
