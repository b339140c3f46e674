"""The server of a store: one thread, one selector, any number of clients.

It outlives strangers, junk, crowds and readers that do not read: who has not proved itself may keep little and
only for a short time, and no peer can make the server wait or hoard. The values themselves are ``table``'s.
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

from allranks._base.errors import ConfigError, SecretError, UsageError
from allranks._base.forks import Descriptor, Socket, forks
from allranks._base.frames import pack_frame
from allranks._base.threads import Daemon
from allranks._cluster.network import listen, published_addresses
from allranks._store.address import addresses_of, trouble_with
from allranks._store.client import credentials, reason
from allranks._store.table import KeyTable
from allranks._store.tls import Tls, tls_context
from allranks._store.wire import (
    FRAME_LIMIT,
    GREETING_LIMIT,
    GREETING_S,
    NONCE,
    PROVED,
    VERSION,
    Failed,
    Found,
    FrameDecoder,
    Greeting,
    Reply,
    Set,
    TlsError,
    WireError,
    decode_request,
    encode,
)

if TYPE_CHECKING:
    import ssl

__all__ = ["StoreServer"]

_GREETING_PEERS = 64
_MOST_REFUSALS = 16
_PROOF_S = 0.015  # where no room is left, whoever began well has so long to prove itself; others wait in the backlog
_HANDSHAKE_S = 0.1  # the same for TLS, whose handshakes take the server a millisecond each
_CERTIFIED_S = 1.0  # the same for who is through with TLS, and so no stranger to the authority
_BACKLOG = 4096  # thousands of ranks may start at once; the system may allow fewer
_LARGE = 4096
_log = logging.getLogger("allranks.store")


class _Peer:
    def __init__(self, sock: socket.socket, name: str, greeting: Greeting, since: float, tls: Tls | None) -> None:
        self.sock = sock
        self.name = name
        self.greeting: Greeting | None = greeting
        self.since = since
        self.tls = tls
        self.decoder = FrameDecoder(GREETING_LIMIT)
        self.out = memoryview(b"")
        self.events = selectors.EVENT_READ

    @property
    def stage(self) -> int:
        """How far it has come: 0 it has sent nothing valid, 1 TLS, 2 our greeting, 3 its proof."""
        if self.greeting is None:
            return 3
        return 2 if self.greeting.begun else int(self.tls is not None and self.tls.begun)

    @property
    def patience_s(self) -> float:
        """How long it may stay where no room is left."""
        if self.stage == 2 and self.tls is not None:
            return _CERTIFIED_S
        return (0.0, _HANDSHAKE_S, _PROOF_S)[self.stage]


class StoreServer:
    """Holds a store's values and serves them from one thread.

    Made by ``unix`` or ``tcp``, which bind and listen but start nothing, so that a process can fork its ranks
    before it has a thread. In a forked child all of it is closed; ``close`` does nothing there.

    Attributes:
        address: what clients connect to.
        host: the name or address that a TCP server was given.
        refusals: one line for each host that came with another secret or version.
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
        self._more: tuple[socket.socket, ...] = ()  # listeners that the thread has not taken yet
        self._given: deque[tuple[str, bytes]] = deque()  # values that the thread has not taken yet
        self._forks = forks()
        self._wake = Descriptor.of(lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread: threading.Thread | None = None
        self._stop_at: float | None = None
        self._table = KeyTable()
        self._full_until: float | None = None  # until then nobody is let in
        self._last: tuple[bytes | None, bytes] = (None, b"")
        self._peers: dict[_Peer, None] = {}
        self._strangers: dict[_Peer, None] = {}  # the peers that have not proved themselves yet

    @classmethod
    def unix(cls, secret: bytes = b"", name: str = "") -> StoreServer:
        """Listens on an abstract unix socket; only this user's processes get in.

        Args:
            secret: what clients on TCP must know, if it listens to other hosts later.
            name: the socket's, where clients know it; else one that nobody can guess.

        Raises:
            ConfigError: the name is taken.
        """
        name = name or f"allranks-{os.urandom(16).hex()}"
        listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name)
        except OSError as error:
            listener.close()
            raise ConfigError(f"Cannot listen on the unix socket @{name}: {reason(error)}.") from None
        listener.listen(_BACKLOG)
        return cls([listener], f"unix:@{name}", secret)

    @classmethod
    def tcp(cls, host: str, port: int, secret: bytes) -> StoreServer:
        """Listens on a TCP port; only holders of the secret get in, and with TLS where ALLRANKS_TLS_ is set.

        Args:
            host: what the clients dial: a name or an address of this host. Where that is listened on, ``address``
                says; "" stands for all that the host publishes.
            port: the port; 0 for a free one.
            secret: what clients must know.

        Raises:
            ConfigError: the port cannot be had; says who holds it, if that can be seen. Or an ALLRANKS_TLS_ variable
                is wrong.
        """
        if not secret:
            raise UsageError("StoreServer.tcp needs a secret: see load_secret.")
        context = tls_context(server_side=True)
        addresses = addresses_of(host)
        listeners = _listen(addresses, port)
        shown = addresses[0] if host == "localhost" else host or socket.gethostname()
        return cls(listeners, _tcp_address(shown, listeners[0].getsockname()[1]), secret, host, context)

    @classmethod
    def on(cls, bound: socket.socket, host: str, secret: bytes) -> StoreServer:
        """Listens on a TCP socket that somebody else has bound; takes it over."""
        try:
            context = tls_context(server_side=True)
            bound.listen(_BACKLOG)
            port = bound.getsockname()[1]
        except ConfigError:
            bound.close()
            raise
        except (OSError, IndexError) as error:
            bound.close()
            raise ConfigError(f"Cannot listen on the socket that was given: {reason(error)}.") from None
        return cls([bound], _tcp_address(host, port), secret, host, context)

    @property
    def port(self) -> int:
        """The port of a TCP server."""
        return int(self.address.rpartition(":")[2])

    @property
    def here(self) -> str:
        """The address for clients on this host, which needs no name service."""
        listener = self._listeners[0]
        if listener.family == socket.AF_UNIX:
            return self.address
        host = listener.getsockname()[0]
        return _tcp_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), self.port)

    def published(self) -> tuple[str, ...]:
        """The addresses of a TCP server for clients on other hosts."""
        names = [listener.getsockname()[:2] for listener in self._listeners]
        return tuple(_tcp_address(*name) for name in names if not name[0].startswith("127.") and name[0] != "::1")

    def whereabouts(self) -> str:
        """Where a TCP server listens, and what is wrong with the name that its clients may dial; "" on a unix socket.

        Takes a second at most, where the name service does not answer.
        """
        if self._listeners[0].family == socket.AF_UNIX:
            return ""
        hosts = [str(listener.getsockname()[0]) for listener in self._listeners]
        where = f"on port {self.port} of {', '.join(hosts)}"
        if all(host == "::1" or host.startswith("127.") for host in hosts):
            where += ", which only this host reaches"
        trouble = trouble_with(self.host) if self.host else ""
        return where + (f"; {self.host!r} {trouble}" if trouble else "")

    def put(self, key: str, value: bytes) -> None:
        """Sets a value without being a client. Never waits. What is put before ``start`` is there for all."""
        self._given.append((key, value))
        if self._thread is not None:
            os.eventfd_write(self._wake.fileno(), 1)

    def start(self) -> StoreServer:
        """Starts the thread that serves.

        Raises:
            OSError: the system has no thread, or no descriptor, for it.
        """
        self._selector = selectors.DefaultSelector()
        try:
            for listener in self._listeners:
                listener.setblocking(False)
            self._listen_to_strangers(True)
            self._selector.register(self._wake, selectors.EVENT_READ)
            thread = Daemon(target=self._run, name="allranks-store")
            thread.start()
        except BaseException:
            self._selector.close()
            raise
        self._thread = thread
        return self

    def listen_to_other_hosts(self) -> list[str]:
        """Listens on a TCP port of all published addresses, too, once it has started. Returns what other hosts dial.

        Raises:
            ConfigError: there is no such address, or no port can be had.
        """
        addresses = published_addresses()
        if not addresses or not self._secret:
            raise ConfigError(f"host {socket.gethostname()} has no network address that other hosts could reach.")
        self._context = tls_context(server_side=True)
        self._more = tuple(_listen(addresses, 0))
        where = [_tcp_address(*listener.getsockname()[:2]) for listener in self._more]
        os.eventfd_write(self._wake.fileno(), 1)  # from here on they are the thread's
        return where

    def close(self, linger_s: float = 0.0) -> None:
        """Stops listening, waits up to ``linger_s`` for the clients to go, and ends the thread. Idempotent."""
        if self._stop_at is not None or self._forks != forks():
            return
        self._stop_at = time.monotonic() + linger_s
        if self._thread is not None:
            os.eventfd_write(self._wake.fileno(), 1)
            self._thread.join()
        else:
            self._stop_listening()
        for listener in (*self._listeners, *self._more):
            listener.close()
        self._wake.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        with self._selector:
            try:
                self._take_given()
                while self._stop_at is None:
                    self._turn()
                # Also wakes whoever shares this socket after a fork, and frees the port although they hold it.
                self._listen_to_strangers(False)
                self._selector.unregister(self._wake)
                self._stop_listening()
                while time.monotonic() < self._stop_at and any(peer.stage for peer in self._peers):
                    self._turn()
            finally:
                for peer in list(self._peers):
                    self._drop(peer)
                for listener in self._listeners:
                    listener.close()

    def _listen_to_strangers(self, listens: bool) -> None:
        listened = self._selector.get_map()
        for listener in self._listeners:
            if listens and listener not in listened:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            elif not listens and listener in listened:
                self._selector.unregister(listener)

    def _take_more(self) -> None:
        os.eventfd_read(self._wake.fileno())
        self._take_given()
        more, self._more = self._more, ()
        self._listeners += more
        for listener in more:
            listener.setblocking(False)
            if self._full_until is None:
                self._selector.register(listener, selectors.EVENT_READ, listener)

    def _take_given(self) -> None:
        while self._given:
            key, value = self._given.popleft()
            due = self._table.handle(self, Set(key, value), time.monotonic())
            self._reply([(who, reply) for who, reply in due if who is not self])

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):  # a socket that was given may be in any state
                listener.shutdown(socket.SHUT_RDWR)

    def _turn(self) -> None:
        deadlines = [
            self._table.next_deadline(),
            self._stop_at,
            self._full_until,
            *(p.since + GREETING_S for p in self._strangers),
        ]
        first = min((d for d in deadlines if d is not None), default=None)
        ready = self._selector.select(None if first is None else max(0.0, first - time.monotonic()))
        # Whoever comes new may push out others that have not proved themselves yet: they are read before.
        for key, events in sorted(ready, key=lambda item: item[0].data in self._listeners):
            peer = key.data
            if peer is None:
                self._take_more()
            elif peer in self._listeners:
                if self._full_until is None:
                    self._accept(peer)
            elif peer in self._peers:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ and peer in self._peers:
                    self._read(peer)
        now = time.monotonic()
        if self._full_until is not None and (now >= self._full_until or len(self._strangers) < _GREETING_PEERS):
            self._full_until = None
            if self._stop_at is None:
                self._listen_to_strangers(True)
        self._reply(self._table.expire(now))
        for peer in [p for p in self._strangers if p.since + GREETING_S <= now]:
            self._drop(peer, "sent no valid greeting in time")

    def _accept(self, listener: socket.socket) -> None:
        for number in range(_GREETING_PEERS):
            # Nobody makes room before the selector has reported that a peer waits for it.
            if len(self._strangers) >= _GREETING_PEERS and (number or not self._evict()):
                return
            try:
                sock, where = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left
                _log.warning("%s cannot accept a connection: %s", self.address, error)
                self._evict() if self._strangers else time.sleep(0.05)
                return
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                pid, uid, _ = credentials(sock)
                name = f"pid {pid}"
                if uid != os.geteuid():
                    self._note_refusal(f"user {uid}", f"{name} of user {uid} was refused")
                    sock.close()
                    continue
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                name = str(where[0]).removeprefix("::ffff:")
            context = None if sock.family == socket.AF_UNIX else self._context
            tls = None if context is None else Tls(context, server_side=True)
            peer = _Peer(sock, name, Greeting(self._secret, os.urandom(NONCE)), time.monotonic(), tls)
            try:
                self._selector.register(sock, peer.events, peer)
            except OSError as error:  # no memory: this one tries again, and the others are served
                _log.warning("%s cannot serve %s: %s", self.address, name, error)
                sock.close()
                continue
            self._peers[peer] = self._strangers[peer] = None
            self._read(peer)  # a real client has spoken by now, and is through before the next idle one comes

    def _evict(self) -> bool:
        peer = min(self._strangers, key=lambda peer: (peer.stage, peer.since))
        self._read(peer)  # its proof may have come by now
        if peer in self._strangers:
            until = peer.since + peer.patience_s
            if time.monotonic() < until:
                self._listen_to_strangers(False)
                self._full_until = until
                return False
            self._drop(peer, "had to make room")
        return True

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 16 if peer.greeting is None else 1 << 12)
            if not data:
                raise WireError("it closed the connection")
            peer.decoder.feed(data if peer.tls is None else self._unseal(peer, peer.tls, data))
            while peer in self._peers and (frame := peer.decoder.next()) is not None:
                if peer.greeting is None:
                    self._serve(peer, frame)
                else:
                    self._greet(peer, peer.greeting, frame)
        except BlockingIOError:
            return
        except (ConfigError, TlsError) as error:
            self._refuse(peer, error)
        except (OSError, WireError) as error:
            self._drop(peer, str(error))

    def _unseal(self, peer: _Peer, tls: Tls, data: bytes) -> bytes:
        plain = tls.receive(data)
        if due := tls.due():
            self._push(peer, due)
        return plain

    def _greet(self, peer: _Peer, greeting: Greeting, frame: bytes) -> None:
        answer = greeting.step(frame, b"" if peer.tls is None else peer.tls.channel)
        if answer is not None:
            self._send(peer, pack_frame(answer))
        else:
            peer.greeting = None
            peer.decoder.limit = FRAME_LIMIT
            del self._strangers[peer]
            self._send(peer, pack_frame(PROVED))

    def _serve(self, peer: _Peer, frame: bytes) -> None:
        if self._table.waits(peer) or peer.out:
            raise WireError("a request before the reply to the last one")
        try:
            due = self._table.handle(peer, decode_request(frame), time.monotonic())
        except msgspec.ValidationError as error:
            due = [(peer, Failed(f"a wrong argument: {error}"))]
        self._reply(due)

    def _reply(self, due: list[tuple[Hashable, Reply]]) -> None:
        for who, reply in due:
            if isinstance(who, _Peer) and who in self._peers:
                self._send(who, self._frame(reply))

    def _frame(self, reply: Reply) -> bytes:
        # All ranks ask for the same large values: each such frame is made and kept once, however slowly they read.
        value = reply.values[0] if isinstance(reply, Found) and len(reply.values) == 1 else None
        if value is not None and value is self._last[0]:
            return self._last[1]
        payload = encode(reply)
        if len(payload) > FRAME_LIMIT:
            payload = encode(Failed(f"a reply of {len(payload)} bytes, the limit is {FRAME_LIMIT}"))
        frame = pack_frame(payload)
        if value is not None and len(value) >= _LARGE:
            self._last = value, frame
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
        # A peer that does not take its replies is not read either, so that replies do not pile up in the server.
        events = selectors.EVENT_WRITE if peer.out else selectors.EVENT_READ
        if events != peer.events:
            peer.events = events
            try:
                self._selector.modify(peer.sock, events, peer)
            except OSError as error:
                self._drop(peer, str(error))

    def _refuse(self, peer: _Peer, error: ConfigError | TlsError) -> None:
        # Recorded before the answer is sent: whoever has read the answer finds the record.
        self._note_refusal(peer.name, f"{peer.name} was refused: {error}")
        if peer.tls is not None and isinstance(error, TlsError):
            if alert := peer.tls.due():
                self._push(peer, alert)
        elif not isinstance(error, SecretError):
            self._send(peer, pack_frame(VERSION))  # shows a client of another version, or with TLS, what differs
        self._drop(peer)

    def _note_refusal(self, who: str, what: str) -> None:
        """Log it, once for each, and for few: a stranger could fill the log."""
        if who not in self.refusals and len(self.refusals) < _MOST_REFUSALS:
            self.refusals[who] = what
            _log.warning("%s: %s", self.address, what)

    def _drop(self, peer: _Peer, why: str = "the server ends") -> None:
        if peer not in self._peers:  # its answer could not be sent, and then it had been wrong, too
            return
        _log.debug("%s: %s is dropped: %s", self.address, peer.name, why)
        del self._peers[peer]
        self._strangers.pop(peer, None)
        self._table.forget(peer)
        if peer.sock in self._selector.get_map():  # a change that failed has removed it
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
            "  Choose another port (MASTER_PORT), the same on all ranks, or end the program that holds it."
        ) from None


def _port_holder(port: int) -> str:
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdecimal, os.listdir("/proc")) if sockets else ():
        with suppress(OSError):  # another user's process, or one that has just ended
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") in sockets for fd in os.listdir(f"/proc/{pid}/fd")):
                return f", held by pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return ""
