"""Accepts connections, and passes on those whose peer has proved the secret.

All servers use it: the store, the launcher that agents connect to, the master that workers connect to, and the
connections between ranks of different hosts. Each of them has one thread with one selector. No peer that has not proved
the secret can block that thread, hold a slot for long, or occupy more than a few kilobytes.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError, SecretError
from allranks._base.system import refusal
from allranks._net.frames import FrameDecoder, TlsError, WireError, pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, HANDSHAKE_S, UNKNOWN, ServerHandshake, UnknownSubject
from allranks._net.sockets import keep_alive, unix_peer
from allranks._net.tls import Tls

if TYPE_CHECKING:
    import ssl

__all__ = ["Admission", "UnprovedPeer"]

_SLOTS = 64  # for connections without proof

# If all slots are taken, a candidate that has begun well keeps its slot for this long. New connections wait in the
# backlog of the kernel until then.
_PROOF_S = 0.015
_TLS_S = 0.1  # in the TLS handshake, which takes this thread 1 ms for each candidate
_CERTIFIED_S = 1.0  # after the TLS handshake: the authority has signed the candidate's certificate
# Seconds in which nothing is accepted if the system has no descriptor. Without a pause, the thread would spin.
_PAUSE_S = 0.05
_WARN_S = 10.0  # between two warnings: a stranger could fill the log

_log = logging.getLogger("allranks.net")


class UnprovedPeer:
    """A connection whose peer has not proved the secret yet.

    Attributes:
        sock: The connection. It does not block.
        name: Address of the peer, or its pid on a unix socket.
        handshake: The state of its handshake.
        tls: Its encryption, or None.
        decoder: The bytes that have arrived.
        since: When it was accepted, in seconds of ``time.monotonic``.
    """

    def __init__(self, sock: socket.socket, name: str, handshake: ServerHandshake, tls: Tls | None) -> None:
        self.sock = sock
        self.name = name
        self.handshake = handshake
        self.tls = tls
        self.decoder = FrameDecoder(HANDSHAKE_FRAME)
        self.since = time.monotonic()

    @property
    def stage(self) -> int:
        """Its progress: 0 no valid byte, 1 in the TLS handshake, 2 in the handshake."""
        return 2 if self.handshake.begun else int(self.tls is not None and self.tls.begun)

    @property
    def patience_s(self) -> float:
        """How long it keeps its slot if all slots are taken."""
        if self.stage == 2 and self.tls is not None:
            return _CERTIFIED_S
        return (0.0, _TLS_S, _PROOF_S)[self.stage]

    def send(self, payload: bytes) -> None:
        """Send one frame.

        Raises:
            OSError: The peer does not read, or has closed the connection.
        """
        frame = pack_frame(payload)
        self.send_bytes(frame if self.tls is None else self.tls.seal(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are. See `send`."""
        # All that a server sends in a handshake fits into the empty buffer of a new connection.
        if not data:
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            raise ConnectionAbortedError("it does not read from the connection")


class Admission:
    """Accepts connections in the thread that owns `selector`.

    The owner calls ``key.data(events)`` for each key that the selector returns, in the order of `in_order`, then
    `expire`, and selects again until `deadline` at the latest.

    Args:
        selector: The selector of the owner.
        handshake: Creates the server's half of a handshake.
        admit: Receives each candidate that has proved the secret, and sends the verdict. Its socket is no longer in
            the selector.
        refuse: Receives the name of a candidate with another version, secret, TLS setting or protocol, its handshake
            or None, and the error.
        label: Name of the server in the log.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handshake: Callable[[], ServerHandshake],
        admit: Callable[[UnprovedPeer], None],
        refuse: Callable[[str, ServerHandshake | None, ConfigError | WireError], None],
        label: str,
    ) -> None:
        self.context: ssl.SSLContext | None = None
        """Encrypts TCP connections. None: they are not encrypted."""
        self._selector = selector
        self._handshake = handshake
        self._admit = admit
        self._refuse = refuse
        self._label = label
        self._listeners: list[socket.socket] = []
        self._candidates: dict[UnprovedPeer, None] = {}
        self._paused_until: float | None = None  # until then no connection is accepted
        self._lacks_descriptors = False  # the system had no descriptor for the last connection
        self._warn_at = 0.0

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self._candidates)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket, too."""
        listener.setblocking(False)
        self._listeners.append(listener)
        # Otherwise `expire` registers it with the others.
        if self._paused_until is None:
            self._watch(listener)

    def stop(self) -> None:
        """Accept no more connections. Candidates may complete their handshakes."""
        self._unwatch()
        self._listeners.clear()
        self._paused_until = None

    def close(self) -> None:
        """Accept no more connections, and drop all candidates."""
        self.stop()
        for candidate in list(self._candidates):
            self.drop(candidate, "the server is closing")

    def has_begun(self) -> bool:
        """Return whether any candidate has begun a valid handshake."""
        return any(candidate.stage for candidate in self._candidates)

    def in_order(self, ready: list[tuple[selectors.SelectorKey, int]]) -> list[tuple[selectors.SelectorKey, int]]:
        """Sort what the selector has returned: a new connection can evict a candidate, so candidates are read first."""
        return sorted(ready, key=lambda item: item[0].fileobj in self._listeners)

    def deadline(self) -> float | None:
        """Return when `expire` must be called, in seconds of ``time.monotonic``, or None."""
        # The dict keeps the order of acceptance.
        oldest = next(iter(self._candidates), None)
        moments = [self._paused_until, None if oldest is None else oldest.since + HANDSHAKE_S]
        return min((moment for moment in moments if moment is not None), default=None)

    def expire(self, now: float) -> None:
        """Drop candidates that have not completed their handshake in time, and reopen if slots are free."""
        has_slots = len(self._candidates) < _SLOTS and not self._lacks_descriptors
        if self._paused_until is not None and (now >= self._paused_until or has_slots):
            self._paused_until = None
            for listener in self._listeners:
                self._watch(listener)
        for candidate in [c for c in self._candidates if c.since + HANDSHAKE_S <= now]:
            self.drop(candidate, "sent no valid handshake in time")

    def drop(self, candidate: UnprovedPeer, why: str) -> None:
        """Close the connection of a candidate. No effect if it is no longer one."""
        if self._remove_candidate(candidate):
            _log.debug("%s: %s is dropped: %s", self._label, candidate.name, why)
            candidate.sock.close()

    def _watch(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener))

    def _unwatch(self) -> None:
        watched = self._selector.get_map()
        for listener in self._listeners:
            if listener in watched:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        if self._paused_until is not None:  # became full in this turn
            return
        # A limit per turn, so that a crowd does not keep the owner from its other connections.
        for number in range(_SLOTS):
            # No candidate is evicted before the selector has reported that a connection waits for its slot.
            if len(self._candidates) >= _SLOTS and (number or not self._evict()):
                return
            try:
                sock, address = listener.accept()
            # No connection waits, or its peer has already closed it.
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no free descriptor
                self._pause(error)
                return
            self._lacks_descriptors = False
            self._add_candidate(sock, address)

    def _pause(self, error: OSError) -> None:
        """Evict a candidate, whose descriptor is free then. Until that is possible, accept nothing."""
        now = time.monotonic()
        if now >= self._warn_at:
            _log.warning("%s", refusal(f"{self._label} cannot accept a connection", error))
            self._warn_at = now + _WARN_S
        self._lacks_descriptors = True
        if self._candidates:
            self._evict()
        else:
            self._unwatch()
            self._paused_until = now + _PAUSE_S

    def _add_candidate(self, sock: socket.socket, address: tuple[str, int]) -> None:
        sock.setblocking(False)
        local = sock.family == socket.AF_UNIX
        if local:
            pid, uid = unix_peer(sock)
            name = f"pid {pid}"
            if uid != os.geteuid():
                self._refuse(f"user {uid}", None, ConfigError(f"{name} belongs to user {uid}"))
                sock.close()
                return
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # An IPv6 listener shows IPv4 clients with this prefix.
            name = str(address[0]).removeprefix("::ffff:")
        tls = None if local or self.context is None else Tls(self.context, server_side=True)
        candidate = UnprovedPeer(sock, name, self._handshake(), tls)
        try:
            self._selector.register(sock, selectors.EVENT_READ, lambda _: self._read(candidate))
        except OSError as error:  # no memory: this client tries again, and the others are served
            _log.warning("%s", refusal(f"{self._label} cannot serve {name}", error))
            sock.close()
            return
        keep_alive(sock)
        self._candidates[candidate] = None
        self._read(candidate)  # the bytes of a real client have arrived, so it does not wait for the next idle one

    def _evict(self) -> bool:
        """Free the slot of the candidate with the least progress. Return False if it may keep its slot for a while."""
        candidate = min(self._candidates, key=lambda candidate: (candidate.stage, candidate.since))
        self._read(candidate)  # its proof may have arrived
        if candidate in self._candidates:
            until = candidate.since + candidate.patience_s
            if time.monotonic() < until:
                self._unwatch()
                self._paused_until = until
                return False
            self.drop(candidate, "another client needs its slot")
        return True

    def _remove_candidate(self, candidate: UnprovedPeer) -> bool:
        if candidate not in self._candidates:
            return False
        del self._candidates[candidate]
        if candidate.sock in self._selector.get_map():
            self._selector.unregister(candidate.sock)
        return True

    def _read(self, candidate: UnprovedPeer) -> None:
        if candidate not in self._candidates:  # dropped in this turn
            return
        try:
            data = candidate.sock.recv(1 << 12)
            if not data:
                raise ConnectionResetError("it closed the connection")
            candidate.decoder.feed(data if candidate.tls is None else self._unseal(candidate, candidate.tls, data))
            while (frame := candidate.decoder.next()) is not None:
                # Read after the decoding, because TLS knows it only then.
                channel = b"" if candidate.tls is None else candidate.tls.channel
                answer = candidate.handshake.step(frame, channel)
                if answer is None:
                    self._admit_candidate(candidate)
                    return
                candidate.send(answer)
        except BlockingIOError:
            return
        except (ConfigError, TlsError) as error:
            self._reject(candidate, error)
        except UnknownSubject as error:
            with suppress(OSError):  # it is dropped in any case
                candidate.send(UNKNOWN)
            self.drop(candidate, str(error))
        except WireError as error:
            self._refuse(candidate.name, candidate.handshake, error)
            self.drop(candidate, str(error))
        except OSError as error:
            self.drop(candidate, str(error))

    def _admit_candidate(self, candidate: UnprovedPeer) -> None:
        self._remove_candidate(candidate)
        try:
            # The candidate has left the selector, because the owner registers the socket itself.
            self._admit(candidate)
        except OSError as error:  # the verdict could not be sent
            _log.debug("%s: %s is dropped: %s", self._label, candidate.name, error)
            candidate.sock.close()

    def _unseal(self, candidate: UnprovedPeer, tls: Tls, data: bytes) -> bytes:
        plain = tls.receive(data)
        candidate.send_bytes(tls.due())
        return plain

    def _reject(self, candidate: UnprovedPeer, error: ConfigError | TlsError) -> None:
        # Reported before the answer is sent: a client that has read the answer finds the report.
        self._refuse(candidate.name, candidate.handshake, error)
        with suppress(OSError, TlsError):  # it is dropped in any case
            if candidate.tls is not None and isinstance(error, TlsError):
                candidate.send_bytes(candidate.tls.due())
            elif not isinstance(error, SecretError):
                candidate.send(candidate.handshake.head)  # lets the error of a client of another version name both
        self.drop(candidate, str(error))
