"""The client of a store server.

A waiting request occupies its connection, so concurrent threads use separate connections. The client verifies every
peer. On a unix socket the kernel reports the user of the peer; on TCP the handshake proves the secret. The client
distinguishes another program on the port from a server that has not started yet.
"""

from __future__ import annotations

import builtins

# Imported early: otherwise a thread loads this codec with the first host name, and a child that is forked while the
# import runs may wait forever for the import lock.
import encodings.idna  # noqa: F401
import errno
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from allranks._base.errors import ConfigError, JoinError, StoreLostError, TimeoutError, UsageError
from allranks._base.forks import Socket, follow
from allranks._base.system import reason
from allranks._cluster.env import split_host_port
from allranks._net.frames import TlsError, WireError
from allranks._net.handshake import HANDSHAKE_S, ClientHandshake
from allranks._net.sockets import check_connected, keep_alive
from allranks._net.stream import ClientStream
from allranks._net.tls import tls_context
from allranks._store.stores import Store
from allranks._store.wire import FRAME_LIMIT, PROTOCOL, Pop, Reply, Request, WaitForKeys, decode_reply, encode

if TYPE_CHECKING:
    import ssl

__all__ = ["StoreClient"]

_GRACE_S = 0.5  # the server ends a wait at its timeout; a client without a reply gives up this many seconds later


class StoreClient(Store):
    """A store that a ``StoreServer`` holds. Concurrent threads use separate connections.

    Attributes:
        address: Address of the server.
        timeout_s: Timeout in seconds of a wait for keys that has no timeout of its own. Also the limit of every other
            request.
        deadline: Limit of all requests, in seconds of ``time.monotonic``. It overrides longer timeouts of requests.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        self.address = address
        self.deadline = math.inf
        self._secret = secret
        self.timeout_s = timeout_s
        self._context: ssl.SSLContext | None = None  # read from the environment by the first TCP connection
        self._closed = False
        self.abandon()
        follow(self)

    def abandon(self) -> None:
        """Forget the parent's connections in a forked child. The child's first request opens a new one."""
        # A thread that does not exist in the child may have held the old lock. The fork has closed the old sockets.
        self._lock = threading.Lock()
        self._idle: list[ClientStream] = []
        self._busy: set[ClientStream] = set()

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes = b"",
        timeout_s: float = 300.0,
        *,
        retry: bool = True,
        on_failure: Callable[[str], None] | None = None,
    ) -> StoreClient:
        """Connect to a server. Retry until it listens.

        Args:
            address: ``unix:@name`` or ``tcp:host:port``.
            secret: The secret of the server; may be empty for a unix socket.
            timeout_s: How long to try, in seconds, and the limit of every single request.
            retry: If false, the first failed attempt is final.
            on_failure: Called after each failed attempt, before the next one, with the system's text of the error.

        Raises:
            JoinError: No server answered in time.
            ConfigError: The peer is no allranks store, or has another version or (SecretError) another secret. Or only
                one side uses TLS, one side rejects the other's certificate, or an ALLRANKS_TLS_ variable is wrong.
        """
        client = cls(address, secret, timeout_s)
        # The first connection is made here, so that a wrong address or secret is reported by this call.
        client._idle.append(client._dial(time.monotonic() + timeout_s, retry, on_failure))
        return client

    def __str__(self) -> str:
        return f"the store at {self.address}"

    def close(self) -> None:
        """Close all connections. A call in another thread raises StoreLostError."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.sock.close()
            self._idle.clear()
            for connection in self._busy:
                # Shut down, not closed: the thread that uses the connection wakes up, and closes it.
                with suppress(OSError):  # already broken: the thread receives the error anyway
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def clone(self) -> StoreClient:
        """Return another client of the same server, with separate connections and a separate timeout."""
        return StoreClient(self.address, self._secret, self.timeout_s)

    def _execute(self, request: Request) -> Reply:
        payload = encode(request)
        if len(payload) > FRAME_LIMIT:
            raise UsageError(
                f"{self}: a request of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT} bytes.\n"
                "  Transfer data with send or broadcast."
            )
        began = time.monotonic()
        patience_s = self.timeout_s
        if isinstance(request, WaitForKeys | Pop) and request.timeout_s > 0:
            patience_s = request.timeout_s + _GRACE_S
        deadline = min(began + patience_s, self.deadline)
        is_reusable = False
        connection = self._take_connection(deadline)
        try:
            reply = decode_reply(connection.ask(payload, deadline))
            is_reusable = True
        # Before the clause for OSError, which is its base class.
        except builtins.TimeoutError:
            raise TimeoutError(
                f"{self} did not answer for {time.monotonic() - began:.1f} s.\n"
                "  The process that serves it (rank 0, or the launcher) is stopped, overloaded or unreachable. Check"
                " its host."
            ) from None
        except (OSError, WireError, msgspec.MsgspecError) as error:
            if self._closed:
                raise self._closed_error() from error
            raise StoreLostError(
                f"{self}: the connection broke ({reason(error)}).\n"
                "  The process that serves it (rank 0, or the launcher) has exited. Check the end of its output."
            ) from error
        finally:
            with self._lock:
                self._busy.discard(connection)
                if is_reusable and not self._closed:
                    self._idle.append(connection)
                else:  # its reply may still arrive, and another request must not read it
                    connection.sock.close()
        return reply

    def _take_connection(self, deadline: float) -> ClientStream:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            closed = self._closed
        if connection is None and not closed:
            # Without the lock, because an attempt can take seconds and `close` must not wait for it.
            connection = self._dial(deadline)
        with self._lock:  # `close` may have run while this thread dialed
            if connection is not None and not self._closed:
                self._busy.add(connection)
                return connection
        if connection is not None:
            connection.sock.close()
        raise self._closed_error()

    def _closed_error(self) -> StoreLostError:
        return StoreLostError(
            f"{self}: this process has closed its connection.\n  Use the store before close(), or create a new one."
        )

    def _dial(
        self, deadline: float, retry: bool = True, on_failure: Callable[[str], None] | None = None
    ) -> ClientStream:
        began, pause_s = time.monotonic(), 0.01
        while True:
            try:
                return self._dial_once(deadline)
            except OSError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not retry:
                    raise JoinError(
                        f"{self} did not answer for {time.monotonic() - began:.1f} s (last: {reason(error)}).\n"
                        "  Check that the process that serves it (rank 0, or the launcher) is running and that this"
                        " host can reach it.\n  To wait longer, set init_process_group(timeout=...)."
                    ) from error
                if on_failure is not None:
                    on_failure(reason(error))
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, 0.2)

    def _dial_once(self, deadline: float) -> ClientStream:
        last_error: OSError = OSError(errno.EADDRNOTAVAIL, "the host name has no address")
        # `_dial` retries after an OSError, because the server may not have started. A wrong peer is final.
        wrong_peer: Exception | None = None
        if self._context is None and self.address.startswith("tcp:"):
            self._context = tls_context(server_side=False)
        for family, target in _resolve(self.address):
            connection = ClientStream(Socket(family, socket.SOCK_STREAM), self._context)
            try:
                now = time.monotonic()
                # Not 0, which would make the socket non-blocking. At most 3 s, because another address may answer.
                connection.sock.settimeout(min(max(deadline - now, 0.001), 3.0))
                connection.sock.connect(target)
                check_connected(connection.sock)
                if family != socket.AF_UNIX:
                    # Requests are small. Nagle's algorithm could delay one until the peer acknowledges the previous
                    # packet.
                    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(connection.sock)
                connection.enter(ClientHandshake(PROTOCOL, self._secret), min(deadline, now + HANDSHAKE_S), FRAME_LIMIT)
                return connection
            except OSError as error:
                last_error = error
            except TlsError as error:
                wrong_peer = ConfigError(str(error))
            except (WireError, ConfigError) as error:
                wrong_peer = error
            # KeyboardInterrupt, for example, must not leave the socket open.
            except BaseException:
                connection.sock.close()
                raise
            connection.sock.close()
        if isinstance(wrong_peer, ConfigError):
            raise type(wrong_peer)(f"{self}: {wrong_peer}.")
        if wrong_peer:
            raise ConfigError(
                f"{self}: a server answers at this address, but it is not an allranks store ({wrong_peer}).\n"
                "  Another program uses this port. Choose another port (MASTER_PORT), the same on all ranks."
            )
        raise last_error


def _resolve(address: str) -> list[tuple[int, Any]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        return [(socket.AF_UNIX, "\0" + rest[1:])]
    host, port = split_host_port(rest, "the store's address")
    if kind != "tcp" or not host or port is None:
        raise ConfigError(f"{address!r} is not the address of a store. Expected unix:@NAME or tcp:HOST:PORT.")
    try:
        # The server binds 127.0.0.1 for this name. On ::1, another program may use the same port.
        found = socket.getaddrinfo("127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigError(f"{host!r} is not a host name ({error}). Expected a name such as node0.") from None
    return [(family, target) for family, _, _, _, target in found]
