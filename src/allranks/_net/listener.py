"""Connections of agents to a launcher, and of workers to a master, if no pipe connects them.

srun starts all agents at the same time, and a user who types the same command on every host starts them one after the
other. These agents connect to the launcher. Each side proves the job's secret, under another key than for a store, so a
rank that connects to the launcher's port by mistake gets an error.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import queue
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from allranks._base.errors import ConfigError
from allranks._base.forks import Descriptor, Socket
from allranks._base.system import reason
from allranks._base.threads import Daemon
from allranks._cluster.network import listen
from allranks._net.admission import Admission, UnprovedPeer
from allranks._net.frames import WireError
from allranks._net.handshake import HANDSHAKE_FRAME, HANDSHAKE_S, PROVED, ClientHandshake, Protocol, ServerHandshake
from allranks._net.sockets import check_connected, keep_alive
from allranks._net.stream import ClientStream

__all__ = ["Listener", "dial"]

_PROTOCOL = Protocol(b"allranks-agent/", b"1")
_BACKLOG = 1024
_CONNECT_S = 3.0  # seconds for one address, because another one may answer
_PAUSE_S = 0.05  # seconds between two rounds of attempts
_REMARK_S = 10.0  # seconds until `dial` reports once that it still waits
_LOST_AFTER_S = 30  # seconds until the kernel reports that the other host has vanished


class Listener:
    """Accepts agents or workers. One thread runs all handshakes.

    Args:
        addresses: Addresses of this host to listen on; "0.0.0.0" for all.
        port: The port; 0 for a free one.
        secret: The secret that a peer must prove.
        name: Name of an abstract unix socket to listen on, too; "" for none.

    Attributes:
        port: The port; 0 if there are no addresses.
        wake: Becomes readable when a connection was accepted.
        refused: Why the last connection from an address was refused, by address.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, addresses: Sequence[str], port: int, secret: bytes, name: str = "") -> None:
        key = _key(secret)
        self._sockets = listen(addresses, port, _BACKLOG)
        self.port: int = self._sockets[0].getsockname()[1] if self._sockets else 0
        if name:
            self._sockets.append(Socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._sockets[-1].bind("\0" + name)
            self._sockets[-1].listen(_BACKLOG)
        self.refused: dict[str, str] = {}
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._stop = Descriptor.of(lambda: os.eventfd(0, os.EFD_CLOEXEC))
        self._selector = selectors.PollSelector()  # uses no descriptor, which a forked child would inherit
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._admission = Admission(
            self._selector,
            lambda: ServerHandshake(_PROTOCOL, lambda subject: key),
            self._admit,
            self._refuse,
            f"port {self.port}",
        )
        for sock in self._sockets:
            self._admission.listen(sock)
        self._thread = Daemon(target=self._run, name="allranks-listener")
        self._thread.start()

    def take(self) -> list[socket.socket]:
        """Return the connections that were accepted since the last call."""
        try:
            # Reset before the queue is emptied: a connection that arrives in between makes `wake` readable again.
            os.eventfd_read(self.wake)
        except BlockingIOError:
            return []
        taken = []
        while not self._accepted.empty():
            taken.append(self._accepted.get())
        return taken

    def close(self) -> None:
        """Stop accepting, and close the connections that were not taken."""
        os.eventfd_write(self._stop.fileno(), 1)
        # Before the sockets are closed, because the thread selects on them.
        self._thread.join()
        for sock in self._sockets:
            with suppress(OSError):  # frees the port even if another process has inherited the socket
                sock.shutdown(socket.SHUT_RDWR)
        for sock in (*self._sockets, *self.take()):
            sock.close()
        os.close(self.wake)
        self._stop.close()

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        finally:
            self._admission.close()

    def _run_once(self) -> bool:
        """Return False if the listener is to stop."""
        deadline = self._admission.deadline()
        ready = self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for key, events in self._admission.in_order(ready):
            # Only `_stop` has no callback.
            if key.data is None:
                return False
            key.data(events)
        self._admission.expire(time.monotonic())
        return True

    def _admit(self, candidate: UnprovedPeer) -> None:
        candidate.send(PROVED)
        candidate.sock.settimeout(None)
        keep_alive(candidate.sock, _LOST_AFTER_S)
        self._accepted.put(candidate.sock)
        # After the connection is in the queue, because this wakes the reader.
        os.eventfd_write(self.wake, 1)

    def _refuse(self, name: str, handshake: ServerHandshake | None, error: ConfigError | WireError) -> None:
        self.refused[name] = str(error)


def dial(
    targets: Sequence[tuple[str, int]],
    secret: bytes,
    until: float,
    on_wait: Callable[[str], None] = lambda last: None,
    *,
    peer: str = "launcher",
) -> socket.socket:
    """Connect to the listener of a launcher or of a master. Try until it answers.

    Args:
        targets: Hosts and ports to try; the first that answers is used. A host that begins with ``@`` is the name of a
            unix socket.
        secret: The secret that both sides must have.
        until: When to give up, in seconds of ``time.monotonic``.
        on_wait: Called once with the last error if it takes longer than 10 s.
        peer: Name of the other side in errors.

    Raises:
        SecretError: The listener has another secret.
        ConfigError: No listener answered in time, or the only target has another version or purpose.
    """
    trouble = "not tried"
    remark_at = time.monotonic() + _REMARK_S
    while True:
        for address, port in targets:
            sock: socket.socket | None = None
            try:
                sock = _connect(address, port, min(_CONNECT_S, max(0.1, until - time.monotonic())))
                # The caller reads the socket itself, so no byte after the verdict may be consumed here.
                ClientStream(sock, exact=True).enter(
                    ClientHandshake(_PROTOCOL, _key(secret)), time.monotonic() + HANDSHAKE_S, HANDSHAKE_FRAME
                )
            except (OSError, UnicodeError, WireError, ConfigError) as error:
                trouble = f"{address}:{port}: {reason(error) if isinstance(error, OSError) else error}"
                if sock is not None:
                    sock.close()
                if isinstance(error, ConfigError) and len(targets) == 1:  # another attempt has the same result
                    raise type(error)(trouble) from None
                continue
            sock.settimeout(None)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, _LOST_AFTER_S)
            return sock
        if time.monotonic() >= until:
            where = ", ".join(f"{address}:{port}" for address, port in targets)
            longer = " To wait longer, set --join-timeout." if peer == "launcher" else ""
            raise ConfigError(
                f"found no {peer} at {where} (last: {trouble}).\n"
                f"  Check that it is running and that this host can reach it.{longer}"
            )
        if time.monotonic() >= remark_at:
            remark_at = math.inf
            on_wait(trouble)
        time.sleep(_PAUSE_S)


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, "\0" + address[1:])]
    if not address.startswith("@"):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        targets = [(family, target) for family, _, _, _, target in found]
    trouble: Exception = OSError(errno.EADDRNOTAVAIL, "the host name has no address")
    for family, target in targets:
        sock = Socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(target)
            check_connected(sock)
            return sock
        except (OSError, ConfigError) as error:
            sock.close()
            trouble = error
    raise trouble


def _key(secret: bytes) -> bytes:
    return hmac.digest(secret, b"allranks launcher", "sha256")
