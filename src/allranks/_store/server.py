"""The server of a store: one thread, one selector, any number of clients.

It tolerates unauthenticated peers, invalid data, many simultaneous connections, and clients that do not read.
`_net.admission` limits peers that have not proved the secret. No client can block the server or make it accumulate
data. The values are in ``table``.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from allranks._base.errors import ConfigError, UsageError
from allranks._base.forks import Descriptor, Socket, forks
from allranks._base.system import reason
from allranks._base.threads import Daemon
from allranks._cluster.network import listen, published_addresses
from allranks._net.admission import Admission, UnprovedPeer
from allranks._net.frames import TlsError, WireError, pack_frame
from allranks._net.handshake import PROVED, ServerHandshake
from allranks._net.tls import Tls, tls_context
from allranks._store.address import address_problem, addresses_of
from allranks._store.table import KeyTable
from allranks._store.wire import FRAME_LIMIT, PROTOCOL, FoundValues, Reply, RequestFailed, Set, decode_request, encode

if TYPE_CHECKING:
    import ssl

__all__ = ["StoreServer"]

_MAX_LOGGED_REFUSALS = 16
_BACKLOG = 4096  # thousands of ranks may connect simultaneously; the system may allow fewer
_LARGE = 4096  # bytes: the server keeps the frame of the last value that is at least this large
_log = logging.getLogger("allranks.store")


class _Peer:
    """A client that has proved the secret."""

    def __init__(self, candidate: UnprovedPeer) -> None:
        self.sock = candidate.sock
        self.name = candidate.name
        self.tls = candidate.tls
        self.decoder = candidate.decoder
        # Until the proof, the decoder accepts only frames as large as those of a handshake.
        self.decoder.limit = FRAME_LIMIT
        self.out = memoryview(b"")
        self.events = selectors.EVENT_READ


class StoreServer:
    """Holds the values of a store and serves them from one thread.

    ``unix``, ``tcp`` and ``on_socket`` create a server. They bind and listen but start no thread, so that a process can
    fork its ranks before it has a second thread. In a forked child all its sockets are closed, and ``close`` has no
    effect.

    Attributes:
        address: The address for clients.
        host: The name or address that was passed to a TCP server.
        refusals: By host, one line about the first refusal, for example because of another secret or version.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        address: str,
        secret: bytes,
        host: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self.host = host
        self.refusals: dict[str, str] = {}
        self._secret = secret
        self._context = context
        self._listeners = tuple(listeners)
        self._new_listeners: tuple[socket.socket, ...] = ()  # listeners that the thread has not taken yet
        self._local_values: deque[tuple[str, bytes]] = deque()  # values that the thread has not taken yet
        self._forks = forks()
        self._wake = Descriptor.of(lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread: threading.Thread | None = None
        self._stop_at: float | None = None
        self._table = KeyTable()
        self._cached_frame: tuple[bytes | None, bytes] = (None, b"")
        self._peers: dict[_Peer, None] = {}

    @classmethod
    def unix(cls, secret: bytes = b"", name: str = "") -> StoreServer:
        """Create a server on an abstract unix socket. It accepts only processes of this user.

        Args:
            secret: The secret that TCP clients must prove, if the server listens to other hosts later.
            name: Name of the socket, if the clients expect a certain one; "" for an unguessable random name.

        Raises:
            ConfigError: The name is in use.
        """
        name = name or f"allranks-{os.urandom(16).hex()}"
        listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # An abstract name: no file remains if the process is killed.
            listener.bind("\0" + name)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"Cannot listen on the unix socket @{name}: {reason(error)}.\n"
                "  Another process of this job, or of its previous run, may serve it. End that process: `ss -xlp` lists"
                " it."
            ) from None
        listener.listen(_BACKLOG)
        return cls([listener], f"unix:@{name}", secret)

    @classmethod
    def tcp(cls, host: str, port: int, secret: bytes) -> StoreServer:
        """Create a server on a TCP port. It accepts only clients that prove the secret.

        It uses TLS if the ALLRANKS_TLS_ variables are set.

        Args:
            host: The name or address of this host that the clients dial. The module ``address`` defines on which
                addresses the server listens; "" for all addresses that the host publishes.
            port: The port; 0 for a free one.
            secret: The secret that clients must prove.

        Raises:
            ConfigError: The port is not available; the message names the process that holds it, if that process is
                visible. Or an ALLRANKS_TLS_ variable is wrong.
        """
        if not secret:
            raise UsageError("StoreServer.tcp needs a secret: see load_secret.")
        context = tls_context(server_side=True)
        addresses = addresses_of(host)
        listeners = _listen(addresses, port)
        shown = addresses[0] if host == "localhost" else host or socket.gethostname()
        return cls(listeners, _tcp_address(shown, listeners[0].getsockname()[1]), secret, host, context)

    @classmethod
    def on_socket(cls, bound: socket.socket, host: str, secret: bytes) -> StoreServer:
        """Create a server on a TCP socket that the caller has bound. The server owns the socket afterwards."""
        try:
            context = tls_context(server_side=True)
            bound.listen(_BACKLOG)
            port = bound.getsockname()[1]
        except ConfigError:
            bound.close()
            raise
        # The name of an unbound unix socket is empty, hence IndexError.
        except (OSError, IndexError) as error:
            bound.close()
            raise ConfigError(
                f"TCPStore: cannot listen on the socket of master_listen_fd=: {reason(error)}.\n"
                "  Pass a bound TCP socket on which no other process listens."
            ) from None
        return cls([bound], _tcp_address(host, port), secret, host, context)

    @property
    def port(self) -> int:
        """The port of a TCP server."""
        return int(self.address.rpartition(":")[2])

    @property
    def here(self) -> str:
        """The address for clients on this host. It needs no name service."""
        listener = self._listeners[0]
        if listener.family == socket.AF_UNIX:
            return self.address
        host = listener.getsockname()[0]
        return _tcp_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), self.port)

    def published(self) -> tuple[str, ...]:
        """The addresses of a TCP server for clients on other hosts."""
        names = [listener.getsockname()[:2] for listener in self._listeners]
        return tuple(_tcp_address(*name) for name in names if not name[0].startswith("127.") and name[0] != "::1")

    def describe_address(self) -> str:
        """Describe where a TCP server listens, and any problem of its host name; "" on a unix socket.

        Takes at most 1 s if the name service does not answer.
        """
        if self._listeners[0].family == socket.AF_UNIX:
            return ""
        hosts = [str(listener.getsockname()[0]) for listener in self._listeners]
        where = f"on port {self.port} of {', '.join(hosts)}"
        if all(host == "::1" or host.startswith("127.") for host in hosts):
            where += ", which only this host can reach"
        trouble = address_problem(self.host) if self.host else ""
        return where + (f"; {self.host!r} {trouble}" if trouble else "")

    def set_locally(self, key: str, value: bytes) -> None:
        """Set a value from this process, without a connection. Never blocks.

        All clients see the values that are set before ``start``.
        """
        # Only the thread may use the table. Appending to a deque is atomic.
        self._local_values.append((key, value))
        # Also before ``start``: it may be starting the thread at this moment, which then finds the wake-up.
        if self._stop_at is None:
            os.eventfd_write(self._wake.fileno(), 1)

    def start(self) -> StoreServer:
        """Start the thread that serves.

        Raises:
            OSError: The system cannot provide a thread or a descriptor.
        """
        self._selector = selectors.DefaultSelector()
        try:
            self._admission = Admission(
                self._selector,
                lambda: ServerHandshake(PROTOCOL, lambda subject: self._secret),
                self._admit,
                self._refuse,
                self.address,
            )
            self._admission.context = self._context
            for listener in self._listeners:
                self._admission.listen(listener)
            self._selector.register(self._wake, selectors.EVENT_READ, lambda _: self._add_new_listeners())
            thread = Daemon(target=self._run, name="allranks-store")
            thread.start()
        except BaseException:
            self._selector.close()
            raise
        self._thread = thread
        return self

    def listen_to_other_hosts(self) -> list[str]:
        """Listen on a TCP port of all published addresses, too, and return the addresses that other hosts dial.

        Call it after ``start``.

        Raises:
            ConfigError: The host publishes no address, no port is available, the server has no secret, or an
                ALLRANKS_TLS_ variable is wrong.
        """
        addresses = published_addresses()
        if not addresses or not self._secret:
            raise ConfigError(
                f"host {socket.gethostname()} has no network address that other hosts can reach (loopback and bridges"
                " of containers do not count).\n  Set the interface, for example ALLRANKS_IFACE=eth0."
            )
        # Set before the listeners are passed on, so that no connection is accepted without TLS.
        self._context = tls_context(server_side=True)
        listeners = tuple(_listen(addresses, 0))
        # Before the thread can take them: a wake-up for another reason may come at any time.
        where = [_tcp_address(*listener.getsockname()[:2]) for listener in listeners]
        self._new_listeners = listeners
        os.eventfd_write(self._wake.fileno(), 1)  # from here on the thread owns the listeners
        return where

    def close(self, linger_s: float = 0.0) -> None:
        """Stop listening, wait up to ``linger_s`` seconds until all clients disconnect, and stop the thread.

        Idempotent.
        """
        if self._stop_at is not None or self._forks != forks():
            return
        # Set before the wake-up, which makes the thread check it.
        self._stop_at = time.monotonic() + linger_s
        if self._thread is not None:
            os.eventfd_write(self._wake.fileno(), 1)
            self._thread.join()
        else:
            self._stop_listening()
        # After the join, because the thread uses the listeners and the eventfd until it exits.
        for listener in (*self._listeners, *self._new_listeners):
            listener.close()
        self._wake.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        with self._selector:
            try:
                # First, so that every client sees the values that were set before `start`.
                self._apply_local_values()
                while self._stop_at is None:
                    self._run_once()
                # The shutdown in `_stop_listening` also ends an `accept` of a process that shares the socket after a
                # fork. It frees the port even though that process has the socket open.
                self._admission.stop()
                # No code reads the eventfd from here on. While it is readable, `select` would not sleep.
                self._selector.unregister(self._wake)
                self._stop_listening()
                # A candidate that has begun its handshake is a late client. An idle connection may belong to any
                # program.
                while time.monotonic() < self._stop_at and (self._peers or self._admission.has_begun()):
                    self._run_once()
            finally:
                self._admission.close()
                for peer in list(self._peers):
                    self._drop(peer)
                for listener in self._listeners:
                    listener.close()

    def _add_new_listeners(self) -> None:
        os.eventfd_read(self._wake.fileno())
        self._apply_local_values()
        more, self._new_listeners = self._new_listeners, ()
        self._listeners += more
        self._admission.context = self._context
        for listener in more:
            self._admission.listen(listener)

    def _apply_local_values(self) -> None:
        while self._local_values:
            key, value = self._local_values.popleft()
            replies = self._table.handle(self, Set(key, value), time.monotonic())
            # The server is the client of this request, and needs no reply.
            self._reply([(client, reply) for client, reply in replies if client is not self])

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):  # a socket that the caller has bound may be in any state
                listener.shutdown(socket.SHUT_RDWR)

    def _run_once(self) -> None:
        deadlines = [self._table.next_deadline(), self._stop_at, self._admission.deadline()]
        first = min((d for d in deadlines if d is not None), default=None)
        ready = self._selector.select(None if first is None else max(0.0, first - time.monotonic()))
        for key, events in self._admission.in_order(ready):
            key.data(events)
        # After the events: a value that arrives just before the deadline still completes the wait.
        now = time.monotonic()
        self._reply(self._table.expire(now))
        self._admission.expire(now)

    def _admit(self, candidate: UnprovedPeer) -> None:
        peer = _Peer(candidate)
        # Before the verdict is sent, because `_flush` changes the registration if the socket's buffer is full.
        self._selector.register(peer.sock, peer.events, lambda events: self._progress(peer, events))
        self._peers[peer] = None
        self._send(peer, pack_frame(PROVED))
        self._receive(peer, b"")  # the decoder may already hold a request that arrived with the proof

    def _progress(self, peer: _Peer, events: int) -> None:
        # The peer may have been dropped earlier in this turn, or by the flush.
        if events & selectors.EVENT_WRITE and peer in self._peers:
            self._flush(peer)
        if events & selectors.EVENT_READ and peer in self._peers:
            self._read(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 16)
            if not data:
                raise WireError("it closed the connection")
            plain = data if peer.tls is None else self._unseal(peer, peer.tls, data)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._drop(peer, str(error))
            return
        self._receive(peer, plain)

    def _receive(self, peer: _Peer, plain: bytes) -> None:
        peer.decoder.feed(plain)
        try:
            while peer in self._peers and (frame := peer.decoder.next()) is not None:
                self._serve(peer, frame)
        except WireError as error:
            self._drop(peer, str(error))

    def _unseal(self, peer: _Peer, tls: Tls, data: bytes) -> bytes:
        plain = tls.receive(data)
        if due := tls.due():
            self._push(peer, due)
        return plain

    def _serve(self, peer: _Peer, frame: bytes) -> None:
        # One request at a time for each client, so that a client cannot make replies accumulate in the server.
        if self._table.is_waiting(peer) or peer.out:
            raise WireError("it sent a request before the reply to the previous request")
        try:
            replies = self._table.handle(peer, decode_request(frame), time.monotonic())
        except msgspec.ValidationError as error:
            replies = [(peer, RequestFailed(f"invalid argument: {error}"))]
        self._reply(replies)

    def _reply(self, replies: list[tuple[Hashable, Reply]]) -> None:
        for client, reply in replies:
            if isinstance(client, _Peer) and client in self._peers:
                self._send(client, self._frame(reply))

    def _frame(self, reply: Reply) -> bytes:
        # All ranks request the same large values. One frame serves all of them, even if they read it slowly.
        value = reply.values[0] if isinstance(reply, FoundValues) and len(reply.values) == 1 else None
        # The identity suffices: the table returns the same object until the key is set again.
        if value is not None and value is self._cached_frame[0]:
            return self._cached_frame[1]
        payload = encode(reply)
        if len(payload) > FRAME_LIMIT:
            why = (
                f"a reply of {len(payload)} bytes exceeds the limit of {FRAME_LIMIT} bytes.\n"
                "  Request fewer keys in one call, or transfer the data with send or broadcast."
            )
            payload = encode(RequestFailed(why))
        frame = pack_frame(payload)
        if value is not None and len(value) >= _LARGE:
            self._cached_frame = value, frame
        return frame

    def _send(self, peer: _Peer, frame: bytes) -> None:
        try:
            self._push(peer, frame if peer.tls is None else peer.tls.seal(frame))
        except TlsError as error:
            self._drop(peer, str(error))

    def _push(self, peer: _Peer, data: bytes) -> None:
        peer.out = memoryview(bytes(peer.out) + data if peer.out else data)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            peer.out = peer.out[peer.sock.send(peer.out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(peer, str(error))
            return
        # The server does not read from a peer with an unsent reply, so that replies do not accumulate.
        events = selectors.EVENT_WRITE if peer.out else selectors.EVENT_READ
        if events != peer.events:
            peer.events = events
            try:
                # If the kernel refuses (no memory), only this client is dropped.
                self._selector.modify(peer.sock, events, lambda events: self._progress(peer, events))
            except OSError as error:
                self._drop(peer, str(error))

    def _refuse(self, name: str, handshake: ServerHandshake | None, error: ConfigError | WireError) -> None:
        """Log a refusal, once per host and for at most 16 hosts: unauthenticated peers must not fill the log."""
        if not isinstance(error, ConfigError | TlsError):
            return
        if name not in self.refusals and len(self.refusals) < _MAX_LOGGED_REFUSALS:
            self.refusals[name] = f"{name} was refused: {error}"
            _log.warning("%s: %s", self.address, self.refusals[name])

    def _drop(self, peer: _Peer, why: str = "the server is closing") -> None:
        if peer not in self._peers:
            return
        _log.debug("%s: %s is dropped: %s", self.address, peer.name, why)
        del self._peers[peer]
        self._table.remove_client(peer)
        if peer.sock in self._selector.get_map():  # a `modify` that failed has removed it
            self._selector.unregister(peer.sock)
        peer.sock.close()


def _tcp_address(host: str, port: int) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    try:
        return listen(addresses, port, _BACKLOG)
    except OSError as error:
        holder = _port_holder(port) if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"Cannot listen on port {port} ({', '.join(addresses)}): {reason(error)}{holder}.\n"
            "  Choose another port (MASTER_PORT), the same on all ranks, or stop the program that uses it."
        ) from None


def _port_holder(port: int) -> str:
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            # 0A is the state LISTEN. Field 9 is the inode of the socket, to which links in /proc/PID/fd refer.
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdecimal, os.listdir("/proc")) if sockets else ():
        with suppress(OSError):  # a process of another user, or one that has just exited
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") in sockets for fd in os.listdir(f"/proc/{pid}/fd")):
                return f", held by pid {pid} ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    return ""
