"""A blocking connection of a client: frames over TCP or a unix socket, with TLS if a context is given."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from allranks._base.timeouts import LONGEST_WAIT_S
from allranks._net.frames import FrameDecoder, TlsError, WireError, pack_frame
from allranks._net.handshake import HANDSHAKE_FRAME, PROVED, ClientHandshake
from allranks._net.tls import Tls

if TYPE_CHECKING:
    import ssl

__all__ = ["ClientStream"]


class ClientStream:
    """A connection that sends and receives whole frames.

    Args:
        sock: A connected socket.
        context: Encrypts the connection. None: it is not encrypted.
        exact: Read no byte after the frame that is received, because another reader continues on the socket.

    Attributes:
        sock: The socket.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None = None, *, exact: bool = False) -> None:
        self.sock = sock
        self._exact = exact
        self._tls = None if context is None else Tls(context, server_side=False)
        self._decoder = FrameDecoder(HANDSHAKE_FRAME)

    def enter(self, handshake: ClientHandshake, deadline: float, limit: int) -> None:
        """Run the client's half of the handshake.

        Args:
            handshake: The handshake.
            deadline: When to give up, in seconds of ``time.monotonic``.
            limit: The largest frame accepted after the handshake, in bytes.

        Raises:
            OSError: The connection broke, or the server did not answer in time.
            WireError: The peer does not use this protocol.
            ConfigError: The peer has another version, or (SecretError) another secret.
        """
        answer = self.ask(handshake.begin(), deadline)
        self.send(handshake.prove(answer, b"" if self._tls is None else self._tls.channel))
        handshake.check_server()
        if self.receive(deadline) != PROVED:
            raise WireError("its answer does not use allranks's protocol")
        self._decoder.limit = limit

    def ask(self, payload: bytes, deadline: float) -> bytes:
        """Send a frame, and return the next one that arrives. See `receive`."""
        self._limit_wait(deadline)
        self.send(payload)
        return self.receive(deadline)

    def send(self, payload: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: The connection broke, or the peer did not read in time.
        """
        frame = pack_frame(payload)
        self.sock.sendall(frame if self._tls is None else self._tls.seal(frame))

    def receive(self, deadline: float) -> bytes:
        """Return the next frame.

        Raises:
            OSError: The connection broke, or no frame arrived in time.
            WireError: The peer violated the protocol.
        """
        while (frame := self._decoder.next()) is None:
            self._limit_wait(deadline)
            data = self.sock.recv(self._decoder.missing if self._exact else 1 << 16)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._decoder.feed(data if self._tls is None else self._unseal(self._tls, data))
        return frame

    def _unseal(self, tls: Tls, data: bytes) -> bytes:
        try:
            plain = tls.receive(data)
        except TlsError:
            with suppress(OSError):  # the peer receives the reason if it still reads
                self.sock.sendall(tls.due())
            raise
        if due := tls.due():
            self.sock.sendall(due)
        return plain

    def _limit_wait(self, deadline: float) -> None:
        # A timeout of 0 would make the socket non-blocking.
        self.sock.settimeout(min(max(deadline - time.monotonic(), 0.001), LONGEST_WAIT_S))
