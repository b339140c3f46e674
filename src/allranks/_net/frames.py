"""Frames: messages on a stream of bytes. A 4-byte big-endian length precedes each message.

Stores, agents, the reports of ranks, the connections between hosts, and the bootstrap of workers use them.
"""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["LARGEST", "SET_TLS", "FrameDecoder", "TlsError", "WireError", "pack_frame", "read_frame"]

LARGEST = (1 << 32) - 1
"""The largest frame that can be announced."""

SET_TLS = (
    "set ALLRANKS_TLS_CERT, ALLRANKS_TLS_KEY and ALLRANKS_TLS_CA on both sides, with certificates that the same"
    " authority signed, or on neither side"
)

_LENGTH = struct.Struct(">I")
_TLS_HANDSHAKE = b"\x16\x03"  # type of the record and major version, the first bytes of a TLS client


class WireError(Exception):
    """A peer violated the protocol. Internal: its connection is dropped."""


class TlsError(WireError):
    """Only one side uses TLS, or the two sides do not accept each other. Both sides report it."""


def pack_frame(payload: bytes) -> bytes:
    """Return the payload, preceded by its length."""
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Splits a stream into frames. It keeps no more bytes than it received, whatever length a peer announces.

    Attributes:
        limit: The largest frame accepted, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """The least number of bytes that completes the current frame. To read no more leaves what follows unread."""
        size = len(self._buffer)
        return 4 - size if size < 4 else max(4 + self._announced() - size, 0)

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next whole frame, or None if it is incomplete.

        Raises:
            WireError: The peer announces a frame longer than the limit.
            TlsError: The peer begins a TLS handshake.
        """
        if len(self._buffer) < 4:
            return None
        length = self._announced()
        if length > self.limit:
            raise self._refusal(bytes(self._buffer[:80]), length)
        if len(self._buffer) < 4 + length:
            return None
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def _announced(self) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer)
        return int(length)

    def _refusal(self, head: bytes, length: int) -> WireError:
        if head.startswith(_TLS_HANDSHAKE):
            return TlsError(f"it uses TLS, but this process does not; {SET_TLS}")
        # A length beyond the limit is usually the first four letters of another protocol.
        if not all(0x20 <= byte < 0x7F for byte in head[:4]):
            return WireError(f"it announced a frame of {length} bytes, but the limit is {self.limit} bytes")
        line = head.splitlines()[0].decode("ascii", "replace")
        kind = "it looks like HTTP" if line.startswith(("HTTP", "<")) else "it sends text"
        return WireError(f"{kind}: {line!r}")


def read_frame(sock: socket.socket, decoder: FrameDecoder, until: float) -> bytes:
    """Read one frame, and no byte after it.

    Args:
        sock: A blocking connection. Its timeout is changed.
        decoder: Holds the bytes of the frame that have arrived.
        until: When to give up, in seconds of ``time.monotonic``.

    Raises:
        WireError: The peer announces a frame longer than the limit of the decoder.
        ConnectionResetError: The stream has ended.
        TimeoutError: The frame has not arrived in time.
    """
    while (frame := decoder.next()) is None:
        sock.settimeout(max(0.001, until - time.monotonic()))
        data = sock.recv(decoder.missing)
        if not data:
            raise ConnectionResetError("it closed the connection")
        decoder.feed(data)
    return frame
