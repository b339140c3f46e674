"""Connections between a launcher and agents that have no pipe to it.

srun starts all agents at once, and a user who types the same command on every host starts them one by one. These agents
connect to the launcher. Both sides prove that they have the job's secret, by the handshake of the stores under another
key. So a rank that connects to the launcher's port by mistake gets an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from allranks._base.errors import ConfigError, SecretError
from allranks._base.forks import Socket
from allranks._base.frames import pack_frame, read_frame
from allranks._base.threads import Daemon
from allranks._cluster.network import listen
from allranks._store import reason
from allranks._store.wire import (
    GREETING_LIMIT,
    GREETING_S,
    KNOCK,
    NONCE,
    PROVED,
    SHARE_SECRET,
    VERSION,
    FrameDecoder,
    Greeting,
    WireError,
    answer_greeting,
)

__all__ = ["Listener", "detect_soon", "dial", "store_secret"]

_AT_ONCE = 64
_BACKLOG = 1024
_PAUSE_S = 0.05
_REMARK_S = 10.0


class Listener:
    """Accepts agents. One thread accepts, and each handshake has its own, so that no connection delays another.

    If many are unproved at once, the one that has been there longest is closed.

    Args:
        addresses: of this host, to listen on; "0.0.0.0" for all.
        port: the port; 0 for a free one.
        secret: what a peer must prove that it has.
        name: of an abstract unix socket to listen on, too; "" for none.

    Attributes:
        port: the port; 0 where there are no addresses.
        wake: becomes readable when a connection was accepted.
        refused: why the last connection was refused, by address.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, addresses: Sequence[str], port: int, secret: bytes, name: str = "") -> None:
        self._secret = _derived(secret)
        self._sockets = listen(addresses, port, _BACKLOG)
        self.port: int = self._sockets[0].getsockname()[1] if self._sockets else 0
        if name:
            self._sockets.append(Socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._sockets[-1].bind("\0" + name)
            self._sockets[-1].listen(_BACKLOG)
        self.refused: dict[str, str] = {}
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._came: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._strangers: dict[socket.socket, None] = {}
        self._closing = threading.Lock()
        self._closed = False
        self._threads = [Daemon(target=self._accept, args=(sock,)) for sock in self._sockets]
        for thread in self._threads:
            thread.start()

    def take(self) -> list[socket.socket]:
        """The connections that were accepted since the last call."""
        try:
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return []
        came = []
        while not self._came.empty():
            came.append(self._came.get())
        return came

    def close(self) -> None:
        """Accepts no connections any more."""
        with self._closing:
            self._closed = True
        for server in self._sockets:
            server.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
        for thread in self._threads:
            thread.join()
        for server in self._sockets:
            server.close()
        for sock in self.take():
            sock.close()
        os.close(self.wake)

    def _accept(self, server: socket.socket) -> None:
        while not self._closed:
            try:
                sock, peer = server.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE_S)  # out of descriptors, for a moment
                continue
            with self._closing:
                if len(self._strangers) >= _AT_ONCE:
                    with contextlib.suppress(OSError):  # it may be gone already
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
                self._strangers[sock] = None
            threading.Thread(
                target=self._greet, args=(sock, str(peer[0]) if peer else "this host"), daemon=True
            ).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            greeting, frames = Greeting(self._secret, os.urandom(NONCE)), FrameDecoder(GREETING_LIMIT)
            until = time.monotonic() + GREETING_S
            while (answer := greeting.step(read_frame(sock, frames, until))) is not None:
                sock.sendall(pack_frame(answer))
            sock.sendall(pack_frame(PROVED))
            _keep(sock)
            with self._closing:
                if self._closed:
                    raise ConnectionResetError("the job is over")
                self._strangers.pop(sock, None)
                self._came.put(sock)
                os.eventfd_write(self.wake, 1)
        except (OSError, WireError, ConfigError) as error:
            if not isinstance(error, OSError):
                self.refused[peer] = str(error)
            with self._closing:
                self._strangers.pop(sock, None)
                sock.close()


def dial(
    targets: Sequence[tuple[str, int]],
    secret: bytes,
    until: float,
    on_wait: Callable[[str], None] = lambda last: None,
    *,
    whom: str = "launcher",
) -> socket.socket:
    """Connects to the listener of a launcher or of a master; tries until it answers.

    Args:
        targets: hosts and ports where it may be; the first that answers is taken. A host that begins with ``@`` is the
            name of a unix socket.
        secret: what both must have.
        until: when to give up (``time.monotonic``).
        on_wait: called once with the last error, if it takes long.
        whom: the name of the peer in errors.

    Raises:
        SecretError: the launcher has another secret.
        ConfigError: no launcher answered in time.
    """
    trouble = "not tried"
    told_at = time.monotonic() + _REMARK_S
    while True:
        for address, port in targets:
            sock: socket.socket | None = None
            try:
                sock = _connect(address, port, min(3.0, max(0.1, until - time.monotonic())))
                _enter(sock, _derived(secret))
            except (OSError, UnicodeError, WireError, ConfigError) as error:
                trouble = f"{address}:{port}: {reason(error) if isinstance(error, OSError) else error}"
                if sock is not None:
                    sock.close()
                if isinstance(error, SecretError) and len(targets) == 1:
                    raise SecretError(trouble) from None
                continue
            _keep(sock)
            return sock
        if time.monotonic() >= until:
            where = ", ".join(f"{address}:{port}" for address, port in targets)
            longer = "; longer: --join-timeout" if whom == "launcher" else ""
            raise ConfigError(f"found no {whom} at {where} (last: {trouble}{longer})")
        if time.monotonic() >= told_at:
            told_at = math.inf
            on_wait(trouble)
        time.sleep(_PAUSE_S)


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, "\0" + address[1:])]
    if not address.startswith("@"):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        targets = [(family, target) for family, _, _, _, target in found]
    for family, target in targets:
        sock = Socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(target)
            return sock
        except OSError as error:
            sock.close()
            trouble = error
    raise trouble


def _enter(sock: socket.socket, secret: bytes) -> None:
    frames, until = FrameDecoder(GREETING_LIMIT), time.monotonic() + GREETING_S
    nonce = os.urandom(NONCE)
    sock.sendall(pack_frame(VERSION + nonce + KNOCK))
    proof, right = answer_greeting(secret, nonce, read_frame(sock, frames, until))
    sock.sendall(pack_frame(proof))
    if not right:
        raise SecretError(f"its secret differs from ours; {SHARE_SECRET}")
    if read_frame(sock, frames, until) != PROVED:
        raise WireError("what it sent is not allranks")


def _keep(sock: socket.socket) -> None:
    """Makes sure that a host which vanishes is detected after half a minute."""
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def detect_soon(sock: socket.socket) -> None:
    """Makes a connection end 15 s after the other host has vanished, and outlive a cut of 7 s.

    TCP doubles the time between its attempts, so the next one may come 14 s after the beginning of such a cut.
    """
    if sock.family == socket.AF_UNIX:
        return
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 6)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


def store_secret(secret: bytes, salt: str) -> bytes:
    """The secret of a job's store. Both sides of a connection can compute it, so it is never sent.

    Args:
        secret: what was proved in the handshake.
        salt: text of this job only; it need not be secret.
    """
    return hmac.digest(secret, b"allranks store|" + salt.encode(), hashlib.sha256).hex().encode()


def _derived(secret: bytes) -> bytes:
    return hmac.digest(secret, b"allranks launcher", hashlib.sha256)
